"""Comparison of runs: differences, limits, metrics at equal places, and a verdict. No torch.

:func:`compare` returns plain data (the JSON of ``podtune compare``); podtune.report.compare.view shows it.
Losses are in nats per token. Every metric at a common place is linearly interpolated between the two recorded
points around it, and says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from podtune.report.compare.figures import IDENTITY, at_equal, final_figures, flat, settings
from podtune.report.compare.verdict import excluded, speed, verdict
from podtune.report.runs.runs import AXES, Run, unique_names
from podtune.run.errors import ConfigError, DataError
from podtune.run.record import Json


def compare(runs: Sequence[Run]) -> Json:
    """The comparison of two or more runs as JSON-ready data.

    Keys: ``runs``, ``differences`` (by group), ``not_comparable``, ``at_equal`` (step, tokens, time),
    ``final``, ``verdict``, ``speed``, ``problems``.

    Raises:
        UserError: one folder twice, or two records of one run that contradict each other.
    """
    _refuse_twins(runs)
    names = unique_names([(run.name, run.path) for run in runs])
    why_not = excluded(runs)
    measured_speed = speed(runs, names)
    ranked = [run for run, why in zip(runs, why_not, strict=True) if not why]
    ranked_names = [name for name, why in zip(names, why_not, strict=True) if not why]
    blocked, remarks = _comparability(ranked, ranked_names) if ranked else ([], [])
    return {
        "schema": "podtune.compare/1",
        "runs": [_facts(run, name) for run, name in zip(runs, names, strict=True)],
        "differences": _differences(runs),
        "not_comparable": blocked + remarks + _incomplete(runs, names),
        "at_equal": {axis: at_equal(runs, axis, why_not) for axis in AXES},
        "final": [final_figures(run) for run in runs],
        "verdict": verdict(runs, names, blocked, why_not).as_json(),
        "speed": asdict(measured_speed) if measured_speed else None,
        "problems": [problem for run in runs for problem in run.problems],
    }


def _differences(runs: Sequence[Run]) -> dict[str, list[Json]]:
    return {
        "config": difference([flat(settings(run)) for run in runs]),
        "data": difference([flat(run.record.get("data")) for run in runs]),
        "code": difference(
            [{"git_sha": _provenance(run, "git_sha"), "image": _provenance(run, "image")} for run in runs]
        ),
        "versions": difference([flat(_provenance(run, "versions")) for run in runs]),
        "hardware": difference([flat(_provenance(run, "hardware")) for run in runs]),
    }


def _refuse_twins(runs: Sequence[Run]) -> None:
    for index, run in enumerate(runs):
        for other in runs[:index]:
            if run.path.resolve() == other.path.resolve():
                raise ConfigError(
                    "the same folder is given twice", where=str(run.path), fix="compare two different runs"
                )
            same = run.record.get("name") == other.record.get("name") and run.record.get(
                "started_at"
            ) == other.record.get("started_at")
            if same and (run.record.get("status"), run.record.get("measurements")) != (
                other.record.get("status"),
                other.record.get("measurements"),
            ):
                raise DataError(
                    f"two records of one run ({run.name}, started {run.record.get('started_at')}) contradict "
                    "each other",
                    where=f"{other.path} and {run.path}",
                    fix="one is an old copy: compare with the one that is complete",
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


def _provenance(run: Run, key: str) -> Any:
    return (run.record.get("provenance") or {}).get(key)


def difference(sides: Sequence[Json]) -> list[Json]:
    """Return ``{"key": ..., "values": [one a run]}`` for keys whose values differ; None is absent."""
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


def _comparability(runs: Sequence[Run], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Reasons not to compare losses at all, and other reservations, each with the values found."""
    blocked, remarks = [], []
    differences = _differences(runs)
    changed = {row["key"]: row["values"] for group in ("config", "data") for row in differences[group]}
    if "mode" in changed:
        blocked.append(f"anything but time: the modes differ ({_list(names, changed['mode'])})")
    data_key = next((key for key in ("eval_fingerprint", "fingerprint") if key in changed), None)
    if data_key:
        blocked.append(f"losses: the data sets differ ({data_key}: {_list(names, changed[data_key])})")
    tokenizers = _tokenizers(runs)
    if any(tokenizer != tokenizers[0] for tokenizer in tokenizers):
        blocked.append(
            "losses: the tokenizers differ, in vocabulary, rules or template, so a token is not the same "
            f"unit ({_list(names, tokenizers)})"
        )
    for key in ("max_length", "truncation_mode", "assistant_only_loss", "completion_only_loss"):
        if key in changed:
            blocked.append(
                f"losses: {key} differs, so other tokens are trained and judged "
                f"({_list(names, changed[key])})"
            )
    if "global_batch_size" in changed:
        remarks.append(
            "metrics at equal steps: the global batch differs "
            f"({_list(names, changed['global_batch_size'])}); look at equal tokens or time"
        )
    hardware = {row["key"]: row["values"] for row in differences["hardware"]}
    if hardware:
        key, values = next(iter(hardware.items()))
        remarks.append(f"speed, memory and equal times: the hardware differs ({key}: {_list(names, values)})")
    return blocked, remarks


def _incomplete(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    remarks = []
    for run, name in zip(runs, names, strict=True):
        if run.status != "ok":
            why = f": {run.record['reason']}" if run.record.get("reason") else ""
            remarks.append(f"final figures of {name}: it is not complete ({run.status}{why})")
        if len(run.record.get("attempts") or []) > 1:
            remarks.append(
                f"equal times of {name}: its clock includes the pauses between "
                f"{len(run.record['attempts'])} starts"
            )
    return remarks


def _tokenizers(runs: Sequence[Run]) -> list[str]:
    """Identify each tokenizer by the records, else by the files saved, else by the models' names."""
    for identify in (_recorded_tokenizer, _saved_tokenizer):
        tokenizers = [identify(run) for run in runs]
        if all(tokenizers):
            return [str(tokenizer) for tokenizer in tokenizers]
    return [Path(str(run.record.get("model") or "")).name for run in runs]


def _recorded_tokenizer(run: Run) -> str | None:
    tokenizer = (run.record.get("data") or {}).get("tokenizer")
    return str(tokenizer) if tokenizer else None


def _saved_tokenizer(run: Run) -> str | None:
    """The first digits of the SHA-256 of tokenizer.json in final/, or in a checkpoint."""
    folders = [run.path / "final", *sorted(run.path.glob("checkpoint-*"))]
    file = next(
        (folder / "tokenizer.json" for folder in folders if (folder / "tokenizer.json").is_file()), None
    )
    return f"tokenizer.json {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}" if file else None


def _list(names: Sequence[str], values: Sequence[Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
