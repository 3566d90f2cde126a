"""The benchmark's charts. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from podtune.report.bench.groups import Group, MeasuredCell
from podtune.report.draw.plots import Bar, Bars

WHISKERS = "Whiskers: one standard deviation of single steps."
EFFICIENCY = (
    "Throughput of n processes over n times that of one, of the same strategy where it was measured, else of "
    "single. Strong scaling: one batch is divided, and time should be. Weak scaling: every process has as "
    "many rows as one alone, and its throughput should be kept."
)


def charts(group: Group) -> list[Bars]:
    """Every chart of a comparison; one that nothing was measured for is empty."""
    # by world size, the fastest first
    cells = sorted(group.measured, key=lambda cell: (cell.world_size, -(cell.throughput or 0)))
    several = [cell for cell in cells if cell.world_size > 1]
    spread = [_error(cell, cell.throughput) for cell in cells]
    throughput = [
        Bar(cell.label, [cell.throughput], [error]) for cell, error in zip(cells, spread, strict=True)
    ]
    sent = [
        Bar(cell.label, [scaled(cell.bytes_per_step, 1e-6), scaled(cell.bytes_per_step_formula, 1e-6)])
        for cell in several
    ]
    efficiency = [Bar(cell.label, [scaled(cell.efficiency, 100)]) for cell in several]
    lost = [
        Bar(cell.label, [100 * max(0.0, 1 - cell.efficiency), scaled(cell.bubble_formula, 100)])
        for cell in several
        if cell.bubble_formula and cell.efficiency is not None
    ]
    return [
        Bars("Throughput", group.unit, ["measured"], throughput, note=WHISKERS),
        _step_time(cells),
        _memory(cells),
        Bars(
            "Sent in a step",
            "MB",
            ["counted", "formula"],
            sent,
            note="Of the process that sends most; a ring all-reduce of S bytes over N sends 2 (N-1)/N S.",
        ),
        Bars("Scaling efficiency", "%", ["measured"], efficiency, EFFICIENCY),
        Bars(
            "Pipelines: share of the step lost",
            "%",
            ["measured", "formula"],
            lost,
            note="Lost: 1 - efficiency. Formula: (P-1)/(M+P-1); naive model parallelism is M = 1.",
        ),
    ]


def scaled(value: float | None, factor: float) -> float | None:
    """``value`` in another unit."""
    return None if value is None else value * factor


def _error(cell: MeasuredCell, value: float | None) -> float | None:
    """The standard deviation of ``value``, of which single steps have as large a share as of their time."""
    if not value or not cell.step_time_std_s or not cell.step_time_mean_s:
        return None
    return value * cell.step_time_std_s / cell.step_time_mean_s


def _step_time(cells: Sequence[MeasuredCell]) -> Bars:
    """Measured steps, beside the planned ones where a cell has a plan of its time (none has on a CPU)."""
    names = ["measured", "plan"] if any(cell.step_time_plan_s is not None for cell in cells) else ["measured"]
    bars = []
    for cell in cells:
        values = [scaled(cell.step_time_mean_s, 1000), scaled(cell.step_time_plan_s, 1000)]
        errors = [scaled(cell.step_time_std_s, 1000), None]
        bars.append(Bar(cell.label, values[: len(names)], errors[: len(names)]))
    return Bars("Step time", "ms", names, bars, note=WHISKERS)


def _memory(cells: Sequence[MeasuredCell]) -> Bars:
    """A CPU's resident peak is the whole process with its libraries, which no plan of the model can meet."""
    kinds = sorted({cell.memory_kind for cell in cells if cell.memory_kind})
    note = f"Measured: {', '.join(kinds)}, of the fullest process." if kinds else ""
    title = "Peak memory a process"
    if any(cell.memory_is_the_process for cell in cells):
        bars = [Bar(cell.label, [cell.peak_memory_gib]) for cell in cells]
        return Bars(title, "GiB", ["measured"], bars, note=note)
    bars = [Bar(cell.label, [cell.peak_memory_gib, cell.peak_memory_plan_gib]) for cell in cells]
    note += " Plan: weights, gradients, optimizer, activations."
    return Bars(title, "GiB", ["measured", "plan"], bars, note=note)
