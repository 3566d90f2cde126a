"""Figures of runs where they can be laid side by side: settings, values at common places, values at the end.
No torch.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from typing import Any

from podtune.report.runs.runs import Curve, Run
from podtune.run.record import Json, Losses

SHARES = (0.25, 0.5, 0.75, 1.0)
COMPARED = (("eval", "loss"), ("eval", "mean_token_accuracy"), ("train", "loss"))
IDENTITY = (
    "mode",
    "strategy",
    "model",
    "world_size",
    "nnodes",
    "nproc_per_node",
    "global_batch_size",
    "seed",
)
IGNORED_CONFIG = {"output_dir", "run_name", "logging_dir", "aim_repo", "resume_from_checkpoint", "experiment"}


def settings(run: Run) -> Json:
    found = {key: run.record[key] for key in IDENTITY if key in run.record}
    config = run.record.get("config")
    return found | (
        {key: value for key, value in config.items() if key not in IGNORED_CONFIG}
        if isinstance(config, dict)
        else {}
    )


def flat(value: Any, prefix: str = "") -> Json:
    if not isinstance(value, dict):
        return {prefix: value} if prefix else {}
    found: Json = {}
    for key, item in value.items():
        found |= flat(item, f"{prefix}.{key}" if prefix else str(key))
    return found


def interpolate(curve: Curve, place: float) -> tuple[float, bool] | None:
    """The value of ``curve`` at ``place`` and whether it lies between recorded points; None outside of
    them.
    """
    places, values = curve
    if not places or not places[0] <= place <= places[-1]:
        return None
    right = bisect.bisect_left(places, place)
    if places[right] == place:
        return values[right], False
    left = right - 1
    share = (place - places[left]) / (places[right] - places[left])
    return values[left] + share * (values[right] - values[left]), True


def by_place(curve: Curve) -> Curve:
    """``curve`` by rising place: a clock that was set back, or a resumed count, must not break the search."""
    pairs = dict(sorted(zip(*curve, strict=True)))
    return list(pairs), list(pairs.values())


def at_equal(runs: Sequence[Run], axis: str) -> list[Json]:
    """Each compared metric at a quarter, half, three quarters and all of what every run covers on
    ``axis``.
    """
    rows: list[Json] = []
    for split, metric in COMPARED:
        curves = [by_place(run.curve(split, metric, axis)) for run in runs]
        if not all(places for places, _ in curves):
            continue
        first, end = max(places[0] for places, _ in curves), min(places[-1] for places, _ in curves)
        if end < first:
            continue
        wanted = [
            first + share * (end - first) if axis == "time" else float(round(first + share * (end - first)))
            for share in SHARES
        ]
        for place in dict.fromkeys(wanted):
            found = [interpolate(curve, min(max(place, first), end)) for curve in curves]
            rows.append(
                {
                    "metric": f"{split} {metric}",
                    "at": place,
                    "values": [value[0] if value else None for value in found],
                    "interpolated": [bool(value and value[1]) for value in found],
                }
            )
    return rows


def final_figures(run: Run) -> Json:
    """The figures at the end of a run; what was not measured is None."""
    mean, _, count = train_end(run)
    measured = run.measurements
    loss, step_time, peaks = measured.loss or Losses(), measured.step_time_s, measured.peak_memory_gib
    figures: Json = {
        "steps": measured.steps or _whole(run.last("train", "step")),
        "tokens": measured.tokens or _whole(run.last("train", "tokens")),
        "seconds": run.seconds(),
        "eval loss": run.last("eval", "loss") if run.entries.get("eval") else loss.eval,
        "best eval loss": run.best("eval", "loss"),
        "eval perplexity": run.last("eval", "perplexity"),
        "eval mean_token_accuracy": run.last("eval", "mean_token_accuracy"),
        "train loss": run.last("train", "loss") if run.entries.get("train") else loss.last,
        "train loss, mean of the last tenth": mean if count > 1 else None,
        "tokens_per_s": measured.tokens_per_s,
        "samples_per_s": measured.samples_per_s,
        "step_time_s p50": step_time.p50 if step_time else None,
        "step_time_s p95": step_time.p95 if step_time else None,
        "mfu": measured.mfu,
        "peak_memory_gib": peaks.max if peaks else None,
    }
    return figures | {
        f"answers {key}": value
        for key, value in flat(measured.answers).items()
        if key.endswith(("exact_match", "loss", "perplexity"))
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def train_end(run: Run) -> tuple[float | None, float | None, int]:
    """Mean of the last tenth of the training losses (at least five where there are as many), its standard
    error, the count.
    """
    losses = run.curve("train", "loss")[1]
    last = losses[-max(5, len(losses) // 10) :]
    if len(last) < 2:
        return (last[0] if last else None), None, len(last)
    return statistics.fmean(last), statistics.stdev(last) / math.sqrt(len(last)), len(last)
