"""What `podtune bench plan --hardware cpu` foretells beside what this machine takes, cell by cell.

    python benchmarks/plan_accuracy.py                 # three rounds of five minutes; nothing else at work

Each round is a sweep of the smoke preset and a calibration of this machine after it, so that both see its
speed change; the median of the rounds counts. How near one sweep comes to another says what is to be
expected of any forecast here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from podtune.plan.beside import plan_of
from podtune.plan.hardware import calibrated_cpu

NEAR = 0.15


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    measured: list[dict[str, float]] = []
    planned: list[dict[str, float]] = []
    for _ in range(args.rounds):
        records = sweep()
        measured.append({each["name"]: each["measurements"]["step_time_s"]["p50"] for each in records})
        planned.append(plans(records))
    sweeps, forecast = usual(measured), usual(planned)
    print("| cell | measured (ms) | plan (ms) | error |\n|---|---:|---:|---:|")
    for name, seconds in sweeps.items():
        error = forecast[name] / seconds - 1
        print(f"| {name} | {seconds * 1e3:.1f} | {forecast[name] * 1e3:.1f} | {error:+.0%} |")
    print(f"\nwithin {NEAR:.0%}, of {len(sweeps)} cells: {near(forecast, sweeps)}")
    if args.rounds > 1:
        pairs = zip(planned, measured, strict=True)
        print(f"one calibration and the sweep before it: {span(near(*pair) for pair in pairs)}")
        print(f"one sweep and another: {span(near(*pair) for pair in itertools.permutations(measured, 2))}")
    return 0


def sweep() -> list[dict[str, Any]]:
    """The records of the smoke preset's cells that took steps, measured now."""
    with tempfile.TemporaryDirectory(prefix="podtune-") as folder:
        subprocess.run(
            [sys.executable, "-m", "podtune.cli", "bench", "run", "--preset", "smoke", "--output", folder],
            stdout=sys.stderr,
        )
        found = [
            json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(Path(folder).glob("cells/*/run.json"))
        ]
    records = [each for each in found if each["status"] == "ok" and "step_time_s" in each["measurements"]]
    return records or sys.exit("no cell took a step: see above")


def plans(records: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of a step of each record's cell by a calibration measured now."""
    sizes = {(each["world_size"], each["config"]["threads"]) for each in records}
    hardware = {size: calibrated_cpu(*size, anew=True) for size in sorted(sizes)}
    seconds = {}
    for each in records:
        plan = plan_of(each, hardware[each["world_size"], each["config"]["threads"]])
        assert plan.step_time_s is not None
        seconds[each["name"]] = plan.step_time_s
    return seconds


def usual(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The median of each cell."""
    return {name: statistics.median(each[name] for each in rounds if name in each) for name in rounds[0]}


def near(these: dict[str, float], those: dict[str, float]) -> int:
    """How many cells of ``those`` are as near as asked."""
    return sum(abs(these[name] / those[name] - 1) <= NEAR for name in those if name in these)


def span(counts: Iterable[int]) -> str:
    """Lowest and highest."""
    found = sorted(counts)
    return f"{found[0]} to {found[-1]}"


if __name__ == "__main__":
    raise SystemExit(main())
