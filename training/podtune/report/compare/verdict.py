"""Which run is better and which is faster, by how much, and whether that exceeds the runs' own noise. No
torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from podtune.report.compare.figures import by_place, flat, interpolate, settings, train_end
from podtune.report.runs.runs import Run
from podtune.run.record import Json

LAST_EVALUATIONS = 8
CLEAR = 2.0  # a difference counts when it is more than two standard deviations of its noise
BUDGET_TOLERANCE = 0.02
SEEDS = ("seed", "data_seed")
UNITS = ("tokens_per_s", "samples_per_s")


@dataclass(frozen=True)
class Contender:
    """A run, or the runs that repeat one configuration with several seeds: their mean, and the noise of
    it.
    """

    name: str
    loss: float
    noise: float | None  # standard deviation of ``loss``
    repeats: int = 1


ENDS = {"error": "failed", "oom": "out of memory"}


def left_out(runs: Sequence[Run]) -> list[str | None]:
    """For each run why it is not ranked with the others, or None.

    One without a finite loss has nothing to rank. One that is not complete would cut the others to its
    length, so it is left out where two others are complete.
    """
    why: list[str | None] = []
    for run in runs:
        last = [value for split in ("train", "eval") if (value := run.last(split, "loss")) is not None]
        lost = not any(run.curve(split, "loss")[0] for split in ("train", "eval"))
        step = run.last("train", "step")
        at = f" at {step:.0f}" if step and run.status != "running" else ""
        end = "no loss" if run.status == "ok" else f"{ENDS.get(run.status, run.status)}{at}"
        why.append(end if lost or not all(map(math.isfinite, last)) else None)
    complete = sum(run.status == "ok" and not reason for run, reason in zip(runs, why, strict=True))
    for index, run in enumerate(runs):
        if complete >= 2 and why[index] is None and run.status != "ok":
            step = run.last("train", "step")
            why[index] = ENDS.get(run.status, run.status) + (f" at {step:.0f}" if step else "")
    return why


def verdict(
    runs: Sequence[Run], names: Sequence[str], blocked: Sequence[str], why_not: Sequence[str | None]
) -> Json:
    """Which run has the lowest loss at an equal budget, by how much, and whether that exceeds the runs' own
    noise. ``why_not``: of each run, why it is not ranked (see :func:`left_out`).
    """
    aside = {name: why for name, why in zip(names, why_not, strict=True) if why}
    without = f" Left out: {', '.join(f'{name} ({why})' for name, why in aside.items())}." if aside else ""
    if blocked:
        text = f"Which is better cannot be said. Not comparable: {'; '.join(blocked)}.{without}"
        return {"better": None, "left_out": aside, "text": text}
    ranked = [index for index, why in enumerate(why_not) if not why]
    if len(ranked) < 2:
        text = f"Which is better cannot be said: fewer than two runs have a finite loss.{without}"
        return {"better": None, "left_out": aside, "text": text}
    rivals = [runs[index] for index in ranked]
    split = "eval" if all(run.curve("eval", "loss")[0] for run in rivals) else "train"
    budget, axis = _budget(rivals)
    at_axis = axis if split == "eval" and not budget else None
    end = _common_end(rivals, axis)
    figures = [_loss_and_noise(run, split, at_axis, end) for run in rivals]
    losses = [loss for loss, _ in figures if loss is not None]
    if len(losses) < len(rivals):
        text = f"Which is better cannot be said: the runs have no stretch in common.{without}"
        return {"better": None, "left_out": aside, "text": text}
    contenders = sorted(
        _contenders(rivals, [names[index] for index in ranked], losses, [noise for _, noise in figures]),
        key=lambda contender: contender.loss,
    )
    best, second = contenders[0], contenders[1]
    difference = second.loss - best.loss
    noise = None if best.noise is None or second.noise is None else math.hypot(best.noise, second.noise)
    basis = (
        "the spread between seeds of one configuration"
        if any(contender.repeats > 1 for contender in contenders)
        else "the spread of the last evaluations around their trend"
        if split == "eval"
        else "the standard error of the last tenth of the training losses"
    )
    place = (
        f"at the end, {budget}"
        if budget
        else f"at equal {axis}, interpolated"
        if at_axis
        else "at the end, budgets differ"
    )
    metric = "eval loss" if split == "eval" else "training loss"
    exceeds = None if noise is None else difference > CLEAR * noise
    values: list[float | None] = [None] * len(runs)
    for index, loss in zip(ranked, losses, strict=True):
        values[index] = loss
    text = _say(best, second, metric, place, noise, basis)
    return {
        "metric": metric,
        "where": place,
        "values": values,
        "ranking": [{"name": each.name, "loss": each.loss, "noise": each.noise} for each in contenders],
        "left_out": aside,
        "lowest": best.name,
        "better": None if exceeds is False or difference == 0 else best.name,
        "difference": difference,
        "relative": difference / second.loss if second.loss else None,
        "noise_of_difference": noise,
        "noise_basis": basis if noise is not None else None,
        "exceeds_noise": exceeds,
        "text": f"Best of {len(contenders)}: {text}{without}" if len(contenders) > 2 else text + without,
    }


def _contenders(
    runs: Sequence[Run], names: Sequence[str], values: Sequence[float], noises: Sequence[float | None]
) -> list[Contender]:
    """The runs, those that differ in their seed only taken together; alone where nothing but seeds is
    compared.

    With repeats, the spread between seeds, pooled over the configurations that have some, is the noise of
    every run.
    """
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        config = {key: item for key, item in flat(settings(run)).items() if key not in SEEDS}
        groups.setdefault(repr(sorted(config.items(), key=lambda item: item[0])), []).append(index)
    repeated = [group for group in groups.values() if len(group) > 1]
    if len(groups) == 1 or not repeated:
        return [Contender(*fields) for fields in zip(names, values, noises, strict=True)]
    spread = math.sqrt(
        statistics.fmean(statistics.variance([values[index] for index in group]) for group in repeated)
    )
    return [
        Contender(
            names[group[0]]
            if len(group) == 1
            else f"the mean of {', '.join(names[index] for index in group)}",
            statistics.fmean(values[index] for index in group),
            spread / math.sqrt(len(group)),
            len(group),
        )
        for group in groups.values()
    ]


def _say(best: Contender, second: Contender, metric: str, place: str, noise: float | None, basis: str) -> str:
    difference = second.loss - best.loss
    if difference == 0:
        return f"No difference: {metric} {place} is {best.loss:.4f} for both {best.name} and {second.name}."
    share = f" ({difference / second.loss:.1%})" if second.loss else ""
    lead = (
        f"{best.name} has the lower {metric} {place}: {best.loss:.4f} against {second.loss:.4f} of "
        f"{second.name}, "
        f"{difference:.4f} less{share}. "
    )
    if noise is None:
        return lead + "Whether that is more than noise is not known: too few evaluations, and no second seed."
    times = f"{difference / noise:.1f} times" if noise else "far above"
    if difference > CLEAR * noise:
        return (
            f"{lead}That exceeds the noise: it is {times} the noise of such a difference, {noise:.2g} "
            f"({basis})."
        )
    return (
        f"{lead}That does not exceed the noise: it is {times} the noise of such a difference, {noise:.2g} "
        f"({basis}), so neither is better."
    )


def _budget(runs: Sequence[Run]) -> tuple[str, str]:
    """How the runs' budgets agree at their ends ("" if they do not), and the axis to make them equal on."""
    for key, axis in (("tokens", "tokens"), ("step", "step")):
        ends = [run.last("train", key) for run in runs]
        ends_set = [end for end in ends if end]
        if len(ends_set) < len(runs):
            continue
        if max(ends_set) - min(ends_set) <= BUDGET_TOLERANCE * max(ends_set):
            return f"equal {'steps' if axis == 'step' else axis}", axis
        return "", axis
    return "", "step"


