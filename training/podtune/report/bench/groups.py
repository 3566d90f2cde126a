"""Cells that may be compared, and what they say together. No torch.

Only cells of one model, precision, global batch, commit, device and settings stand in one table or plot; what
differs makes another group, and the report says in what the groups differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from podtune.report.bench.records import Source
from podtune.run.record import RESIDENT_PEAK, Json, Measurements, Summary

# How simple a strategy is to run and to understand: among equals the first is advised.
SIMPLEST_FIRST = (
    "single",
    "ddp",
    "fsdp-grad-op",
    "fsdp",
    "zero2",
    "zero3",
    "hsdp",
    "pipeline-1f1b",
    "pipeline-gpipe",
    "gpipe",
    "tensor",
    "naive-mp",
)
SETTINGS = (
    *(
        "precision",
        "global_batch_size",
        "sequence_length",
        "accumulation",
        "activation_checkpointing",
        "compile",
        "optimizer",
    ),
    *("fused_optimizer", "norm", "pretrained", "threads", "data", "seed", "steps"),
)


@dataclass
class MeasuredCell:
    """One measured cell with its plan. Speeds are absent unless the losses equalled a single process's."""

    record: Json
    path: str
    plan: Json | None
    key: str = ""
    efficiency: float | None = None

    @cached_property
    def measurements(self) -> Measurements:
        return Measurements.read(self.record)

    def planned(self, key: str) -> Any:
        """A value of the plan, or None."""
        return None if self.plan is None else self.plan.get(key)

    @property
    def strategy(self) -> str:
        return str(self.record["strategy"])

    @property
    def world_size(self) -> int:
        return int(self.record.get("world_size") or 0)

    @property
    def label(self) -> str:
        """As tables and plots call it."""
        return f"{self.strategy} ×{self.world_size}"

    @property
    def parity(self) -> str:
        """ok, failed, skipped, undefined, or unknown."""
        return self.measurements.parity.status if self.measurements.parity else "unknown"

    @property
    def fast(self) -> bool:
        """True if its speed may be shown."""
        return self.record["status"] == "ok" and self.parity != "failed"

    @property
    def unit(self) -> str:
        return "tokens/s" if self.measurements.tokens_per_s is not None else "images/s"

    @property
    def throughput(self) -> float | None:
        """Tokens or images a second over all processes."""
        if not self.fast:
            return None
        measured = self.measurements
        return measured.samples_per_s if measured.tokens_per_s is None else measured.tokens_per_s

    @property
    def step_time(self) -> Summary | None:
        return self.measurements.step_time_s if self.fast else None

    @property
    def mean_step_s(self) -> float:
        """Of a cell with a speed: its record was refused if it had no step time."""
        assert self.step_time is not None
        return self.step_time.mean

    @property
    def noise(self) -> float:
        """Error of the mean step time (s): its standard error, or half the range of the repeats' medians."""
        step = self.step_time
        if step is None:
            return 0.0
        repeats = step.p50_by_repeat or (0.0,)
        return max((step.std or 0.0) / math.sqrt(step.n), (max(repeats) - min(repeats)) / 2)

    def as_fast_as(self, other: MeasuredCell) -> bool:
        """True if the two mean step times differ by no more than twice their noise together."""
        mine, theirs = self.step_time, other.step_time
        if mine is None or theirs is None:
            return False
        return abs(mine.mean - theirs.mean) <= 2 * math.hypot(self.noise, other.noise)

    @property
    def formula_bytes(self) -> float | None:
        """The plan's bytes of the same rank."""
        size: float | None = self.planned("bytes_per_step") if self.world_size > 1 else None
        return size

    @property
    def bubble(self) -> float | None:
        """The formula's idle share of a step; None for strategies that do not cut the layers."""
        share: float | None = self.planned("bubble_share")
        return share or None

    @property
    def memory_gib(self) -> float | None:
        """Of the fullest process: on a CPU its tensors at their most, on a GPU the allocator's peak."""
        if not self.fast:
            return None
        counted, peaks = self.measurements.counted_memory_gib, self.measurements.peak_memory_gib
        return counted.total if counted else peaks.max if peaks else None

    @property
    def memory_kind(self) -> str | None:
        """Kind of the memory measured: tensors, the allocator's peak, or the process's resident peak."""
        if self.memory_gib is None:
            return None
        counted, peaks = self.measurements.counted_memory_gib, self.measurements.peak_memory_gib
        return "tensors, counted" if counted else peaks.kind if peaks else None

    @property
    def memory_is_the_process(self) -> bool:
        """True for a CPU's resident peak, most of which is libraries."""
        return (self.memory_kind or "").startswith(RESIDENT_PEAK)

    @property
    def sent_bytes(self) -> float | None:
        """Counted, of the rank that sends most; None for one process, which has nobody to send to."""
        communication = self.measurements.communication if self.fast and self.world_size > 1 else None
        return communication.bytes_per_step if communication else None


