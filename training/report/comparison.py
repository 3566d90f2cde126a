"""What differs between runs, what may be compared, and which is better by more than its own noise. No torch.

:func:`compare` returns plain data (the JSON of ``podtune compare``); training.report.compare shows it. Losses are in nats
per token. Every figure at a common place is linearly interpolated between the two recorded points around it, and says so.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.report.runs import AXES, Curve, Run, number, unique_names
from training.run.errors import DATA, UserError
from training.run.record import Json

SHARES = (0.25, 0.5, 0.75, 1.0)
COMPARED = (("eval", "loss"), ("eval", "mean_token_accuracy"), ("train", "loss"))
LAST_EVALUATIONS = 5
CLEAR = 2.0  # a difference counts when it is more than two standard deviations of its noise
BUDGET_TOLERANCE = 0.02
SEEDS = ("seed", "data_seed")
IGNORED_CONFIG = {"output_dir", "run_name", "logging_dir", "aim_repo", "resume_from_checkpoint", "experiment"}
IDENTITY = ("mode", "strategy", "model", "world_size", "nnodes", "nproc_per_node", "global_batch_size", "seed")


def compare(runs: Sequence[Run]) -> Json:
    """The comparison of two or more runs as JSON-ready data.

    Keys: ``runs``, ``differences`` (by group), ``not_comparable``, ``at_equal`` (step, tokens, time), ``final``,
    ``verdict``, ``speed``, ``problems``.

    Raises:
        UserError: one folder twice, or two records of one run that contradict each other.
    """
    _refuse_twins(runs)
    names = unique_names(list(runs))
    differences = {
        "config": _difference([_flat(_config(run)) for run in runs]),
        "data": _difference([_flat(run.record.get("data")) for run in runs]),
        "code": _difference([{"git_sha": _provenance(run, "git_sha"), "image": _provenance(run, "image")} for run in runs]),
        "versions": _difference([_flat(_provenance(run, "versions")) for run in runs]),
        "hardware": _difference([_flat(_provenance(run, "hardware")) for run in runs]),
    }
    blocked, remarks = _comparability(runs, names, differences)
    return {
        "schema": "podtune.compare/1",
        "runs": [_facts(run, name) for run, name in zip(runs, names, strict=True)],
        "differences": differences,
        "not_comparable": blocked + remarks,
        "at_equal": {axis: _at_equal(runs, axis) for axis in AXES},
        "final": [_final(run) for run in runs],
        "verdict": _verdict(runs, names, blocked),
        "speed": _speed(runs, names),
        "problems": [problem for run in runs for problem in run.problems],
    }


def _refuse_twins(runs: Sequence[Run]) -> None:
    for index, run in enumerate(runs):
        for other in runs[:index]:
            if run.path.resolve() == other.path.resolve():
                raise UserError("the same folder is given twice", where=str(run.path), fix="compare two different runs")
            same = run.record.get("name") == other.record.get("name") and run.record.get("started_at") == other.record.get("started_at")
            if same and (run.record.get("status"), run.record.get("measurements")) != (
                other.record.get("status"),
                other.record.get("measurements"),
            ):
                raise UserError(
                    f"two records of one run ({run.name}, started {run.record.get('started_at')}) contradict each other",
                    where=f"{other.path} and {run.path}",
                    fix="one is an old copy: compare with the one that is complete",
                    code=DATA,
                )


def _facts(run: Run, name: str) -> Json:
    return {
        "name": name,
        "path": str(run.path),
        "status": run.status,
        "reason": run.record.get("reason") or "",
        "started_at": run.record.get("started_at"),
        "attempts": len(run.record.get("attempts") or []),
        **{key: run.record[key] for key in IDENTITY if key in run.record},
    }


# ---------------------------------------------------------------- what differs


def _config(run: Run) -> Json:
    found = {key: run.record[key] for key in IDENTITY if key in run.record}
    config = run.record.get("config")
    return found | ({key: value for key, value in config.items() if key not in IGNORED_CONFIG} if isinstance(config, dict) else {})


def _provenance(run: Run, key: str) -> Any:
    return (run.record.get("provenance") or {}).get(key)


def _flat(value: Any, prefix: str = "") -> Json:
    if not isinstance(value, dict):
        return {prefix: value} if prefix else {}
    found: Json = {}
    for key, item in value.items():
        found |= _flat(item, f"{prefix}.{key}" if prefix else str(key))
    return found


def _difference(sides: Sequence[Json]) -> list[Json]:
    """``[{"key": ..., "values": [one a run]}]`` for the keys whose values are not all equal; None where a run has none."""
    keys = list(dict.fromkeys(key for side in sides for key in side))
    return [
        {"key": key, "values": [side.get(key) for side in sides]}
        for key in keys
        if any(not _same(side.get(key), sides[0].get(key)) for side in sides[1:])
    ]


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, int | float) and isinstance(right, int | float):
        return bool(left == right)
    return str(left) == str(right) and (left is None) == (right is None)


# ---------------------------------------------------------------- what may be compared


def _comparability(runs: Sequence[Run], names: Sequence[str], differences: dict[str, list[Json]]) -> tuple[list[str], list[str]]:
    """Why losses may not be compared at all, and what else to keep in mind, each with the values found."""
    blocked, remarks = [], []
    changed = {row["key"]: row["values"] for group in ("config", "data") for row in differences[group]}
    if "mode" in changed:
        blocked.append(f"anything but time: the modes differ ({_list(names, changed['mode'])})")
    data_key = next((key for key in ("eval_fingerprint", "fingerprint") if key in changed), None)
    if data_key:
        blocked.append(f"losses: the data sets differ ({data_key}: {_list(names, changed[data_key])})")
    tokenizers = _tokenizers(runs)
    if any(tokenizer != tokenizers[0] for tokenizer in tokenizers):
        blocked.append(f"losses: the tokenizers differ, so a token is not the same unit ({_list(names, tokenizers)})")
    for key in ("max_length", "truncation_mode", "assistant_only_loss", "completion_only_loss"):
        if key in changed:
            blocked.append(f"losses: {key} differs, so other tokens are trained and judged ({_list(names, changed[key])})")
    if "global_batch_size" in changed:
        remarks.append(
            f"metrics at equal steps: the global batch differs ({_list(names, changed['global_batch_size'])}); look at equal tokens or time"
        )
    hardware = {row["key"]: row["values"] for row in differences["hardware"]}
    if hardware:
        key, values = next(iter(hardware.items()))
        remarks.append(f"speed, memory and equal times: the hardware differs ({key}: {_list(names, values)})")
    for run, name in zip(runs, names, strict=True):
        if run.status != "ok":
            why = f": {run.record['reason']}" if run.record.get("reason") else ""
            remarks.append(f"final figures of {name}: it is not complete ({run.status}{why})")
        if len(run.record.get("attempts") or []) > 1:
            remarks.append(f"equal times of {name}: its clock includes the pauses between {len(run.record['attempts'])} starts")
    return blocked, remarks


def _tokenizers(runs: Sequence[Run]) -> list[str]:
    """What tells the tokenizers apart: what the records say, else the files the runs saved, else the models' names."""
    for identify in (_recorded_tokenizer, _saved_tokenizer):
        found = [identify(run) for run in runs]
        if all(found):
            return [str(one) for one in found]
    return [Path(str(run.record.get("model") or "")).name for run in runs]


