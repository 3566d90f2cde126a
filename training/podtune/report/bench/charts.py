"""The benchmark's charts. No torch."""

from __future__ import annotations

from podtune.report.bench.groups import Group
from podtune.report.draw.plots import Bar, Bars

EFFICIENCY = (
    "Throughput of n processes over n times that of one, of the same strategy where it was measured, else of "
    "single. Strong scaling: one batch is divided, and time should be. Weak scaling: every process has as "
    "many rows as one alone, and its throughput should be kept."
)
MEMORY = "Of the fullest process. Plan: weights, gradients, optimizer, activations."
SENT = "Of the process that sends most; a ring all-reduce of S bytes over N sends 2 (N-1)/N S."
# title, unit (the group's where empty), the cells' field of each series, its factor to the unit, and a note
CHARTS = (
    ("Throughput", "", {"measured": "throughput"}, 1.0, ""),
    ("Step time", "ms", {"measured": "step_time_mean_s", "plan": "step_time_plan_s"}, 1e3, ""),
    ("Peak memory", "GiB", {"measured": "peak_memory_gib", "plan": "peak_memory_plan_gib"}, 1.0, MEMORY),
    ("Sent in a step", "MB", {"counted": "bytes_per_step", "formula": "bytes_per_step_formula"}, 1e-6, SENT),
    ("Scaling efficiency", "%", {"measured": "efficiency"}, 100.0, EFFICIENCY),
)


def charts(group: Group) -> list[Bars]:
    """Every chart of a comparison; one that nothing was measured for is empty."""
    # by world size, the fastest first
    cells = sorted(group.measured, key=lambda cell: (cell.world_size, -(cell.throughput or 0)))
    found = []
    for title, unit, series, factor, note in CHARTS:
        columns = [[scaled(getattr(cell, field), factor) for cell in cells] for field in series.values()]
        known = {name: column for name, column in zip(series, columns, strict=True) if any(column)}
        rows = [Bar(cell.label, [*values]) for cell, *values in zip(cells, *known.values(), strict=True)]
        shown = [row for row in rows if any(value is not None for value in row.values)]
        found.append(Bars(title, unit or group.unit, [*known], shown, note))
    return found


def scaled(value: float | None, factor: float) -> float | None:
    """``value`` in another unit."""
    return None if value is None else value * factor
