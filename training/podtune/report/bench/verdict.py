"""Sentences beside the tables: which strategy to use, and what cannot be compared. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from podtune.report.bench.charts import scaled
from podtune.report.bench.groups import Group, MeasuredCell, simplicity
from podtune.report.draw.tables import shown

CLEAR_LOSS = 0.05  # a share of the speed below which a difference is not worth a sentence
RESTLESS = 0.25  # standard deviation over mean of single steps


def advice(group: Group) -> list[str]:
    """One sentence on whether more processes pay, then one for each world size, the largest first."""
    if not group.measured:
        return ["No cell of this comparison has a speed that may be shown, so nothing can be advised."]
    sizes = sorted({cell.world_size for cell in group.measured}, reverse=True)
    by_size = {size: [cell for cell in group.measured if cell.world_size == size] for size in sizes}
    return [*_scaling(group, by_size[sizes[0]]), *(_advice_at(*each) for each in by_size.items())]


def _advice_at(world_size: int, cells: Sequence[MeasuredCell]) -> str:
    """Name the fastest strategy, or among those as fast within their spread the simplest."""
    # one process has nothing to distribute: where a strategy beats single, that is the machine's noise
    alone = next((cell for cell in cells if cell.strategy == "single" and world_size == 1), None)
    fastest = alone or max(cells, key=lambda cell: cell.throughput or 0)
    equals = [cell for cell in cells if cell.as_fast_as(fastest)]
    chosen, *others = sorted(equals, key=lambda cell: simplicity(cell.strategy))
    processes = "one process" if world_size == 1 else f"{world_size} processes"
    step_ms = shown(scaled(chosen.step_time_mean_s, 1000))
    alike = f"; as fast within the spread: {_list(cell.strategy for cell in others)}" if others else ""
    speed = f"{shown(chosen.throughput)} {chosen.unit}, {step_ms} ms a step"
    return f"With {processes} use {chosen.strategy}: {speed}{alike}."


def _scaling(group: Group, largest: Sequence[MeasuredCell]) -> list[str]:
    """Compare the largest world's fastest strategy with one process."""
    scaled_cells = [cell for cell in largest if cell.efficiency is not None]
    if not scaled_cells:
        return []
    best = max(scaled_cells, key=lambda cell: cell.throughput or 0)
    # against the fastest of one process: a single that was slower than another strategy was disturbed
    alone = max(
        (cell for cell in group.measured if cell.world_size == 1), key=lambda cell: cell.throughput or 0
    )
    gain = (best.throughput or 0) / (alone.throughput or 1)
    share = f"{best.strategy} keeps {gain / best.world_size:.0%} of the ideal against {alone.label}"
    if group.identity["per_device_batch_size"]:  # weak scaling: throughput a process should be kept
        share += " with the same rows a process"
    if gain <= 1 + CLEAR_LOSS:
        return [
            f"Stay with one process unless it does not fit: no strategy does clearly more work with "
            f"{best.world_size} ({share})."
        ]
    return [
        f"More processes pay: {share}, so {best.world_size} processes do {gain:.2f} times the work of one."
    ]


def cautions(group: Group) -> list[str]:
    """Sentences on what is not comparable in this group, or misleads."""
    unequal = [f"{cell.label} ({cell.parity})" for cell in group.measured if cell.parity != "ok"]
    beyond = [cell.label for cell in group.measured if (cell.efficiency or 0) > 1 + CLEAR_LOSS]
    restless = [
        cell.label
        for cell in group.measured
        if (cell.step_time_std_s or 0.0) > RESTLESS * (cell.step_time_mean_s or 0.0)
    ]
    found = {
        "Measured on a CPU with gloo: it shows that strategies are right and what they send; speeds say "
        "nothing about GPUs.": not group.identity["gpu"],
        "The code had changes that were not committed: the same commit may have been different code.": str(
            group.identity["commit"]
        ).endswith("-dirty"),
        f"{_list(beyond)} scaled better than the ideal, which cannot be: the one-process cells were "
        "disturbed. Measure again.": beyond,
        f"Steps of {_list(restless)} vary by more than {RESTLESS:.0%}: the machine was busy, and small "
        "differences mean nothing.": restless,
        f"Older records of the same cell were left out: {_list(group.repeated)}.": group.repeated,
        f"Not shown to compute as a single process does, so the speed may be of something else: "
        f"{_list(unequal)}.": unequal,
    }
    return [text for text, applies in found.items() if applies]


def _list(names: Iterable[str]) -> str:
    *others, last = list(names) or [""]
    return f"{', '.join(others)} and {last}" if others else last