def _recorded_tokenizer(run: Run) -> str | None:
    found = (run.record.get("data") or {}).get("tokenizer")
    return str(found) if found else None


def _saved_tokenizer(run: Run) -> str | None:
    """The first digits of the SHA-256 of tokenizer.json in final/, or in a checkpoint."""
    folders = [run.path / "final", *sorted(run.path.glob("checkpoint-*"))]
    file = next((folder / "tokenizer.json" for folder in folders if (folder / "tokenizer.json").is_file()), None)
    return f"tokenizer.json {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}" if file else None


def _list(names: Sequence[str], values: Sequence[Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))


# ---------------------------------------------------------------- metrics


def interpolate(curve: Curve, place: float) -> tuple[float, bool] | None:
    """The value of ``curve`` at ``place`` and whether it lies between recorded points; None outside of them."""
    places, values = curve
    if not places or not places[0] <= place <= places[-1]:
        return None
    right = bisect.bisect_left(places, place)
    if places[right] == place:
        return values[right], False
    left = right - 1
    share = (place - places[left]) / (places[right] - places[left])
    return values[left] + share * (values[right] - values[left]), True


def _at_equal(runs: Sequence[Run], axis: str) -> list[Json]:
    """Each compared metric at a quarter, half, three quarters and all of what every run covers on ``axis``."""
    rows: list[Json] = []
    for split, metric in COMPARED:
        curves = [_sorted(run.curve(split, metric, axis)) for run in runs]
        if not all(places for places, _ in curves):
            continue
        first, end = max(places[0] for places, _ in curves), min(places[-1] for places, _ in curves)
        if end < first:
            continue
        wanted = [first + share * (end - first) if axis == "time" else float(round(first + share * (end - first))) for share in SHARES]
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


