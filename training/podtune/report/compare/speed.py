"""Verdict on speed: the faster run, if something that changes speed differs. No torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from podtune.report.runs.runs import Run

CLEAR = 2.0  # a difference counts when it is more than two standard deviations of its noise
RATES = ("tokens_per_s", "samples_per_s")
LEAST_WINDOWS = 3
# what is learnt, and what is done between the timed steps: neither changes how long a step takes
NOT_SPEED = frozenset((
    "adam_beta1", "adam_beta2", "adam_epsilon", "answer_max_new_tokens", "answer_rows", "data_seed",
    "early_stopping_patience", "early_stopping_threshold", "eval_on_start", "eval_steps", "eval_strategy",
    "greater_is_better", "learning_rate", "load_best_model_at_end", "logging_steps", "lora_alpha",
    "lr_scheduler_kwargs", "lr_scheduler_type", "max_eval_rows", "max_grad_norm", "max_steps",
    "metric_for_best_model", "num_train_epochs", "publish", "save_steps", "save_strategy",
    "save_total_limit", "seed", "warmup_ratio", "warmup_steps", "weight_decay",
))  # fmt: skip


@dataclass(frozen=True)
class Speed:
    """Rates of the runs. ``faster`` is None within ``noise`` (relative), and where the work is the same."""

    metric: str
    values: Sequence[float | None]
    faster: str | None
    ratio: float
    noise: float | None
    exceeds_noise: bool | None
    text: str


def speed(runs: Sequence[Run], names: Sequence[str], changed: Collection[str]) -> Speed | None:
    """Compare the two fastest runs; None unless two measured their speed.

    Args:
        changed: the keys of settings, data, code, versions and hardware in which the runs differ.
    """
    rates_by_key = {key: [getattr(run.measurements, key) or 0.0 for run in runs] for key in RATES}
    key = max(RATES, key=lambda key: sum(rate > 0 for rate in rates_by_key[key]))
    rates = rates_by_key[key]
    if sum(rate > 0 for rate in rates) < 2:
        return None
    best, second = sorted(range(len(rates)), key=rates.__getitem__, reverse=True)[:2]
    ratio = rates[best] / rates[second]
    left, right = spread(runs[best]), spread(runs[second])
    noise = None if left is None or right is None else math.hypot(left, right)
    exceeds = None if noise is None else ratio - 1 > CLEAR * noise
    against = f"{rates[best]:,.0f} against {rates[second]:,.0f} {key.replace('_per_s', '/s')}"
    same_work = not set(changed) - NOT_SPEED
    known = "" if noise is None else f"the spread between their logging windows ({CLEAR * noise:.1%})"
    if exceeds is False:
        text = f"Speed is the same within {known}: {against}."
    elif same_work:
        text = f"No verdict on speed: nothing that changes it differs, so the machine did ({against})."
    else:
        doubt = f"more than {known}" if known else "without enough logging windows to know the noise"
        text = f"{names[best]} is {ratio:.2f} times as fast as {names[second]}: {against}, {doubt}."
    faster = None if same_work or exceeds is False else names[best]
    return Speed(key, [rate or None for rate in rates], faster, ratio, noise, exceeds, text)


def spread(run: Run) -> float | None:
    """Standard deviation of the speed between logging windows, relative to its mean.

    The mean's own standard error would say nothing of a machine that is slower for minutes. The first window
    warms up. A record without windows has its steps.
    """
    windows = run.curve("train", "tokens_per_s")[1][1:]
    if len(windows) >= LEAST_WINDOWS:
        return statistics.stdev(windows) / statistics.fmean(windows)
    step_time = run.measurements.step_time_s
    if windows or step_time is None or step_time.std is None or step_time.mean <= 0:
        return None
    return step_time.std / step_time.mean
