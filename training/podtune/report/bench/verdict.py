"""What the figures say, in sentences: which strategy to use and why, what cannot be compared, what failed. No
torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from podtune.report.bench.groups import SIMPLEST_FIRST, Group, MeasuredCell
from podtune.report.draw.tables import shown

CLEAR_LOSS = 0.05  # a share of the speed below which a reason is not worth a sentence

RESTLESS = 0.25  # standard deviation over mean of single steps


def advice(group: Group) -> list[str]:
    """Sentences: what to use at each world size and why, what to take when memory runs short, whether more
    processes pay.
    """
    if not group.measured:
        return ["No cell of this comparison has a speed that may be shown, so nothing can be advised."]
    sentences = _scaling(group)
    for world_size in reversed(group.world_sizes):
        cells = [cell for cell in group.measured if cell.world_size == world_size]
        alone = group.at("single", 1) if world_size == 1 else None
        sentences += _alone(alone, cells) if alone is not None else _advice_at(world_size, cells)
    return sentences


def _alone(single: MeasuredCell, cells: Sequence[MeasuredCell]) -> list[str]:
    """With one process nothing is distributed, and what a strategy loses is its machinery's cost."""
    speed = f"{shown(single.throughput)} {single.unit}, {shown(single.mean_step_s * 1000)} ms a step"
    costs = {
        cell.strategy: cell.mean_step_s / single.mean_step_s - 1
        for cell in cells
        if cell is not single and not cell.as_fast_as(single)
    }
    dear = [
        f"{name} {cost:.0%}"
        for name, cost in sorted(costs.items(), key=lambda item: item[1])
        if cost > CLEAR_LOSS
    ]
    least = min(cells, key=lambda cell: cell.step_time.p50 if cell.step_time else 0.0)
    machinery = (
        f" The machinery alone costs {_list(dear)} of the step."
        if dear
        else " No strategy's machinery costs more than its spread."
    )
    odd = (
        f" {least.strategy} was faster still, which is this machine's noise."
        if least.strategy in costs and costs[least.strategy] < -CLEAR_LOSS
        else ""
    )
    return [f"With one process use single: {speed}.{machinery if len(cells) > 1 else ''}{odd}"]


def _advice_at(world_size: int, cells: Sequence[MeasuredCell]) -> list[str]:
    fastest = max(cells, key=lambda cell: cell.throughput or 0)
    equals = sorted(
        (cell for cell in cells if cell.as_fast_as(fastest)), key=lambda cell: _simplicity(cell.strategy)
    )
    chosen = equals[0]
    processes = "one process" if world_size == 1 else f"{world_size} processes"
    speed = f"{shown(chosen.throughput)} {chosen.unit}, {shown(chosen.mean_step_s * 1000)} ms a step"
    others = [cell.strategy for cell in equals[1:]]
    if len(cells) == 1:
        return [f"With {processes} only {chosen.strategy} was measured: {speed}."]
    if others:
        verb = "is" if len(others) == 1 else "are"
        simplest = f"{_list(others)} {verb} as fast within the spread, and {chosen.strategy} is the simplest."
        first = f"With {processes} use {chosen.strategy}: {speed}. {simplest}"
    else:
        second = max((cell for cell in cells if cell is not chosen), key=lambda cell: cell.throughput or 0)
        lead = (chosen.throughput or 0) / (second.throughput or 1) - 1
        first = f"With {processes} use {chosen.strategy}: {speed}, {lead:.0%} more than {second.strategy}."
    return [first, *_why(chosen, cells), *_memory(chosen, cells)]


def _why(chosen: MeasuredCell, cells: Sequence[MeasuredCell]) -> list[str]:
    """Of the clearly slower ones, what formula and counter say they pay for."""
    reasons = []
    for cell in sorted(cells, key=lambda each: each.throughput or 0):
        loss = 1 - (cell.throughput or 0) / (chosen.throughput or 1)
        if cell is chosen or cell.world_size == 1 or loss < CLEAR_LOSS or cell.as_fast_as(chosen):
            continue
        bubble, sent, least = cell.bubble or 0.0, cell.sent_bytes or 0.0, chosen.sent_bytes or 0.0
        if bubble > CLEAR_LOSS and bubble > (chosen.bubble or 0.0):
            why = f"its processes wait {bubble:.0%} of the step by formula"
        elif sent > 1.2 * least:
            why = f"it sends {shown(sent / 1e6)} MB a step against {shown(least / 1e6)} MB"
        else:
            why = "it sends no more, so the rest is its own overhead"
        reasons.append(f"{cell.strategy} is {loss:.0%} slower: {why}")
    return [f"Why: {'; '.join(reasons)}."] if reasons else []