def _common_end(runs: Sequence[Run], axis: str) -> float:
    ends = [places[-1] for run in runs if (places := run.curve("eval", "loss", axis)[0])]
    return min(ends, default=math.inf)


def _loss_and_noise(run: Run, split: str, axis: str | None, end: float) -> tuple[float | None, float | None]:
    """A run's loss at its end (or at ``end`` on ``axis``) and the standard deviation of that figure."""
    if split == "train":
        mean, error, _ = train_end(run)
        return mean, error
    places, losses = by_place(run.curve("eval", "loss", axis or "step"))
    if len(places) > 1 and places[0] == 0:  # the model before training: no part of the trend
        places, losses = places[1:], losses[1:]
    if axis is not None:
        losses_at_end = interpolate((places, losses), end)
        kept = [loss for place, loss in zip(places, losses, strict=True) if place <= end]
        return (losses_at_end[0] if losses_at_end else None), _spread(kept[-LAST_EVALUATIONS:])
    return (losses[-1] if losses else None), _spread(losses[-LAST_EVALUATIONS:])


def _spread(values: Sequence[float]) -> float | None:
    """Standard deviation of the noise on ``values``, evaluations at equal distances; None for fewer than
    three.

    From their third differences (second, of three values): those of any smooth trend nearly vanish, so a loss
    that still falls does not show its slope as noise. The variance of a difference of order p is binomial(2p,
    p) times that of the values (difference-based variance estimation: Gasser, Sroka, Jennen-Steinmetz,
    Biometrika 1986).
    """
    if len(values) < 3:
        return None
    order, rest = min(3, len(values) - 1), list(values)
    for _ in range(order):
        rest = [right - left for left, right in pairwise(rest)]
    return math.sqrt(statistics.fmean(item * item for item in rest) / math.comb(2 * order, order))