def _sorted(curve: Curve) -> Curve:
    """``curve`` by rising place: a clock that was set back, or a resumed count, must not break the search."""
    pairs = dict(sorted(zip(*curve, strict=True)))
    return list(pairs), list(pairs.values())


def _final(run: Run) -> Json:
    """The figures at the end of a run; what was not measured is None."""
    mean, _, count = _train_end(run)
    found: Json = {
        "steps": run.measured("steps") or _whole(run.last("train", "step")),
        "tokens": run.measured("tokens") or _whole(run.last("train", "tokens")),
        "seconds": run.seconds(),
        "eval loss": run.last("eval", "loss") if run.entries.get("eval") else number(run.measured("loss", "eval")),
        "best eval loss": run.best("eval", "loss"),
        "eval perplexity": run.last("eval", "perplexity"),
        "eval mean_token_accuracy": run.last("eval", "mean_token_accuracy"),
        "train loss": run.last("train", "loss") if run.entries.get("train") else number(run.measured("loss", "last")),
        "train loss, mean of the last tenth": mean if count > 1 else None,
        "tokens_per_s": number(run.measured("tokens_per_s")),
        "samples_per_s": number(run.measured("samples_per_s")),
        "step_time_s p50": number(run.measured("step_time_s", "p50")),
        "step_time_s p95": number(run.measured("step_time_s", "p95")),
        "mfu": number(run.measured("mfu")),
        "peak_memory_gib": number(run.measured("peak_memory_gib", "max")),
    }
    answers = run.measured("answers")
    if isinstance(answers, dict):
        found |= {f"answers {key}": number(value) for key, value in _flat(answers).items() if number(value) is not None}
    return found


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


# ---------------------------------------------------------------- which is better


@dataclass(frozen=True)
class Contender:
    """A run, or the runs that repeat one configuration with several seeds: their mean, and the noise of it."""

    name: str
    loss: float
    noise: float | None  # standard deviation of ``loss``
    repeats: int = 1


def _verdict(runs: Sequence[Run], names: Sequence[str], blocked: Sequence[str]) -> Json:
    """Which run has the lowest loss at an equal budget, by how much, and whether that exceeds the runs' own noise."""
    if blocked:
        return {"better": None, "text": f"Which is better cannot be said. Not comparable: {'; '.join(blocked)}."}
    split = "eval" if all(run.curve("eval", "loss")[0] for run in runs) else "train"
    budget, axis = _budget(runs)
    at_axis = axis if split == "eval" and not budget else None
    figures = [_loss_and_noise(run, split, at_axis, _common_end(runs, axis)) for run in runs]
    values = [value for value, _ in figures if value is not None]
    if len(values) < len(runs):
        return {"better": None, "text": "Which is better cannot be said: a run has no finite loss."}
    contenders = sorted(_contenders(runs, names, values, [noise for _, noise in figures]), key=lambda one: one.loss)
    best, second = contenders[0], contenders[1]
    difference = second.loss - best.loss
    noise = None if best.noise is None or second.noise is None else math.hypot(best.noise, second.noise)
    basis = (
        "the spread between seeds of one configuration"
        if any(one.repeats > 1 for one in contenders)
        else f"the spread of the last {LAST_EVALUATIONS} evaluations around their trend"
        if split == "eval"
        else "the standard error of the last tenth of the training losses"
    )
    place = f"at the end, {budget}" if budget else f"at equal {axis}, interpolated" if at_axis else "at the end, budgets differ"
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


