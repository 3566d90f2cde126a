"""Podtune against plain TRL on the CPU, over lengths of rows, processes and threads, full training and LoRA:
docs/results/cpu-speed.md.

    python benchmarks/speed_table.py --output docs/results/cpu-speed.md
    python benchmarks/speed_table.py --rows short --steps 5 --repeats 1          # minutes; to the terminal

Each row is one ``benchmarks/sft_vs_trl.py``: both sides in turns on identical batches, equality first.
The page holds the rows that are measured; they are kept beside it, and the same command goes on. The machine
should do nothing else. Ends with 1 if a side's losses differ.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from sft_vs_trl import TOLERANCE

HERE = Path(__file__).resolve().parent
ROWS = ("short", "mixed", "full")
WORLDS = ((1, 1), (1, 2), (2, 1))  # processes, threads of each


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--steps", type=int, default=10, help="timed steps a repeat; full rows take a third")
    parser.add_argument("--repeats", type=int, default=3, help="interleaved pairs")
    parser.add_argument("--output", type=Path, help="Markdown; without it the table is printed")
    args = parser.parse_args()
    # of these settings alone: one table has one
    kept = args.output.with_suffix(f".{args.steps}x{args.repeats}.json") if args.output else None
    done: dict[str, Any] = json.loads(kept.read_text()) if kept and kept.exists() else {}
    for rows in args.rows:
        for lora in (False, True):
            for processes, threads in WORLDS:
                steps = max(2, args.steps // 3) if rows == "full" else args.steps
                words = ["--rows", rows, "--processes", str(processes), "--threads", str(threads)]
                words += ["--steps", str(steps), "--repeats", str(args.repeats), *["--lora"] * lora]
                key = " ".join(words)
                if key not in done:
                    print(f"sft_vs_trl.py {key}", file=sys.stderr, flush=True)
                    done[key] = measured(words)
                    if args.output and kept:
                        kept.write_text(json.dumps(done))
                        args.output.write_text(table(done, args.steps, args.repeats), encoding="utf-8")
    if kept:
        kept.unlink()
    else:
        print(table(done, args.steps, args.repeats))
    return int(any(max(row["fp32_relative_difference"].values()) > TOLERANCE for row in done.values()))


def measured(words: list[str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, HERE / "sft_vs_trl.py", *words, "--json"], stdout=subprocess.PIPE, text=True
    )
    if not done.stdout:
        sys.exit(done.returncode or 1)
    row: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return row


def table(done: dict[str, Any], steps: int, repeats: int) -> str:
    """The page of what was measured so far."""
    return page([done[key] for key in sorted(done, key=_place)], steps, repeats)


def _place(key: str) -> tuple[int, bool, str]:
    words = key.split()
    return ROWS.index(words[1]), "--lora" in words, key


def page(rows: list[dict[str, Any]], steps: int, repeats: int) -> str:
    """The table with what it was measured on."""
    import torch
    import transformers
    import trl

    measured_rows = list(dict.fromkeys(row["rows"] for row in rows))
    only = "" if len(measured_rows) == len(ROWS) else f"--rows {' '.join(measured_rows)} "
    shape = f"{only}--steps {steps} --repeats {repeats}"
    versions = (
        f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}, "
        f"trl {trl.__version__}"
    )
    lines = [
        "# Speed of a fine-tune on the CPU, against plain TRL",
        "",
        f"`python benchmarks/speed_table.py {shape} --output docs/results/cpu-speed.md`, "
        f"on {os.cpu_count()} cores ({platform.machine()}), {versions}. A model of 7 M parameters, batches "
        "of 8 rows a process, AdamW; plain TRL is `SFTTrainer` with its defaults (padded batches, bf16, "
        "activation checkpointing). Both sides train on the same rows in the same order, in turns, each in "
        "processes of its own; real tokens are counted. Median and (lowest - highest) of "
        f"{repeats} pairs of {steps} timed steps (full rows: a third of them); the last column is the "
        "largest relative difference of loss and of gradient norm over six steps in fp32.",
        "",
        "| rows | trained | processes x threads | TRL, tokens/s | podtune, tokens/s | **faster by** | fp32 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        speeds = [row["tokens_per_s"][side]["median"] for side in ("trl", "podtune")]
        ratio = row["ratio"]
        lines.append(
            f"| {row['rows']} | {'LoRA' if row['lora'] else 'all'} | {row['processes']} x {row['threads']} | "
            + " | ".join(f"{speed:,.0f}" for speed in speeds)
            + f" | **{ratio['median']:.2f}** ({ratio['min']:.2f} - {ratio['max']:.2f}) | "
            + f"{max(row['fp32_relative_difference'].values()):.0e} |"
        )
    lines += [
        "",
        "Short rows are lognormal with a mean of 87 tokens, mixed ones lognormal up to 1,024, full ones have "
        "1,024 each.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
