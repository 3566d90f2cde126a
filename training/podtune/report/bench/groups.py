"""Cells that may be compared, and what they say together. No torch.

Only cells of one model, precision, global batch, commit, device and settings stand in one table or plot; what
differs makes another group, and the report says in what the groups differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from podtune.report.bench.records import Source
from podtune.report.draw.tables import Value, shown
from podtune.run.record import Json, Measurements, mapping

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
    "precision",
    "global_batch_size",
    "sequence_length",
    "accumulation",
    "activation_checkpointing",
    "compile",
    "optimizer",
    "fused_optimizer",
    "norm",
    "pretrained",
    "threads",
    "data",
    "seed",
    "steps",
)
Identity = dict[str, object]  # what records must share to be compared, by name


@dataclass
class MeasuredCell:
    """One measured cell with its plan: the report's columns in their order, then what they do not show.

    A figure that was not measured is None; so is every one of speed and memory unless the cell ended well and
    its losses equalled a single process's. Memory and bytes are those of the fullest process.
    """

    model: str
    strategy: str
    world_size: int
    status: str
    parity: str  # ok, failed, skipped, undefined, or unknown
    throughput: float | None  # tokens or images a second over all processes
    unit: str | None
    step_time_mean_s: float | None
    step_time_std_s: float | None
    step_time_p50_s: float | None
    step_time_p95_s: float | None
    step_time_plan_s: float | None
    mfu: float | None
    efficiency: float | None
    peak_memory_gib: float | None
    peak_memory_plan_gib: float | None
    bytes_per_step: float | None
    bytes_per_step_formula: float | None
    bubble_formula: float | None
    collectives_ms: str | None
    loss_last: float | None
    epochs: int | None
    epoch_loss: float | None
    accuracy: float | None
    precision: str | None
    global_batch_size: int | None
    per_device_batch_size: int | None
    commit: str | None
    record: str  # the file (relative to the report) where it stands
    noise_s: float = 0.0  # error of the mean step time
    reason: str = ""
    accuracy_by_epoch: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        """As tables and plots call it."""
        return f"{self.strategy} ×{self.world_size}"

    def as_fast_as(self, other: MeasuredCell) -> bool:
        """True if the two mean step times differ by no more than twice their noise together."""
        apart = abs((self.step_time_mean_s or 0.0) - (other.step_time_mean_s or 0.0))
        return apart <= 2 * math.hypot(self.noise_s, other.noise_s)

    def row(self) -> dict[str, Value]:
        return {name: getattr(self, name) for name in COLUMNS}


_NAMES = [each.name for each in fields(MeasuredCell)]
COLUMNS = tuple(_NAMES[: _NAMES.index("record") + 1])


def measured_cell(source: Source, plan: Json) -> MeasuredCell:
    """The cell of a record; ``plan`` is empty where there is none."""
    record, measured = source.record, Measurements.read(source.record)
    parity, world_size = measured.parity, int(record.get("world_size") or 0)
    reason = " ".join(str(record.get("reason") or "no reason given").split())
    if parity and parity.status == "failed":
        apart, allowed = parity.max_relative_difference, parity.tolerance
        reason = f"parity: failed, losses differ by {shown(apart)} where {shown(allowed)} is allowed"
    if record["status"] != "ok" or (parity and parity.status == "failed"):
        measured = Measurements()  # what was not computed, or something else, has no speed
    step, loss, training = measured.step_time_s, measured.loss, measured.training
    counted, peaks = measured.counted_memory_gib, measured.peak_memory_gib
    in_tokens = measured.tokens_per_s is not None
    throughput = measured.tokens_per_s if in_tokens else measured.samples_per_s
    # one process has nobody to send to
    sent = measured.communication if world_size > 1 else None
    times = (sent.seconds_by_collective if sent else None) or {}
    noise_s = 0.0
    if step:  # the mean's standard error, or half the range of the repeats' medians
        repeats = step.p50_by_repeat or (0.0,)
        noise_s = max((step.std or 0.0) / math.sqrt(step.n), (max(repeats) - min(repeats)) / 2)
    return MeasuredCell(
        model=record["model"],
        strategy=record["strategy"],
        world_size=world_size,
        status=record["status"],
        parity=parity.status if parity else "unknown",
        throughput=throughput,
        unit=None if throughput is None else "tokens/s" if in_tokens else "images/s",
        step_time_mean_s=step.mean if step else None,
        step_time_std_s=step.std if step else None,
        step_time_p50_s=step.p50 if step else None,
        step_time_p95_s=step.p95 if step else None,
        step_time_plan_s=plan.get("step_time_s"),
        mfu=measured.mfu,
        efficiency=None,
        peak_memory_gib=counted.total if counted else peaks.max if peaks else None,
        peak_memory_plan_gib=plan.get("total_gib"),
        bytes_per_step=sent.bytes_per_step if sent else None,
        bytes_per_step_formula=plan.get("bytes_per_step") if world_size > 1 else None,
        bubble_formula=plan.get("bubble_share") or None,
        collectives_ms=", ".join(f"{kind} {shown(seconds * 1e3)}" for kind, seconds in times.items()) or None,
        loss_last=loss.last if loss else None,
        epochs=len(training.loss_by_epoch) if training else None,
        epoch_loss=training.loss if training else None,
        accuracy=training.accuracy if training else None,
        precision=record["config"].get("precision"),
        global_batch_size=record.get("global_batch_size"),
        per_device_batch_size=record["config"].get("per_device_batch_size") or None,
        commit=mapping(record.get("provenance")).get("git_sha"),
        record=source.path,
        noise_s=noise_s,
        accuracy_by_epoch=(training.accuracy_by_epoch if training else None) or (),
        reason=f"{record['status']}: {reason}",
    )


@dataclass
class Group:
    """Cells that may be compared, by strategy and world size; ``identity`` is what they share."""

    identity: Identity
    cells: list[MeasuredCell] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Model, precision, batch, device and commit."""
        identity = self.identity
        kind = "sequences" if identity["sequence_length"] else "images"
        rows = f"{identity['global_batch_size']} {kind} a step"
        if each := identity["per_device_batch_size"]:
            batches = {cell.world_size: cell.global_batch_size for cell in self.cells}
            effective = ", ".join(f"{batch} on {ranks}" for ranks, batch in sorted(batches.items()))
            rows = f"{each} {kind} a step and process (effective batch {effective})"
        return (
            f"{identity['model']}, {identity['precision']}, {rows}, "
            f"{identity['device']}, commit {str(identity['commit'])[:12]}"
        )

    @property
    def measured(self) -> list[MeasuredCell]:
        return [cell for cell in self.cells if cell.throughput is not None]

    @property
    def failed(self) -> list[MeasuredCell]:
        return [cell for cell in self.cells if cell.throughput is None]

    @property
    def unit(self) -> str:
        """Of its throughputs."""
        return next((cell.unit for cell in self.measured if cell.unit), "")

    def at(self, strategy: str, world_size: int) -> MeasuredCell | None:
        return next(
            (cell for cell in self.measured if (cell.strategy, cell.world_size) == (strategy, world_size)),
            None,
        )