def _contenders(runs: Sequence[Run], names: Sequence[str], values: Sequence[float], noises: Sequence[float | None]) -> list[Contender]:
    """The runs, those that differ in their seed only taken together; alone where nothing but seeds is compared.

    With repeats, the spread between seeds, pooled over the configurations that have some, is the noise of every run.
    """
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        config = {key: item for key, item in _flat(_config(run)).items() if key not in SEEDS}
        groups.setdefault(repr(sorted(config.items(), key=lambda item: item[0])), []).append(index)
    repeated = [group for group in groups.values() if len(group) > 1]
    if len(groups) == 1 or not repeated:
        return [Contender(*one) for one in zip(names, values, noises, strict=True)]
    spread = math.sqrt(statistics.fmean(statistics.variance([values[index] for index in group]) for group in repeated))
    return [
        Contender(
            names[group[0]] if len(group) == 1 else f"the mean of {', '.join(names[index] for index in group)}",
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
    lead = f"{best.name} has the lower {metric} {place}: {best.loss:.4f} against {second.loss:.4f} of {second.name}, {difference:.4f} less{share}. "
    if noise is None:
        return lead + "Whether that is more than noise is not known: too few evaluations, and no second seed."
    times = f"{difference / noise:.1f} times" if noise else "far above"
    if difference > CLEAR * noise:
        return f"{lead}That exceeds the noise: it is {times} the noise of such a difference, {noise:.2g} ({basis})."
    return (
        f"{lead}That does not exceed the noise: it is {times} the noise of such a difference, {noise:.2g} ({basis}), so neither is better."
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
        mean, error, _ = _train_end(run)
        return mean, error
    places, losses = _sorted(run.curve("eval", "loss", axis or "step"))
    if axis is not None:
        found = interpolate((places, losses), end)
        kept = [loss for place, loss in zip(places, losses, strict=True) if place <= end]
        return (found[0] if found else None), _spread(kept[-LAST_EVALUATIONS:])
    return (losses[-1] if losses else None), _spread(losses[-LAST_EVALUATIONS:])


def _spread(values: Sequence[float]) -> float | None:
    """Standard deviation around the straight line through ``values``; None for fewer than three.

    Around the line, because a loss that still falls would otherwise show its slope as noise (n - 2 degrees of freedom).
    """
    if len(values) < 3:
        return None
    slope, intercept = statistics.linear_regression(range(len(values)), values)
    rest = [value - (intercept + slope * index) for index, value in enumerate(values)]
    return math.sqrt(sum(item * item for item in rest) / (len(values) - 2))


def _train_end(run: Run) -> tuple[float | None, float | None, int]:
    """Mean of the last tenth of the training losses (at least five where there are as many), its standard error, the count."""
    losses = run.curve("train", "loss")[1]
    last = losses[-max(5, len(losses) // 10) :]
    if len(last) < 2:
        return (last[0] if last else None), None, len(last)
    return statistics.fmean(last), statistics.stdev(last) / math.sqrt(len(last)), len(last)


def _speed(runs: Sequence[Run], names: Sequence[str]) -> Json | None:
    """Which is faster, and whether by more than the spread of its steps (the standard error of their mean)."""
    key = next((key for key in ("tokens_per_s", "samples_per_s") if all(number(run.measured(key)) for run in runs)), None)
    if key is None:
        return None
    rates = [number(run.measured(key)) or 0.0 for run in runs]
    errors = [_relative_error(run) for run in runs]
    order = sorted(range(len(rates)), key=rates.__getitem__, reverse=True)
    best, second = order[0], order[1]
    ratio = rates[best] / rates[second]
    left, right = errors[best], errors[second]
    noise = None if left is None or right is None else math.hypot(left, right)
    exceeds = None if noise is None else ratio - 1 > CLEAR * noise
    figures = f"{rates[best]:,.0f} against {rates[second]:,.0f} {key.replace('_per_s', '/s')}"
    if exceeds is False:
        text = f"Speed is the same within the spread of the steps ({CLEAR * noise:.1%}): {figures}." if noise is not None else figures
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
    mean, std, count = (number(run.measured("step_time_s", key)) for key in ("mean", "std", "n"))
    return std / math.sqrt(count) / mean if mean and std is not None and count else None
