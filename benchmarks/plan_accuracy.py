"""What `podtune bench plan --hardware cpu` foretells beside what this machine took, cell by cell.

    podtune bench run --preset smoke --output /tmp/smoke1       # twice or more; the machine does nothing else
    python benchmarks/plan_accuracy.py /tmp/smoke1 /tmp/smoke2

Of several sweeps the median of the cells' medians counts. The records have to be this machine's: the plan is
its calibration, measured where it is not kept yet (``--calibrate``: anew).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from podtune.plan.beside import PRECISIONS
from podtune.plan.hardware import calibrated_cpu
from podtune.plan.models import shape_of
from podtune.plan.plan import estimate


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="of podtune bench run")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine anew")
    args = parser.parse_args()
    cells: dict[str, list[dict[str, Any]]] = {}
    for folder in args.folders:
        for path in sorted(folder.glob("cells/*/run.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["status"] == "ok" and "step_time_s" in record["measurements"]:
                cells.setdefault(record["name"], []).append(record)
    sizes = {(records[0]["world_size"], records[0]["config"]["threads"]) for records in cells.values()}
    rows = {size: calibrated_cpu(*size, anew=args.calibrate) for size in sorted(sizes)}
    print("| cell | measured (ms) | plan (ms) | error |\n|---|---:|---:|---:|")
    errors = []
    for name, records in cells.items():
        measured = statistics.median(each["measurements"]["step_time_s"]["p50"] for each in records)
        planned = _planned(records[0], rows[records[0]["world_size"], records[0]["config"]["threads"]])
        errors.append(planned / measured - 1)
        print(f"| {name} | {measured * 1e3:.1f} | {planned * 1e3:.1f} | {errors[-1]:+.0%} |")
    within = sum(abs(error) <= 0.15 for error in errors)
    print(f"\n{within} of {len(errors)} cells within 15 %")
    return 0


def _planned(record: dict[str, Any], hardware: Any) -> float:
    """Seconds of a step of the record's cell."""
    config = record["config"]
    plan = estimate(
        shape_of(record["model"], config.get("sequence_length") or None),
        strategy=record["strategy"],
        world_size=record["world_size"],
        precision=PRECISIONS[config["precision"]],
        batch_size=record["global_batch_size"],
        hardware=hardware,
        micro_batches=config.get("micro_batches") or None,
        accumulation=config["accumulation"],
        activation_checkpointing=config["activation_checkpointing"],
        optimizer=config["optimizer"],
        shard_size=config.get("shard_size") or None,
    )
    assert plan.step_time_s is not None
    return plan.step_time_s


if __name__ == "__main__":
    raise SystemExit(main())
