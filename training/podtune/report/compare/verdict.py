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


@dataclass(frozen=True)
class Contender:
    """A run, or the runs that repeat one configuration with several seeds: their mean, and the noise of
    it.
    """

    name: str
    loss: float
    noise: float | None  # standard deviation of ``loss``
    repeats: int = 1


def verdict(runs: Sequence[Run], names: Sequence[str], blocked: Sequence[str]) -> Json:
    """Which run has the lowest loss at an equal budget, by how much, and whether that exceeds the runs' own
    noise.
    """
    if blocked:
        return {
            "better": None,
            "text": (f"Which is better cannot be said. Not comparable: {'; '.join(blocked)}."),
        }
    split = "eval" if all(run.curve("eval", "loss")[0] for run in runs) else "train"
    budget, axis = _budget(runs)
    at_axis = axis if split == "eval" and not budget else None
    figures = [_loss_and_noise(run, split, at_axis, _common_end(runs, axis)) for run in runs]
    values = [value for value, _ in figures if value is not None]
    if len(values) < len(runs):
        return {"better": None, "text": "Which is better cannot be said: a run has no finite loss."}
    contenders = sorted(
        _contenders(runs, names, values, [noise for _, noise in figures]), key=lambda one: one.loss
    )
    best, second = contenders[0], contenders[1]
    difference = second.loss - best.loss
    noise = None if best.noise is None or second.noise is None else math.hypot(best.noise, second.noise)
    basis = (
        "the spread between seeds of one configuration"
        if any(one.repeats > 1 for one in contenders)
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
    return {
        "metric": metric,
        "where": place,
        "values": values,
        "lowest": best.name,
        "better": None if exceeds is False or difference == 0 else best.name,
        "difference": difference,
        "relative": difference / second.loss if second.loss else None,
        "noise_of_difference": noise,
        "noise_basis": basis if noise is not None else None,
        "exceeds_noise": exceeds,
        "text": _say(best, second, metric, place, noise, basis),
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
        return [Contender(*one) for one in zip(names, values, noises, strict=True)]
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
        known = [end for end in ends if end]
        if len(known) < len(runs):
            continue
        if max(known) - min(known) <= BUDGET_TOLERANCE * max(known):
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
        found = interpolate((places, losses), end)
        kept = [loss for place, loss in zip(places, losses, strict=True) if place <= end]
        return (found[0] if found else None), _spread(kept[-LAST_EVALUATIONS:])
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
    mean).
    """
    measured = [run.measurements for run in runs]
    for key in ("tokens_per_s", "samples_per_s"):
        rates = [rate for one in measured if (rate := getattr(one, key))]
        if len(rates) == len(runs):
            break
    else:
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
        "values": rates,
        "faster": None if exceeds is False else names[best],
        "ratio": ratio,
        "noise": noise,
        "exceeds_noise": exceeds,
        "text": text,
    }


def _relative_error(run: Run) -> float | None:
    """Standard error of the mean step time, relative to it."""
    step_time = run.measurements.step_time_s
    if step_time is None or step_time.std is None or not (step_time.mean and step_time.n):
        return None
    return step_time.std / math.sqrt(step_time.n) / step_time.mean
