"""Held-out rows that were answered: shares of exact answers, and whether one run's is higher. No torch."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from podtune.report.runs.runs import Run

Z_95 = 1.959964  # quantile of the normal distribution, for intervals of 95 %


@dataclass(frozen=True)
class Answered:
    """Shares of the ``rows`` that each run answers exactly; ``better`` is None where chance may be why."""

    shares: Sequence[float | None]
    rows: int
    better: str | None
    interval: tuple[float, float]
    text: str


def answered(runs: Sequence[Run], names: Sequence[str]) -> Answered | None:
    """Compare the two runs with the most exact answers; None unless two answered as many rows."""
    shares = [run.exact_share() for run in runs]
    asked = [index for index, share in enumerate(shares) if share]
    counts = {share[1] for share in shares if share}
    if len(asked) < 2 or len(counts) > 1:
        return None
    rows, exact = counts.pop(), [share[0] if share else None for share in shares]
    best, second = sorted(asked, key=lambda index: -(exact[index] or 0.0))[:2]
    high, low = exact[best] or 0.0, exact[second] or 0.0
    interval = difference_interval(high, low, rows)
    better = names[best] if interval[0] > 0 else None
    text = (
        f"{names[best]} answers {high:.1%} of {rows} held-out rows exactly, {names[second]} {low:.1%}: "
        f"{'better by' if better else 'neither is better,'} {100 * (high - low):.1f} points, "
        f"{100 * interval[0]:.1f} to {100 * interval[1]:.1f} with 95 % confidence (binomial)."
    )
    return Answered(exact, rows, better, interval, text)


def difference_interval(high: float, low: float, rows: int) -> tuple[float, float]:
    """95 % interval of the difference of two shares of ``rows`` each.

    From Wilson's intervals of both: Newcombe, Statistics in Medicine 1998, 17:873, method 10.
    """
    (high_from, high_to), (low_from, low_to) = wilson(high, rows), wilson(low, rows)
    difference = high - low
    return (
        difference - math.hypot(high - high_from, low_to - low),
        difference + math.hypot(high_to - high, low - low_from),
    )


def wilson(share: float, rows: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a binomial share; unlike the normal one it is never of zero width."""
    square = Z_95**2
    centre = (share + square / (2 * rows)) / (1 + square / rows)
    half = Z_95 / (1 + square / rows) * math.sqrt(share * (1 - share) / rows + square / (4 * rows**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def readable(text: str) -> str:
    """An answer as it is, and ``(noise)`` for what a model of random weights says: repeats, or no text."""
    repeats = 3 * len(zlib.compress(text[:400].encode())) < len(text[:400].encode())
    return "(noise)" if repeats or "\ufffd" in text or not text else text
