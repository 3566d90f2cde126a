"""From the command to the end of the first step: ``podtune train`` against ``trl sft`` on the same YAML.

    python benchmarks/start_up.py
    python benchmarks/start_up.py --cold      # files read from the disk each time; needs root
    python benchmarks/start_up.py --rows 20000 --repeats 3

A model of 0.26 M parameters and rows of prompt and completion that are made first, so what is timed is the
programs and their libraries. The two take turns; the first pair is not counted. Each starts with empty
caches of tokenised rows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

BIN = Path(sys.executable).parent
FIRST_STEP = {"podtune": re.compile(r"^step +1/"), "trl": re.compile(r"['\"]loss['\"]: ")}
LIMIT_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000, help="rows of the data set")
    parser.add_argument("--repeats", type=int, default=5, help="pairs that count")
    parser.add_argument("--cold", action="store_true", help="forget the page cache before each start")
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {"podtune": [], "trl": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder, args.rows)
        for pair in range(args.repeats + 1):
            for side in seconds if pair % 2 else reversed(seconds):
                if args.cold:
                    os.sync()
                    Path("/proc/sys/vm/drop_caches").write_text("3")
                took = first_step(side, folder, f"{side}-{pair}")
                if pair:
                    seconds[side].append(took)
    files = "cold" if args.cold else "warm"
    print(f"{args.rows} rows, {files} files, {args.repeats} pairs; seconds to the first step")
    for side, times in seconds.items():
        print(f"{side:8} {statistics.median(times):6.2f} ({min(times):.2f} - {max(times):.2f})")
    ratios = [a / b for a, b in zip(seconds["podtune"], seconds["trl"], strict=True)]
    print(f"ratio    {statistics.median(ratios):6.2f} ({min(ratios):.2f} - {max(ratios):.2f})")
    return 0


def prepare(folder: Path, rows: int) -> None:
    """The model, train.jsonl and the YAML that both read."""
    from podtune.demo_data.build import build
    from podtune.sft.data.readers import rows_at
    from podtune.sft.model.build import build_model

    build(folder / "qa", rows=rows)
    build_model("micro", folder / "qa", folder / "model")
    (folder / "data").mkdir()
    with (folder / "data" / "train.jsonl").open("w") as file:
        for row in rows_at(folder / "qa"):
            file.write(json.dumps({"prompt": row["question"], "completion": row["answer"]}) + "\n")
    settings = {
        "model_name_or_path": str(folder / "model"),
        "dataset_name": str(folder / "data"),
        "max_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
    }
    (folder / "sft.yaml").write_text(yaml.safe_dump(settings))


def first_step(side: str, folder: Path, name: str) -> float:
    """Seconds until ``side`` says that its first step is done."""
    words = [str(BIN / side), {"podtune": "train", "trl": "sft"}[side]]
    words += ["--config", f"{folder}/sft.yaml", "--output_dir", f"{folder}/{name}"]
    environment = os.environ | {
        "HF_HOME": str(folder / f"{name}-home"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    began = time.perf_counter()
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        said = []
        for line in process.stdout or ():
            said.append(line)
            if FIRST_STEP[side].search(line):
                took = time.perf_counter() - began
                process.wait(LIMIT_S)
                return took
    sys.exit(f"{side} ended with {process.returncode} before its first step:\n{''.join(said[-30:])}")


if __name__ == "__main__":
    raise SystemExit(main())
