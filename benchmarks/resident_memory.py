"""Resident memory by step of a CPU run whose batches differ in length: podtune, podtune without what keeps it
flat, and plain TRL.

    python benchmarks/resident_memory.py                       # 80 steps each, bf16; minutes
    python benchmarks/resident_memory.py --steps 3000 --fp32

7 M parameters (SmolLM3 architecture, random), 8 rows a batch of lognormal lengths. Each line is a process of
its own with one thread; resident memory is read after each step, the peak is the kernel's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
KINDS = {"podtune": "podtune", "unbounded": "podtune, oneDNN's caches and the heap as they are", "trl": "TRL"}
CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest row")
    parser.add_argument("--fp32", action="store_true", help="without bf16 autocast")
    parser.add_argument("--only", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind:
        print(json.dumps(train(args)))
        return 0
    places = [round(args.steps * share) for share in (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)]
    print(f"resident MiB after step {', '.join(map(str, places))}; {'fp32' if args.fp32 else 'bf16'}")
    print(f"| | {' | '.join(map(str, places))} | peak | CPU s |\n|---{'|---' * (len(places) + 2)}|")
    for kind in args.only:
        env = {name: value for name, value in os.environ.items() if name not in CACHES}
        command = [sys.executable, __file__, "--kind", kind, *sys.argv[1:]]
        output = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = json.loads(output.splitlines()[-1])
        cells = [f"{found['resident'][place - 1]:,.0f}" for place in places]
        print(
            f"| {KINDS[kind]} | {' | '.join(cells)} | {found['peak']:,.0f} | {found['cpu_s']:.0f} |",
            flush=True,
        )
    return 0


def train(args: argparse.Namespace) -> dict[str, Any]:
    """One run in this process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from podtune.machine.facts import cpu_threads
    from podtune.run.library_environment import set_library_environment
    from podtune.run.world import World

    if args.kind == "podtune":
        set_library_environment(cpu_threads(World()))
    import datasets
    import psutil
    import torch
    from sft_vs_trl import plain_trl, podtune, quiet, random_model
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    model, tokenizer = random_model()
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(2000, generator=generator) * 0.9).exp() * 0.35 * args.longest
    counts = lengths.clamp(16, args.longest).int().tolist()
    ids = [torch.randint(2, 4096, (count,), generator=generator).tolist() for count in counts]
    rows = datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})
    resident: list[float] = []

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            resident.append(psutil.Process().memory_info().rss / 2**20)

    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {"output_dir": folder, "max_steps": args.steps, "use_cpu": True}
        common |= {"per_device_train_batch_size": 8, "save_strategy": "no", "report_to": "none"}
        common |= {"disable_tqdm": True, "logging_steps": 10} | ({"bf16": False} if args.fp32 else {})
        if args.kind == "trl":
            trainer = plain_trl(model, tokenizer, rows, common)
        else:
            trainer = podtune(model, tokenizer, rows, common, World(), heap=args.kind == "podtune")
        trainer.add_callback(Look())
        quiet(trainer)
        began = time.process_time()
        trainer.train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB
    return {"resident": resident, "peak": peak, "cpu_s": time.process_time() - began}


if __name__ == "__main__":
    sys.exit(main())