@dataclass
class Group:
    """Cells that may be compared, by strategy and world size; ``identity`` is what they share."""

    identity: dict[str, Any]
    cells: list[MeasuredCell] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Model, precision, batch, device and commit."""
        identity = self.identity
        kind = "sequences" if identity["sequence_length"] else "images"
        rows = f"{identity['global_batch_size']} {kind} a step"
        if each := identity["per_device_batch_size"]:
            batches = {cell.world_size: cell.record.get("global_batch_size") for cell in self.cells}
            effective = ", ".join(f"{batch} on {ranks}" for ranks, batch in sorted(batches.items()))
            rows = f"{each} {kind} a step and process (effective batch {effective})"
        return (
            f"{identity['model']}, {identity['precision']}, {rows}, "
            f"{identity['device']}, commit {identity['commit'][:12]}"
        )

    @property
    def scaling(self) -> str:
        """``weak`` where every process has its own rows, so that throughput a process should be kept.

        ``strong`` where one batch is divided, so that time should be.
        """
        return "weak" if self.identity["per_device_batch_size"] else "strong"

    @property
    def measured(self) -> list[MeasuredCell]:
        """Cells with a speed."""
        return [cell for cell in self.cells if cell.throughput is not None]

    @property
    def world_sizes(self) -> list[int]:
        return sorted({cell.world_size for cell in self.measured})

    def at(self, strategy: str, world_size: int) -> MeasuredCell | None:
        """The cell with a speed."""
        return next(
            (cell for cell in self.measured if (cell.strategy, cell.world_size) == (strategy, world_size)),
            None,
        )

    @property
    def on_cpu(self) -> bool:
        return not self.identity["gpu"]


def identity_of(record: Json) -> dict[str, Any]:
    """Everything that two records must share to be compared."""
    config, provenance = record["config"], record.get("provenance") or {}
    hardware = provenance.get("hardware") or {}
    each = config.get("per_device_batch_size") or None  # records from before the option have none
    versions = provenance.get("versions") or {}
    return {
        "model": record["model"],
        **{name: config.get(name) for name in SETTINGS},
        # options that change a model's size; records from before them have none
        **{name: config.get(name) or None for name in ("layers", "heads", "width", "context")},
        "global_batch_size": None
        if each
        else record.get("global_batch_size") or config.get("global_batch_size"),
        "per_device_batch_size": each,
        "device": str(hardware.get("gpu") or hardware.get("cpu") or "unknown device"),
        "gpu": hardware.get("gpu"),
        "torch": versions.get("torch"),
        "commit": str(provenance.get("git_sha") or "unknown"),
    }


def grouped(sources: Sequence[Source], plans: Sequence[Json | None]) -> list[Group]:
    """The groups, largest first. Of a cell that is there twice the newest counts, and the group says so."""
    groups: dict[str, Group] = {}
    for source, plan in sorted(
        zip(sources, plans, strict=True), key=lambda pair: str(pair[0].record.get("started_at")), reverse=True
    ):
        identity = identity_of(source.record)
        cells_alike = groups.setdefault(repr(identity), Group(identity))
        cell = MeasuredCell(source.record, source.path, plan)
        if any(
            (cell.strategy, cell.world_size) == (other.strategy, other.world_size)
            for other in cells_alike.cells
        ):
            cells_alike.repeated.append(f"{cell.label} ({source.path})")
        else:
            cells_alike.cells.append(cell)
    for number, cells_alike in enumerate(groups.values()):
        cells_alike.cells.sort(key=lambda cell: (cell.world_size, simplicity(cell.strategy), cell.strategy))
        _efficiencies(cells_alike)
        for cell in cells_alike.cells:
            cell.key = f"{number}-{cell.strategy}-{cell.world_size}"
    return sorted(groups.values(), key=lambda each: (-len(each.cells), each.title))


def simplicity(strategy: str) -> int:
    """Rank among SIMPLEST_FIRST; unknown strategies come last."""
    return SIMPLEST_FIRST.index(strategy) if strategy in SIMPLEST_FIRST else len(SIMPLEST_FIRST)


def _efficiencies(group: Group) -> None:
    """Set each scaling efficiency: throughput over n times that of one process.

    The process is of the same strategy or, failing that, of ``single``.
    """
    for cell in group.measured:
        base = group.at(cell.strategy, 1) or group.at("single", 1)
        if cell.world_size > 1 and base is not None and cell.throughput and base.throughput:
            cell.efficiency = cell.throughput / (cell.world_size * base.throughput)


def differences(groups: Sequence[Group]) -> list[str]:
    """For groups of one model: in what they differ, which is why they are not in one table."""
    lines = []
    models = sorted({group.identity["model"] for group in groups})
    for model in models:
        several = [group for group in groups if group.identity["model"] == model]
        differing = [
            key
            for key in several[0].identity
            if len({repr(group.identity[key]) for group in several}) > 1 and key != "gpu"
        ]
        if differing:
            what = "; ".join(
                f"{key.replace('_', ' ')}: {', '.join(sorted({str(each.identity[key]) for each in several}))}"
                for key in differing
            )
            lines.append(
                f"{model} was measured in {len(several)} ways that are not compared with each "
                f"other. They differ in {what}."
            )
    return lines