def speed(runs: Sequence[Run], names: Sequence[str]) -> Json | None:
    """Which is faster, and whether by more than the spread of its steps (the standard error of their
    mean). None unless two runs measured it in one unit.
    """
    rates_by_key = {key: [getattr(run.measurements, key) or 0.0 for run in runs] for key in UNITS}
    key = max(UNITS, key=lambda key: sum(rate > 0 for rate in rates_by_key[key]))
    rates = rates_by_key[key]
    if sum(rate > 0 for rate in rates) < 2:
        return None
    errors = [_relative_error(run) for run in runs]
    order = sorted(range(len(rates)), key=rates.__getitem__, reverse=True)
    best, second = order[0], order[1]
    ratio = rates[best] / rates[second]
    left, right = errors[best], errors[second]
    noise = None if left is None or right is None else math.hypot(left, right)
    exceeds = None if noise is None else ratio - 1 > CLEAR * noise
    figures = f"{rates[best]:,.0f} against {rates[second]:,.0f} {key.replace('_per_s', '/s')}"
    if exceeds is False:
        text = (
            f"Speed is the same within the spread of the steps ({CLEAR * noise:.1%}): {figures}."
            if noise is not None
            else figures
        )
    else:
        spread = "" if noise is None else f", more than the spread of the steps ({CLEAR * noise:.1%})"
        text = f"{names[best]} is {ratio:.2f} times as fast as {names[second]}: {figures}{spread}."
    return {
        "metric": key,
        "values": [rate or None for rate in rates],
        "faster": None if exceeds is False else names[best],
        "ratio": ratio,
        "noise": noise,
        "exceeds_noise": exceeds,
        "text": text,
    }


def _relative_error(run: Run) -> float | None:
    """Standard error of the mean step time, relative to it."""
    step_time = run.measurements.step_time_s
    if step_time is None or step_time.std is None or step_time.mean <= 0 or step_time.n < 1:
        return None
    return step_time.std / math.sqrt(step_time.n) / step_time.mean
