"""Verdict on losses: the best run, its lead, and the noise of that lead. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from podtune.report.compare.figures import by_place, flat, interpolate, settings, train_end
from podtune.report.compare.speed import CLEAR
from podtune.report.runs.runs import Run
from podtune.run.record import Json

LAST_EVALUATIONS = 8
BUDGET_TOLERANCE = 0.02
SEEDS = ("seed", "data_seed")
UNDECIDED = "Which is better cannot be said."


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
    excluded: Mapping[str, str]
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

    def as_json(self) -> Json:
        """The ``verdict`` of ``podtune compare --json``."""
        if self.metric is None:
            return {"better": None, "left_out": dict(self.excluded), "text": self.text}
        ranking = [{"name": each.name, "loss": each.loss, "noise": each.noise} for each in self.ranking]
        fields = {("left_out" if key == "excluded" else key): value for key, value in asdict(self).items()}
        return fields | {"ranking": ranking}


def excluded(runs: Sequence[Run]) -> list[str | None]:
    """For each run why it is not ranked with the others, or None.

    One without a finite loss has nothing to rank. One that is not complete would cut the others to its
    length, so it is excluded where two others are complete.
    """
    why: list[str | None] = []
    for run in runs:
        last = [value for split in ("train", "eval") if (value := run.last(split, "loss")) is not None]
        lost = not any(run.curve(split, "loss")[0] for split in ("train", "eval"))
        unranked = lost or not all(map(math.isfinite, last))
        why.append(("no loss" if run.status == "ok" else _end(run)) if unranked else None)
    complete = sum(run.status == "ok" and not reason for run, reason in zip(runs, why, strict=True))
    if complete < 2:
        return why
    return [
        reason or (None if run.status == "ok" else _end(run)) for run, reason in zip(runs, why, strict=True)
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
    if blocked:
        return Verdict(f"{UNDECIDED} Not comparable: {'; '.join(blocked)}.{without}", apart)
    if len(rivals) < 2:
        return Verdict(f"{UNDECIDED[:-1]}: fewer than two runs have a finite loss.{without}", apart)
    split = "eval" if all(run.curve("eval", "loss")[0] for run in rivals) else "train"
    budget, axis = _budget(rivals)
    at_axis = axis if split == "eval" and not budget else None
    end = _common_end(rivals, axis)
    measured = [_loss_and_noise(run, split, at_axis, end) for run in rivals]
    losses = [loss for loss, _ in measured if loss is not None]
    if len(losses) < len(rivals):
        return Verdict(f"{UNDECIDED[:-1]}: the runs have no stretch in common.{without}", apart)
    where = f"at equal {axis}, interpolated" if at_axis else f"at the end, {budget or 'budgets differ'}"
    candidates = _candidates(
        rivals, [names[index] for index in ranked], losses, [noise for _, noise in measured]
    )
    values: list[float | None] = [None] * len(runs)
    for index, loss in zip(ranked, losses, strict=True):
        values[index] = loss
    decided = _decide(candidates, split, where)
    return replace(decided, text=decided.text + without, excluded=apart, values=values)


def _decide(candidates: Sequence[Candidate], split: str, where: str) -> Verdict:
    """Rank by loss, and hold the lead of the first over the second against its noise."""
    ranking = sorted(candidates, key=lambda candidate: candidate.loss)
    best, second = ranking[:2]
    difference = second.loss - best.loss
    noise = None if best.noise is None or second.noise is None else math.hypot(best.noise, second.noise)
    if any(candidate.repeats > 1 for candidate in candidates):
        basis = "the spread between seeds of one configuration"
    elif split == "eval":
        basis = "the spread of the last evaluations around their trend"
    else:
        basis = "the standard error of the last tenth of the training losses"
    exceeds = None if noise is None else difference > CLEAR * noise
    metric = "eval loss" if split == "eval" else "training loss"
    return Verdict(
        text=_sentence(ranking, f"{metric} {where}", noise, basis),
        excluded={},
        better=None if exceeds is False or difference == 0 else best.name,
        metric=metric,
        where=where,
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
    spread = math.sqrt(
        statistics.fmean(statistics.variance([values[index] for index in group]) for group in repeated)
    )
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
    several = len(ranking) > 2
    difference = second.loss - best.loss
    if difference == 0:
        same = "The best two are equal" if several else "No difference"
        return f"{same}: {what} is {best.loss:.4f} for both {best.name} and {second.name}."
    share = f" ({difference / second.loss:.1%})" if second.loss else ""
    who = f"Best of {len(ranking)}: {best.name} has the lowest" if several else f"{best.name} has the lower"
    lead = (
        f"{who} {what}: {best.loss:.4f} against {second.loss:.4f} of {second.name}, "
        f"{difference:.4f} less{share}. "
    )
    if noise is None:
        return lead + "Whether that is more than noise is not known: too few evaluations, and no second seed."
    exceeds = difference > CLEAR * noise
    times = f"{difference / noise:.1f} times" if noise else "far above"
    outcome, therefore = ("exceeds", "") if exceeds else ("does not exceed", ", so neither is better")
    return (
        f"{lead}That {outcome} the noise: it is {times} the noise of such a difference, {noise:.2g} "
        f"({basis}){therefore}."
    )


def _budget(runs: Sequence[Run]) -> tuple[str, str]:
    """Describe the equal budget of the runs ("" if unequal), and name the axis to make them equal on."""
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
