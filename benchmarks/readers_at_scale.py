"""What reading costs when there is much to read: 10,000 runs, two runs of a million lines, a log of 1 GiB.

    python benchmarks/readers_at_scale.py                 # some minutes, 1.5 GB of temporary files at a time
    python benchmarks/readers_at_scale.py --scale 0.01 --only runs collect

The files are made first and read by the commands as a person types them, each in a process of its own: wall
time from the start of the command to its end, its processor time and its peak of resident memory. Files have
just been written, so they come from the page cache.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from podtune.run.collect import emit_record
from podtune.run.record import end_record, new_record

GIB = 2**30
ROWS = ("runs", "runs of 1,000 lines", "collect", "compare", "watch")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes")
    parser.add_argument("--only", nargs="*", choices=ROWS, default=ROWS, help="these rows")
    parser.add_argument("--folder", help="for the temporary files; default: the system's")
    args = parser.parse_args()
    count, steps, size = (int(args.scale * full) for full in (10_000, 1_000_000, GIB))
    print("| command | of | wall s | CPU s | peak MiB |\n|---|---|---|---|---|")
    for row in args.only:
        with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
            folder = Path(scratch)
            if row.startswith("runs"):
                lines = 1000 if "lines" in row else 40
                number = count // 10 if "lines" in row else count
                for index in range(number):
                    make_run(folder / f"run-{index:05d}", steps=lines * 10, lines=lines)
                what, command = f"{number:,} runs of {lines} lines", ["runs", folder]
            elif row == "collect":
                make_log(folder / "log", size)
                what, command = f"a log of {size / GIB:g} GiB with 3 records", ["collect", folder / "log"]
                command += ["--expect", 3]
            else:
                names = ["a", "b"] if row == "compare" else ["a"]
                for name in names:
                    make_run(folder / name, steps=steps, lines=steps)
                what = f"{len(names)} run{'s' if len(names) > 1 else ''} of {steps:,} lines"
                command = [row, *(folder / name for name in names), *(["--once"] if row == "watch" else [])]
            wall, cpu, peak = measured([str(word) for word in command])
            print(f"| {command[0]} | {what} | {wall:.1f} | {cpu:.1f} | {peak / 2**20:.0f} |", flush=True)
    return 0


def make_run(folder: Path, *, steps: int, lines: int) -> None:
    """A finished run of ``steps`` steps that logged ``lines`` times and evaluated ten times."""
    folder.mkdir()
    config = {f"key_{number}": number for number in range(200)} | {"max_steps": steps, "learning_rate": 1e-4}
    record = new_record(mode="sft", name=folder.name, config=config, world_size=1)
    record["measurements"] = {"steps": steps, "tokens": steps * 1000, "loss": {"first": 4.0, "last": 2.0}}
    end_record(record, "ok", 0)
    (folder / "run.json").write_text(json.dumps(record, indent=2))
    each = steps // lines
    with (folder / "metrics.jsonl").open("w") as file:
        for line in range(1, lines + 1):
            entry: dict[str, Any] = {"time": "2026-01-01T00:00:00.000000+00:00", "step": line * each}
            entry |= {"split": "train", "epoch": line / lines, "loss": 2 + 2 / line, "grad_norm": 1.0}
            entry |= {"learning_rate": 1e-4, "tokens": line * each * 1000, "tokens_per_s": 1234.5}
            file.write(json.dumps(entry | {"step_time_s": 0.81, "eta_s": 12.5}) + "\n")
            if line % max(1, lines // 10) == 0:
                keys = ("time", "step", "epoch", "tokens", "loss")
                file.write(json.dumps({key: entry[key] for key in keys} | {"split": "eval"}) + "\n")


def make_log(path: Path, size: int) -> None:
    """``size`` bytes of a pod's log, with a record at its beginning, middle and end."""
    step = (
        "2026-01-01T00:00:00.0Z step 123456/999999  loss 2.3456  grad 1.234  lr 1.00e-04  12,345 tokens/s\n"
    )
    block = (step * (2**20 // len(step))).encode()
    with path.open("wb") as file:
        for number in range(3):
            record = new_record(mode="sft", name=f"run-{number}", config={"seed": number}, world_size=1)
            end_record(record, "ok", 0)
            printed = io.StringIO()
            emit_record(record, printed)
            file.write(printed.getvalue().encode())
            for _ in range(size // len(block) // 2 if number < 2 else 0):
                file.write(block)


def measured(words: list[str]) -> tuple[float, float, int]:
    """Seconds and processor seconds of a podtune command, and the peak of its resident memory in bytes."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "podtune", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
