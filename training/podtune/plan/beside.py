"""Plans of cells that were measured, so that theory stands beside every figure. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from podtune.plan.hardware import Hardware, hardware_row
from podtune.plan.models import shape_of
from podtune.plan.plan import UTILISATION, Plan, estimate
from podtune.run.errors import UserError
from podtune.run.record import Json, Measurements

# The benchmark keeps fp32 weights and runs the products in these.
PRECISIONS = {"fp32": "fp32", "bf16": "bf16-autocast", "fp16": "fp16-autocast", "fp8": "fp8-autocast"}


def comparison_key(record: Json) -> tuple[Any, ...]:
    """What two cells must share for one's speed to foretell the other's: everything but strategy and world
    size.
    """
    config = record.get("config", {})
    names = (
        "precision",
        "global_batch_size",
        "sequence_length",
        "activation_checkpointing",
        "compile",
        "optimizer",
        "threads",
        "norm",
    )
    return (record.get("model"), *(repr(config.get(name)) for name in names), _device(record))


def plans(records: Iterable[Json]) -> list[Plan | None]:
    """A plan for each record, None where the formulas do not cover it or the record lacks what they need.

    The compute rate is taken from the ``single`` cell of the same model and settings where there is one: a
    plan then predicts what distributing costs, not how fast this machine multiplies. Otherwise it is the
    peak times 0.4. A cell that ran on a CPU has no time.
    """
    all_records = list(records)
    rates: dict[tuple[Any, ...], float] = {}
    for record in all_records:
        if (
            record.get("strategy") == "single"
            and record.get("status") == "ok"
            and (rate := _rate(record)) is not None
        ):
            rates[comparison_key(record)] = rate
    return [_plan(record, rates.get(comparison_key(record))) for record in all_records]


def plan_of(record: Json, hardware: Hardware | None, utilisation: float = UTILISATION) -> Plan:
    """The plan for a record's cell on ``hardware``.

    Raises:
        UserError: the formulas do not cover it.
        KeyError: the record lacks what they need.
    """
    config = record.get("config", {})
    return estimate(
        shape_of(record["model"], config.get("sequence_length") or None),
        strategy=record["strategy"],
        world_size=record["world_size"],
        precision=PRECISIONS.get(config.get("precision", ""), ""),
        batch_size=record["global_batch_size"],
        hardware=hardware,
        nodes=record.get("nnodes", 1),
        micro_batches=config.get("micro_batches") or None,
        accumulation=config.get("accumulation", 1),
        activation_checkpointing=config.get("activation_checkpointing", "none"),
        optimizer=config.get("optimizer", "adamw"),
        shard_size=config.get("shard_size") or None,
        zero_bucket=True,
        bucket_view=config.get("gradient_as_bucket_view") is not False,
        utilisation=utilisation,
    )


def _device(record: Json) -> str:
    hardware = record.get("provenance", {}).get("hardware", {})
    return str(hardware.get("gpu") or hardware.get("cpu") or "unknown")


def _rate(record: Json) -> float | None:
    """FLOP/s that one process reached, by the planner's count of FLOPs."""
    step_time = Measurements.read(record).step_time_s
    plan = _plan(record, None)
    return plan.flops_per_step / step_time.p50 if plan and step_time and step_time.p50 > 0 else None


def _plan(record: Json, rate: float | None) -> Plan | None:
    precision = PRECISIONS.get(record.get("config", {}).get("precision", ""))
    try:
        return plan_of(record, *_hardware(record, precision or "", rate))
    except (UserError, KeyError, TypeError):
        return None


def _hardware(record: Json, precision: str, rate: float | None) -> tuple[Hardware | None, float]:
    """The device of the record, its peak replaced by ``rate`` where that is known; and the utilisation to
    reckon with.
    """
    recorded = record.get("provenance", {}).get("hardware", {})
    try:
        row = hardware_row(recorded["gpu"])
    except (UserError, KeyError):
        return None, UTILISATION
    if rate is None:
        return row, UTILISATION
    flops = {**row.flops, precision.removesuffix("-autocast"): rate}
    return Hardware(row.name, row.memory_gib, flops, float("inf"), row.link, row.source), 1.0
