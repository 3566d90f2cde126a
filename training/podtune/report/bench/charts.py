"""The benchmark's charts. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from podtune.report.bench.groups import Group, MeasuredCell
from podtune.report.draw.plots import Bar, Bars, Chart, Lines, Series


def charts(group: Group) -> list[Chart]:
    """Every chart of a comparison that has something to show."""
    # by world size, the fastest first
    cells = sorted(group.measured, key=lambda cell: (cell.world_size, -(cell.throughput or 0)))
    every: list[Chart] = [
        _throughput(cells),
        _step_time(cells),
        _memory(cells, with_plan=not any(cell.memory_is_the_process for cell in cells)),
        _communication(cells),
        *_efficiency(group),
        _bubble(group),
        _breakdown(group),
    ]
    return [chart for chart in every if not chart.empty]


def _bar(cell: MeasuredCell, values: Sequence[float | None], errors: Sequence[float | None] = ()) -> Bar:
    return Bar(cell.label, values, errors)


def _throughput(cells: Sequence[MeasuredCell]) -> Bars:
    unit = cells[0].unit if cells else ""
    bars = []
    for cell in cells:
        step = cell.step_time
        error = (cell.throughput or 0) * step.std / step.mean if step and step.std else None
        bars.append(_bar(cell, [cell.throughput], [error]))
    return Bars("Throughput", unit, ["measured"], bars, note=WHISKERS)


WHISKERS = "Whiskers: one standard deviation of single steps."


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _step_time(cells: Sequence[MeasuredCell]) -> Bars:
    """Measured steps, beside the planned ones where a cell has a plan of its time (none has on a CPU)."""
    timed = [(cell, step, cell.planned("step_time_s")) for cell in cells if (step := cell.step_time)]
    names = ["measured", "plan"] if any(plan is not None for _, _, plan in timed) else ["measured"]
    bars = []
    for cell, step, plan in timed:
        values = [_milliseconds(step.mean), _milliseconds(plan)]
        bars.append(_bar(cell, values[: len(names)], [_milliseconds(step.std), None][: len(names)]))
    return Bars("Step time", "ms", names, bars, note=WHISKERS)


def _memory(cells: Sequence[MeasuredCell], *, with_plan: bool) -> Bars:
    """A CPU's resident peak is the whole process with its libraries, which no plan of the model can meet."""
    kinds = sorted({cell.memory_kind for cell in cells if cell.memory_kind})
    note = f"Measured: {', '.join(kinds)}, of the fullest process." if kinds else ""
    if not with_plan:
        bars = [_bar(cell, [cell.memory_gib]) for cell in cells]
        return Bars("Peak memory a process", "GiB", ["measured"], bars, note=note)
    bars = [_bar(cell, [cell.memory_gib, cell.planned("total_gib")]) for cell in cells]
    note += " Plan: weights, gradients, optimizer, activations."
    return Bars("Peak memory a process", "GiB", ["measured", "plan"], bars, note=note)


def _communication(cells: Sequence[MeasuredCell]) -> Bars:
    bars = []
    for cell in (cell for cell in cells if cell.world_size > 1):
        sent, formula = cell.sent_bytes, cell.formula_bytes
        megabytes = [None if count is None else count / 1e6 for count in (sent, formula)]
        bars.append(_bar(cell, megabytes))
    note = "Of the process that sends most; a ring all-reduce of S bytes over N sends 2 (N-1)/N S."
    return Bars("Sent in a step", "MB", ["counted", "formula"], bars, note=note)


EFFICIENCY = (
    "Throughput of n processes over n times that of one, of the same strategy where it was measured, else of "
    "single. Strong scaling: one batch is divided, and time should be. Weak scaling: every process has as "
    "many rows as one alone, and its throughput should be kept."
)


def _efficiency(group: Group) -> list[Chart]:
    """Curves over the world sizes; bars where there is but one, which lines would lay upon each other."""
    scaled = [cell for cell in group.measured if cell.efficiency is not None]
    sizes = sorted({cell.world_size for cell in scaled})
    if not sizes:
        return []
    if len(sizes) == 1:
        ordered = sorted(scaled, key=lambda cell: -(cell.efficiency or 0))
        bars = [_bar(cell, [100 * (cell.efficiency or 0)]) for cell in ordered]
        return [Bars("Scaling efficiency", "%", ["measured"], bars, EFFICIENCY)]
    series = []
    for colour, strategy in enumerate(dict.fromkeys(cell.strategy for cell in scaled)):
        points = [(cell.world_size, cell.efficiency or 0.0) for cell in scaled if cell.strategy == strategy]
        if group.at(strategy, 1) or group.at("single", 1):
            points = [(1, 1.0), *points]
        x, y = zip(*points, strict=True)
        series.append(Series(strategy, {"processes": x}, y, colour))
    ideal = Series("ideal", {"processes": [1, *sizes]}, [1.0] * (1 + len(sizes)), colour=7)
    axes = {"processes": "processes"}
    return [Lines("Scaling efficiency", "efficiency", axes, [*series, ideal], EFFICIENCY)]


def _bubble(group: Group) -> Bars:
    """Share of a step lost against one process doing all the work; of pipelines it should be the bubble."""
    bars = []
    for cell in group.measured:
        formula = cell.bubble
        if cell.world_size > 1 and formula and cell.efficiency is not None:
            bars.append(_bar(cell, [100 * max(0.0, 1 - cell.efficiency), 100 * formula]))
    note = "Lost: 1 - efficiency. Formula: (P-1)/(M+P-1); naive model parallelism is M = 1."
    return Bars("Pipelines: share of the step lost", "%", ["measured", "formula"], bars, note=note)


def breakdown(cell: MeasuredCell, group: Group) -> tuple[float, float, float] | None:
    """Seconds of a step: an equal share of one process's step, waiting by the bubble's formula, and the rest.

    The rest is communication that shows and the strategy's own overhead; None without a single process to
    compare with.
    """
    one_process, step = group.at("single", 1) or group.at(cell.strategy, 1), cell.step_time
    alone = one_process.step_time if one_process else None
    if alone is None or step is None or cell.plan is None:
        return None
    bubble = cell.bubble or 0.0
    compute = min(step.mean, alone.mean / cell.world_size)
    idle = min(step.mean - compute, compute * bubble / (1 - bubble))
    return compute, idle, step.mean - compute - idle


def _breakdown(group: Group) -> Bars:
    bars = []
    for cell in group.measured:
        parts = breakdown(cell, group)
        if parts is not None and cell.world_size > 1:
            bars.append(_bar(cell, [1000 * part for part in parts]))
    note = (
        "Compute: the single process's step over the processes. Waiting: the bubble's formula. The rest: "
        "communication and overhead."
    )
    return Bars(
        "Where a step's time goes",
        "ms",
        ["compute", "waiting", "communication and overhead"],
        bars,
        note,
        stacked=True,
    )
