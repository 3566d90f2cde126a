"""For how long training stops for a checkpoint of 100 M parameters on a volume that takes 50 MB/s.

    python benchmarks/save_stall.py
    python benchmarks/save_stall.py --hidden 256 --layers 2 --mb-per-s 20      # seconds

The real trainer takes a few steps with fp32 weights and AdamW, and saves. The copy to the volume is replaced
by one that takes so much longer, as no volume of that speed is at hand. Ends with 1 if training stopped for
more than 5 % of the time until the checkpoint was complete.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from podtune.run import background_save

sys.path.insert(0, str(Path(__file__).resolve().parent))
LIMIT = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=768, help="width of the model")
    parser.add_argument("--layers", type=int, default=12, help="layers of the model")
    parser.add_argument("--mb-per-s", type=float, default=50.0, help="what the volume takes")
    parser.add_argument("--saves", type=int, default=2, help="saves that are measured")
    args = parser.parse_args()

    import datasets
    import transformers
    from sft_vs_trl import podtune, quiet, random_model

    from podtune.run.world import World

    datasets.disable_progress_bars()
    _, tokenizer = random_model()
    sizes = {
        "hidden_size": args.hidden,
        "intermediate_size": 4 * args.hidden,
        "num_hidden_layers": args.layers,
    }
    heads = {"num_attention_heads": args.hidden // 64, "num_key_value_heads": args.hidden // 64}
    tokens = {"vocab_size": 4096, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    model = transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**sizes, **heads, **tokens))
    ids = [list(range(2, 34))] * 64
    rows = datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})
    background_save.copy = partial(slow_copy, bytes_per_s=args.mb_per_s * 1e6)
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {"output_dir": folder, "max_steps": args.saves + 1, "save_steps": 1}
        common |= {"per_device_train_batch_size": 1, "bf16": False, "use_cpu": True, "report_to": "none"}
        common |= {"disable_tqdm": True, "save_total_limit": 1, "logging_steps": 1}
        trainer = podtune(model, tokenizer, rows, common, World())
        trainer._async_save = True
        quiet(trainer)
        trainer.train()
        size = sum(path.stat().st_size for path in Path(folder).glob("checkpoint-*/*"))
    count = trainer.trained_parameters()
    print(f"{count / 1e6:.0f} M parameters, checkpoints of {size / 1e6:,.0f} MB, {args.mb_per_s:g} MB/s")
    print("| save | training stopped, s | complete after, s | share |\n|---|---|---|---|")
    shares = []
    # the last save stops the training by design; one that follows at once waits for the one before
    for before, save in zip([None, *trainer.saves], trainer.saves[:-1], strict=False):
        waited = max(0.0, before.began + before.write_s - save.began) if before else 0.0
        stall_s, write_s = save.stall_s - waited, save.write_s - waited
        shares.append(stall_s / write_s)
        print(f"| {save.step} | {stall_s:.2f} | {write_s:.1f} | {shares[-1]:.1%} |")
    return int(max(shares) > LIMIT)


def slow_copy(source: Path, target: Path, bytes_per_s: float) -> None:
    """What :func:`podtune.run.background_save.copy` does, on a volume of that speed."""
    began, done = time.monotonic(), 0
    with source.open("rb") as staged, target.open("wb", buffering=0) as file:
        while block := staged.read(background_save.BLOCK):
            done += file.write(block)
            time.sleep(max(0.0, done / bytes_per_s - (time.monotonic() - began)))
        os.fsync(file.fileno())


if __name__ == "__main__":
    sys.exit(main())