def _memory(chosen: MeasuredCell, cells: Sequence[MeasuredCell]) -> list[str]:
    with_memory = [cell for cell in cells if cell.memory_gib is not None]
    if len(with_memory) < 2 or chosen.memory_gib is None:
        return []
    least = min(with_memory, key=lambda cell: cell.memory_gib or 0)
    saved = 1 - (least.memory_gib or 0) / chosen.memory_gib
    if least is chosen or saved < CLEAR_LOSS:
        return []
    slower = 1 - (least.throughput or 0) / (chosen.throughput or 1)
    cost = f"{slower:.0%} slower" if slower > CLEAR_LOSS and not least.as_fast_as(chosen) else "about as fast"
    return [
        f"If it does not fit, {least.strategy} needs the least memory: {shown(least.memory_gib)} GiB a "
        "process against "
        f"{shown(chosen.memory_gib)} ({saved:.0%} less), {cost}."
    ]


def _scaling(group: Group) -> list[str]:
    """Whether the largest world is worth its processes, by its fastest strategy."""
    scaled = [
        cell
        for cell in group.measured
        if cell.efficiency is not None and cell.world_size == group.world_sizes[-1]
    ]
    if not scaled:
        return []
    best = max(scaled, key=lambda cell: cell.throughput or 0)
    assert best.efficiency is not None
    # against the fastest of one process: where another strategy's beats single, that is the machine's noise
    alone = max((cell.throughput or 0 for cell in group.measured if cell.world_size == 1), default=0)
    gain = (best.throughput or 0) / alone if alone else best.efficiency * best.world_size
    share = f"{best.strategy} keeps {best.efficiency:.0%} of the ideal against {best.efficiency_of}"
    if gain <= 1 + CLEAR_LOSS:
        return [
            f"Stay with one process: no strategy does clearly more work with {best.world_size} ({share}), so "
            "do not distribute this here unless it does not fit."
        ]
    return [
        f"More processes pay: {share}, so {best.world_size} processes do {gain:.2f} times the work of one."
    ]


def cautions(group: Group) -> list[str]:
    """What is not comparable in this group, or not what it seems."""
    lines = []
    if group.on_cpu:
        lines.append(
            "Measured on a CPU with gloo: it shows that strategies are right and what they send; speeds say "
            "nothing about GPUs."
        )
    if any(cell.memory_is_the_process for cell in group.measured):
        lines.append(
            "Peak memory is the whole process with its imported libraries, so the plan, which counts the "
            "model's own, is lower."
        )
    if group.identity["commit"] == "unknown":
        lines.append("The records do not say which commit they were measured with.")
    elif group.identity["commit"].endswith("-dirty"):
        lines.append(
            "The code had changes that were not committed: the same commit may have been different code."
        )
    beyond = [cell.label for cell in group.measured if (cell.efficiency or 0) > 1 + CLEAR_LOSS]
    if beyond:
        lines.append(
            f"{_list(beyond)} scaled better than the ideal, which cannot be: the one-process cells "
            "were disturbed. Measure again."
        )
    restless = [
        cell.label
        for cell in group.measured
        if (step := cell.step_time) and (step.std or 0.0) > RESTLESS * step.mean
    ]
    if restless:
        lines.append(
            f"Steps of {_list(restless)} vary by more than {RESTLESS:.0%}: the machine was busy, and small "
            "differences mean nothing."
        )
    for status, text in (
        (
            "skipped",
            ("were not held against a single process, so their speed may be that of another computation"),
        ),
        ("undefined", "have batch norm over split batches: another function than a single process computes"),
        ("unknown", "do not say whether their losses equal a single process's"),
    ):
        cells = [cell.label for cell in group.measured if cell.parity == status]
        if cells:
            lines.append(f"{_list(cells)} {text}.")
    micro = {
        str(cell.record["config"].get("micro_batches"))
        for cell in group.measured
        if cell.record["config"].get("micro_batches")
    }
    if len(micro) > 1:
        lines.append(
            f"The pipelines used {_list(sorted(micro))} micro-batches: compare their bubbles with "
            "that in mind."
        )
    if group.repeated:
        lines.append(f"Older records of the same cell were left out: {_list(group.repeated)}.")
    return lines


def failures(cells: Sequence[MeasuredCell]) -> list[tuple[MeasuredCell, str]]:
    """Cells without a speed, with how they failed."""
    reasons = []
    for cell in cells:
        if cell.throughput is None:
            reason = " ".join(str(cell.record.get("reason") or "").split())
            if (parity := cell.measurements.parity) and parity.status == "failed":
                reason = (
                    f"parity: failed, losses differ by {shown(parity.max_relative_difference)} where "
                    f"{shown(parity.tolerance)} is allowed"
                )
            reasons.append((cell, f"{cell.record['status']}: {reason or 'no reason given'}"))
    return reasons


def _simplicity(strategy: str) -> int:
    return SIMPLEST_FIRST.index(strategy) if strategy in SIMPLEST_FIRST else len(SIMPLEST_FIRST)


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
