"""Plans of benchmark cases that were measured, so that theory stands beside them. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from podtune.plan.hardware import of_device
from podtune.plan.models import SIZES, resized, shape_of
from podtune.plan.plan import Plan, estimate
from podtune.plan.setup import TrainingSetup
from podtune.plan.shapes import Transformer
from podtune.run.errors import UserError
from podtune.run.record import Json, Measurements

# The benchmark keeps fp32 weights and runs the products in these.
PRECISIONS = {"fp32": "fp32", "bf16": "bf16-autocast", "fp16": "fp16-autocast", "fp8": "fp8-autocast"}
_SAME = (
    *("precision", "global_batch_size", "sequence_length", "activation_checkpointing"),
    *("compile", "optimizer", "threads", "norm", *SIZES),
)


def plans(records: Sequence[Json]) -> list[Plan | None]:
    """A plan for each record, None where the formulas do not cover it or the record lacks what they need.

    The compute rate is taken from the ``single`` case of the same model and settings where there is one: a
    plan then predicts what distributing costs, not how fast this machine multiplies. Otherwise it is the
    peak times 0.4. A case that ran on a CPU has no time.
    """
    rates: dict[tuple[str, ...], float] = {}  # FLOP/s that one process reached
    for record in records:
        step_time = Measurements.read(record).step_time_s
        alone = record.get("strategy") == "single" and record.get("status") == "ok"
        if alone and step_time and step_time.p50 > 0 and (plan := _plan(record, None)):
            rates[_comparison_key(record)] = plan.flops_per_step / step_time.p50
    return [_plan(record, rates.get(_comparison_key(record))) for record in records]


def _comparison_key(record: Json) -> tuple[str, ...]:
    """Everything that two cases share whose speeds are comparable: all but strategy and world size."""
    config, hardware = record.get("config", {}), record.get("provenance", {}).get("hardware", {})
    device = str(hardware.get("gpu") or hardware.get("cpu"))
    return (str(record.get("model")), *(repr(config.get(name)) for name in _SAME), device)


def _plan(record: Json, rate: float | None) -> Plan | None:
    try:
        setup = _setup(record)
        # None for a CPU, and for a GPU without a row
        hardware = of_device(record.get("provenance", {}).get("hardware", {}).get("gpu") or "")
        if hardware is None or rate is None:
            return estimate(setup, hardware)
        # measured, the update of the weights included
        flops = {**hardware.flops, setup.precision.removesuffix("-autocast"): rate}
        return estimate(setup, replace(hardware, flops=flops, memory_bandwidth=float("inf")), utilisation=1.0)
    except (UserError, KeyError, TypeError):
        return None


def _setup(record: Json) -> TrainingSetup:
    config = record.get("config", {})
    shape = resized(shape_of(record["model"]), **{name: config.get(name) or 0 for name in SIZES})
    if isinstance(shape, Transformer) and config.get("sequence_length"):
        shape = replace(shape, sequence_length=config["sequence_length"])
    return TrainingSetup(
        shape,
        strategy=record["strategy"],
        world_size=record["world_size"],
        precision=PRECISIONS.get(config.get("precision", ""), ""),
        batch_size=record["global_batch_size"],
        nodes=record.get("nnodes", 1),
        micro_batches=config.get("micro_batches") or None,
        accumulation=config.get("accumulation", 1),
        activation_checkpointing=config.get("activation_checkpointing", "none"),
        optimizer=config.get("optimizer", "adamw"),
        shard_size=config.get("shard_size") or None,
    )
