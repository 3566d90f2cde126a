"""Verdict on losses: the best run, its lead, and the noise of that lead. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from podtune.report.compare.figures import flat, interpolate, settings, train_end, trained
from podtune.report.runs.runs import Run

CLEAR = 2.0  # a difference counts when it is more than two standard deviations of its noise
LAST_EVALUATIONS = 8
BUDGET_TOLERANCE = 0.02
SEEDS = ("seed", "data_seed")
ENDS = {"error": "failed", "oom": "out of memory"}


@dataclass(frozen=True)
class Candidate:
    """A run, or the mean of runs that repeat one configuration with several seeds."""

    name: str
    loss: float
    noise: float | None  # standard deviation of ``loss``
    repeats: int = 1


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison of losses; without ``metric`` it is undecided and ``text`` says why.

    Losses are in nats per token; ``values`` has one for each run, ``noise_of_difference`` is a standard
    deviation. ``better`` is None where the difference does not exceed the noise.
    """

    text: str
    left_out: Mapping[str, str]  # runs that are not ranked, and why
    better: str | None = None
    metric: str | None = None
    where: str = ""
    values: Sequence[float | None] = ()
    ranking: Sequence[Candidate] = ()
    lowest: str = ""
    difference: float = 0.0
    relative: float | None = None
    noise_of_difference: float | None = None
    noise_basis: str | None = None
    exceeds_noise: bool | None = None


def excluded(runs: Sequence[Run]) -> list[str | None]:
    """For each run why it is not ranked with the others, or None.

    One without a finite loss has nothing to rank. One that is not complete would cut the others to its
    length, so it is excluded where two others are complete.
    """
    lost = []
    for run in runs:
        last = [value for split in ("train", "eval") if (value := run.last(split, "loss")) is not None]
        lost.append(not last or not all(map(math.isfinite, last)))
    two_complete = sum(run.status == "ok" and not none for run, none in zip(runs, lost, strict=True)) >= 2
    return [
        ("no loss" if none else None) if run.status == "ok" else _end(run) if none or two_complete else None
        for run, none in zip(runs, lost, strict=True)
    ]


def _end(run: Run) -> str:
    step = run.last("train", "step")
    return ENDS.get(run.status, run.status) + (f" at {step:.0f}" if step and run.status != "running" else "")


def verdict(
    runs: Sequence[Run], names: Sequence[str], blocked: Sequence[str], why_not: Sequence[str | None]
) -> Verdict:
    """Find the lowest loss at an equal budget, and whether its lead exceeds the runs' own noise.

    Args:
        blocked: why losses may not be compared at all.
        why_not: of each run, why it is not ranked (see :func:`excluded`).
    """
    apart = {name: why for name, why in zip(names, why_not, strict=True) if why}
    without = f" Left out: {', '.join(f'{name} ({why})' for name, why in apart.items())}." if apart else ""
    ranked = [index for index, why in enumerate(why_not) if not why]
    rivals = [runs[index] for index in ranked]
    undecided = "Which is better cannot be said"
    if blocked:
        return Verdict(f"{undecided}. Not comparable: {'; '.join(blocked)}.{without}", apart)
    if len(rivals) < 2:
        return Verdict(f"{undecided}: fewer than two runs have a finite loss.{without}", apart)
    split = "eval" if all(run.curve("eval", "loss")[0] for run in rivals) else "train"
    budget, axis = _budget(rivals)
    at_axis = axis if split == "eval" and not budget else None
    end = min((run.curve("eval", "loss", axis)[0][-1:] or [math.inf])[0] for run in rivals)
    measured = [_loss_and_noise(run, split, at_axis, end) for run in rivals]
    losses = [loss for loss, _ in measured if loss is not None]
    if len(losses) < len(rivals):
        return Verdict(f"{undecided}: the runs have no stretch in common.{without}", apart)
    values = dict(zip(ranked, losses, strict=True))
    candidates = _candidates(
        rivals, [names[index] for index in ranked], losses, [noise for _, noise in measured]
    )
    ranking = sorted(candidates, key=lambda candidate: candidate.loss)
    best, second = ranking[:2]
    difference = second.loss - best.loss
    noise = None if best.noise is None or second.noise is None else math.hypot(best.noise, second.noise)
    if any(candidate.repeats > 1 for candidate in ranking):
        basis = "the spread between seeds of one configuration"
    elif split == "eval":
        basis = "the spread of the last evaluations around their trend"
    else:
        basis = "the standard error of the last tenth of the training losses"
    exceeds = None if noise is None else difference > CLEAR * noise
    metric = "eval loss" if split == "eval" else "training loss"
    where = f"at equal {axis}, interpolated" if at_axis else f"at the end, {budget or 'budgets differ'}"
    return Verdict(
        text=_sentence(ranking, f"{metric} {where}", noise, basis) + without,
        left_out=apart,
        better=None if exceeds is False or difference == 0 else best.name,
        metric=metric,
        where=where,
        values=[values.get(index) for index in range(len(runs))],
        ranking=ranking,
        lowest=best.name,
        difference=difference,
        relative=difference / second.loss if second.loss else None,
        noise_of_difference=noise,
        noise_basis=basis if noise is not None else None,
        exceeds_noise=exceeds,
    )