def identity_of(record: Json) -> Identity:
    """Everything that two records must share to be compared."""
    config, provenance = record["config"], mapping(record.get("provenance"))
    hardware, each = mapping(provenance.get("hardware")), config.get("per_device_batch_size") or None
    return {
        "model": record["model"],
        **{name: config.get(name) for name in SETTINGS},
        **{name: config.get(name) or None for name in ("layers", "heads", "width", "context")},
        "global_batch_size": None
        if each
        else record.get("global_batch_size") or config.get("global_batch_size"),
        "per_device_batch_size": each,
        "device": str(hardware.get("gpu") or hardware.get("cpu") or "unknown device"),
        "gpu": hardware.get("gpu"),
        "torch": mapping(provenance.get("versions")).get("torch"),
        "commit": str(provenance.get("git_sha") or "unknown"),
    }


def grouped(sources: Sequence[Source], plans: Sequence[Json | None]) -> list[Group]:
    """The groups, largest first. Of a cell that is there twice the newest counts, and the group says so."""
    groups: dict[str, Group] = {}
    pairs = zip(sources, plans, strict=True)
    for source, plan in sorted(pairs, key=lambda pair: str(pair[0].record.get("started_at")), reverse=True):
        identity = identity_of(source.record)
        group = groups.setdefault(repr(identity), Group(identity))  # a dictionary is no key
        cell = measured_cell(source, plan or {})
        if any(cell.label == other.label for other in group.cells):
            group.repeated.append(f"{cell.label} ({source.path})")
        else:
            group.cells.append(cell)
    for group in groups.values():
        group.cells.sort(key=lambda cell: (cell.world_size, simplicity(cell.strategy), cell.strategy))
        for cell in group.measured:
            base = group.at(cell.strategy, 1) or group.at("single", 1)
            if cell.world_size > 1 and base and cell.throughput and base.throughput:
                cell.efficiency = cell.throughput / (cell.world_size * base.throughput)
    return sorted(groups.values(), key=lambda each: (-len(each.cells), each.title))


def simplicity(strategy: str) -> int:
    """Rank among SIMPLEST_FIRST; unknown strategies come last."""
    return SIMPLEST_FIRST.index(strategy) if strategy in SIMPLEST_FIRST else len(SIMPLEST_FIRST)


def differences(groups: Sequence[Group]) -> list[str]:
    """For groups of one model: in what they differ, which is why they are not in one table."""
    lines = []
    for model in sorted({str(group.identity["model"]) for group in groups}):
        several = [group.identity for group in groups if group.identity["model"] == model]
        values = {key: sorted({str(each[key]) for each in several}) for key in several[0] if key != "gpu"}
        if differing := [
            f"{key.replace('_', ' ')}: {', '.join(found)}" for key, found in values.items() if len(found) > 1
        ]:
            lines.append(
                f"{model} was measured in {len(several)} ways that are not compared with each other. They "
                f"differ in {'; '.join(differing)}."
            )
    return lines
