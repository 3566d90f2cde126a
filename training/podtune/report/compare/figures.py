"""Metrics of runs side by side: settings, values at common places, values at the end. No torch."""

from __future__ import annotations

import bisect
import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from podtune.report.runs.runs import Curve, Run
from podtune.run.record import Json, Losses, mapping, number

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


Figures = dict[str, float | int | None]  # by name; None was not measured


@dataclass(frozen=True)
class EqualPlace:
    """A metric of all runs at one place, interpolated linearly; None where a run was not there."""

    metric: str
    at: float
    values: Sequence[float | None]


def settings(run: Run) -> Json:
    values = {key: run.record[key] for key in IDENTITY if key in run.record}
    config = mapping(run.record.get("config"))
    return values | {key: value for key, value in config.items() if key not in IGNORED_CONFIG}


def flat(value: Any, prefix: str = "") -> Json:
    if not isinstance(value, dict):
        return {prefix: value} if prefix else {}
    values: Json = {}
    for key, item in value.items():
        values |= flat(item, f"{prefix}.{key}" if prefix else str(key))
    return values


def interpolate(curve: Curve, place: float) -> float | None:
    """Return the value of ``curve`` at ``place``; None outside of its points."""
    places, values = curve
    if not places or not places[0] <= place <= places[-1]:
        return None
    right = bisect.bisect_left(places, place)
    if places[right] == place:
        return values[right]
    left = right - 1
    share = (place - places[left]) / (places[right] - places[left])
    return values[left] + share * (values[right] - values[left])


def trained(run: Run, split: str, metric: str, axis: str = "step") -> Curve:
    """A curve by rising place, without the untrained model, which is far from any trend.

    A clock that was set back, or a resumed count, must not break a search in it.
    """
    places, values = run.curve(split, metric, axis)
    if len(places) > 1 and run.curve(split, metric)[0][0] == 0:
        places, values = places[1:], values[1:]
    if all(map(operator.lt, places, places[1:])):
        return places, values
    pairs = dict(sorted(zip(places, values, strict=True)))
    return list(pairs), list(pairs.values())


def at_equal(runs: Sequence[Run], axis: str, why_not: Sequence[str | None]) -> list[EqualPlace]:
    """Each compared metric where the shortest of the ranked runs ends; ``why_not``: why one is not ranked."""
    rows = []
    for split, metric in COMPARED:
        curves = [trained(run, split, metric, axis) for run in runs]
        ends = [places[-1:] for (places, _), why in zip(curves, why_not, strict=True) if not why]
        if ends and all(ends):
            end = min(ends)[0]
            values = [interpolate(curve, end) for curve in curves]
            if sum(value is not None for value in values) > 1:
                rows.append(EqualPlace(f"{split} {metric}", end, values))
    return rows


def final_figures(run: Run) -> Figures:
    mean, _, count = train_end(run)
    measured = run.measurements
    loss, step_time, peaks = measured.loss or Losses(), measured.step_time_s, measured.peak_memory_gib
    figures: Figures = {
        "steps": measured.steps or run.counted("step"),
        "tokens": measured.tokens or run.counted("tokens"),
        "seconds": run.seconds(),
        "eval loss": run.last("eval", "loss") if run.entries.get("eval") else loss.eval,
        "best eval loss": run.best("eval", "loss"),
        **{f"{split} loss": run.last(split, "loss") for split in run.entries if split.startswith("eval_")},
        "eval perplexity": run.last("eval", "perplexity"),
        "eval mean_token_accuracy": run.last("eval", "mean_token_accuracy"),
        "train loss": run.last("train", "loss") if run.entries.get("train") else loss.last,
        "train loss, mean of the last tenth": mean if count > 1 else None,
        "tokens_per_s": measured.tokens_per_s,
        "samples_per_s": measured.samples_per_s,
        "step_time_s p50": step_time.p50 if step_time else None,
        "step_time_s p95": step_time.p95 if step_time else None,
        "speeds since step": measured.speeds_since_step,
        "mfu": measured.mfu,
        **{f"start_s {phase}": number(seconds) for phase, seconds in (measured.start_s or {}).items()},
        "peak_memory_gib": peaks.max if peaks else None,
    }
    answers = {
        f"answers {key}": value
        for key, value in flat(measured.answers).items()
        if key.endswith(("exact_match", "loss", "perplexity")) and number(value) is not None
    }
    return figures | answers | _task_scores(measured.tasks or {})


def _task_scores(tasks: Json) -> Figures:
    """Metrics of the tuned model by ``podtune eval``.

    A name says how the task was run where it was not the task's own way: such scores are not comparable.
    """
    figures: Figures = {}
    for task, score in mapping(tasks.get("scores")).items():
        asked = flat(mapping(score).get("asked"))
        # no examples are a way of their own: the task may have some
        ways = [f"{key} {asked[key]}" for key in ("limit", "fewshot") if asked.get(key) is not None]
        if asked.get("chat_template"):
            ways.append("in chat template")
        way = "".join(f", {each}" for each in ways)
        for metric, value in flat(mapping(score).get("tuned")).items():
            if not metric.endswith("_stderr") and number(value) is not None:
                figures[f"{task} {metric}{way}"] = value
    return figures


def train_end(run: Run) -> tuple[float | None, float | None, int]:
    """Mean of the last tenth of the training losses, its standard error, and the count.

    The tenth has at least five losses where there are as many.
    """
    losses = run.curve("train", "loss")[1]
    last = losses[-max(5, len(losses) // 10) :]
    if len(last) < 2:
        return (last[0] if last else None), None, len(last)
    return statistics.fmean(last), statistics.stdev(last) / math.sqrt(len(last)), len(last)