def _candidates(
    runs: Sequence[Run], names: Sequence[str], values: Sequence[float], noises: Sequence[float | None]
) -> list[Candidate]:
    """The runs, those that differ in their seed only taken together; alone where only seeds are compared.

    With repeats, the spread between seeds, pooled over the configurations that have some, is the noise of
    every run.
    """
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        config = {key: item for key, item in flat(settings(run)).items() if key not in SEEDS}
        groups.setdefault(repr(sorted(config.items(), key=lambda item: item[0])), []).append(index)
    repeated = [group for group in groups.values() if len(group) > 1]
    if len(groups) == 1 or not repeated:
        return [Candidate(*fields) for fields in zip(names, values, noises, strict=True)]
    variances = [statistics.variance([values[index] for index in group]) for group in repeated]
    spread = math.sqrt(statistics.fmean(variances))
    return [
        Candidate(
            f"the mean of {', '.join(names[index] for index in group)}" if group[1:] else names[group[0]],
            statistics.fmean(values[index] for index in group),
            spread / math.sqrt(len(group)),
            len(group),
        )
        for group in groups.values()
    ]


def _sentence(ranking: Sequence[Candidate], what: str, noise: float | None, basis: str) -> str:
    best, second = ranking[:2]
    difference = second.loss - best.loss
    if difference == 0:
        return f"No difference: {what} is {best.loss:.4f} for both {best.name} and {second.name}."
    share = f" ({difference / second.loss:.1%})" if second.loss else ""
    several = len(ranking) > 2
    who = f"Best of {len(ranking)}: {best.name} has the lowest" if several else f"{best.name} has the lower"
    lead = (
        f"{who} {what}: {best.loss:.4f} against {second.loss:.4f} of {second.name}, "
        f"{difference:.4f} less{share}. "
    )
    if noise is None:
        return lead + "Whether that is more than noise is not known: too few evaluations, and no second seed."
    times = f"{difference / noise:.1f} times" if noise else "far above"
    clear = difference > CLEAR * noise
    outcome, therefore = ("exceeds", "") if clear else ("does not exceed", ", so neither is better")
    return (
        f"{lead}That {outcome} the noise: it is {times} the noise of such a difference, {noise:.2g} "
        f"({basis}){therefore}."
    )


def _budget(runs: Sequence[Run]) -> tuple[str, str]:
    """Describe the equal budget of the runs ("" if unequal), and name the axis to make them equal on."""
    for key, unit in (("tokens", "tokens"), ("step", "steps")):
        ends = [end for run in runs if (end := run.last("train", key))]
        if len(ends) == len(runs):
            equal = max(ends) - min(ends) <= BUDGET_TOLERANCE * max(ends)
            return f"equal {unit}" if equal else "", key
    return "", "step"


def _loss_and_noise(run: Run, split: str, axis: str | None, end: float) -> tuple[float | None, float | None]:
    """A run's loss at its end (or at ``end`` on ``axis``) and the standard deviation of that figure."""
    if split == "train":
        mean, error, _ = train_end(run)
        return mean, error
    places, losses = trained(run, "eval", "loss", axis or "step")
    if axis is None:
        return (losses[-1] if losses else None), _spread(losses[-LAST_EVALUATIONS:])
    kept = [loss for place, loss in zip(places, losses, strict=True) if place <= end]
    return interpolate((places, losses), end), _spread(kept[-LAST_EVALUATIONS:])


def _spread(values: Sequence[float]) -> float | None:
    """Standard deviation of the noise on evaluations at equal distances; None for fewer than three.

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
