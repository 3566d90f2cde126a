"""Tokenising a set of questions and answers: podtune, cold and from its cache, beside TRL's SFTTrainer.

    python benchmarks/tokenising.py                       # 20,000 rows
    python benchmarks/tokenising.py --rows 1000000        # TRL takes half an hour

Both read the same Parquet file with the same tokenizer (1,024 byte-level tokens, a chat template) and cut at
1,024 tokens. Each side is a process of its own, imports done before the clock starts; podtune takes all
cores, TRL one, as it does by default. Tokens are counted and compared. The peak is the kernel's, of the whole
process.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIDES = ("podtune", "trl")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--only", nargs="*", choices=SIDES, default=SIDES)
    parser.add_argument("--folder", help="for the temporary files; default: the system's")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps({"podtune": podtune, "trl": trl}[args.side](Path(args.folder))))
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        make(Path(scratch), args.rows)
        print(
            f"{args.rows:,} rows\n| | cold s | rows/s | from the cache ms | peak MiB |\n|---|---|---|---|---|"
        )
        tokens = set()
        for side in args.only:
            command = [sys.executable, __file__, "--side", side, "--folder", scratch]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found = json.loads(output.splitlines()[-1])
            tokens.add(found["tokens"])
            warm = f"{found['warm_s'] * 1000:.0f}" if "warm_s" in found else "-"
            rate, peak = f"{args.rows / found['cold_s']:,.0f}", f"{found['peak_mib']:,.0f}"
            print(f"| {side} | {found['cold_s']:.2f} | {rate} | {warm} | {peak} |", flush=True)
    if len(tokens) > 1:
        print(f"the two sides did not make the same tokens: {tokens}")
    return int(len(tokens) > 1)


def make(folder: Path, count: int) -> None:
    """A file of ``count`` rows of about 90 words, written a piece at a time, and a micro model."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from podtune.sft.model.build import build_model

    chosen = random.Random(0)
    words = [
        "".join(chosen.choices("abcdefghijklmnopqrstuvwxyz", k=chosen.randint(2, 9))) for _ in range(5000)
    ]
    schema = pa.schema([("question", pa.string()), ("answer", pa.string())])
    file = folder / "train.parquet"
    with pq.ParquetWriter(file, schema) as writer:
        for start in range(0, count, 10_000):
            texts = [
                {
                    "question": " ".join(chosen.choices(words, k=15)),
                    "answer": " ".join(chosen.choices(words, k=25)),
                }
                for _ in range(min(10_000, count - start))
            ]
            writer.write_table(pa.Table.from_pylist(texts, schema))
    small = folder / "small.parquet"
    pq.write_table(pq.ParquetFile(file).read_row_group(0).slice(0, 2000), small)
    build_model("micro", small, folder / "model")


def podtune(folder: Path) -> dict[str, Any]:
    from podtune.sft.data.source import DataSource
    from podtune.sft.data.tokenise import tokenised
    from podtune.sft.data.tokenizer import TokenizeOptions, load_tokenizer
    from podtune.sft.source.model import locate_model

    tokenizer = load_tokenizer(locate_model(str(folder / "model"), None))
    import datasets  # noqa: F401

    source = DataSource(str(folder / "train.parquet"))

    def once() -> tuple[float, Any]:
        began = time.perf_counter()
        made = tokenised(
            source,
            tokenizer,
            TokenizeOptions(max_length=1024),
            cache_dir=folder / "cache",
        )
        return time.perf_counter() - began, made

    cold, made = once()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB
    warm, again = once()
    assert again.from_cache
    return {"cold_s": cold, "warm_s": warm, "peak_mib": peak, "tokens": made.stats.tokens}


def trl(folder: Path) -> dict[str, Any]:
    import datasets
    import transformers
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    common = {"use_cpu": True, "report_to": "none", "max_length": 1024}
    options = SFTConfig(str(folder / "run"), **common)

    def once(name: str) -> Any:
        rows = datasets.load_dataset("parquet", data_files=str(folder / name), split="train")
        roles = (("question", "user", "prompt"), ("answer", "assistant", "completion"))
        rows = rows.map(
            lambda row: {new: [{"role": role, "content": row[old]}] for old, role, new in roles},
            remove_columns=["question", "answer"],
        )
        return SFTTrainer(
            model=model, args=options, train_dataset=rows, processing_class=tokenizer
        ).train_dataset

    once("small.parquet")
    began = time.perf_counter()
    rows = once("train.parquet")
    cold = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"cold_s": cold, "peak_mib": peak, "tokens": sum(map(len, rows["input_ids"]))}


if __name__ == "__main__":
    sys.exit(main())
