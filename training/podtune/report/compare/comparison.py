"""Comparison of runs: differences, limits, metrics at equal places, and verdicts. No torch.

:func:`compare` returns what ``podtune compare`` shows; its JSON is :meth:`Comparison.as_json`. Losses are in
nats per token. A metric where a run did not record it is interpolated linearly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from podtune.report.compare.answers import Answered, answered
from podtune.report.compare.figures import (
    IDENTITY,
    EqualPlace,
    Figures,
    at_equal,
    final_figures,
    flat,
    settings,
)
from podtune.report.compare.verdict import Verdict, excluded, verdict
from podtune.report.runs.runs import AXES, Run, unique_names
from podtune.run.errors import ConfigError
from podtune.run.record import Json, mapping

HASH = re.compile(r"(?<=.)_[0-9a-f]{6}$")  # that a sweep puts behind the name of a run
OTHER_TOKENS = "losses: other tokens are trained and judged"
# keys in which runs must not differ, and what cannot be compared if they do
BLOCKING = {
    "mode": "anything but time: the modes differ",
    "eval_fingerprint": "losses: the data sets differ",
    "fingerprint": "losses: the data sets differ",
    "tokenizer": "losses: the tokenizers differ, so a token is not the same unit",
    "max_length": OTHER_TOKENS,
    "truncation_mode": OTHER_TOKENS,
    "assistant_only_loss": OTHER_TOKENS,
    "completion_only_loss": OTHER_TOKENS,
}


@dataclass(frozen=True)
class Difference:
    """A key whose value is not the same in all runs; None is absent."""

    key: str
    values: Sequence[Any]

    def said(self, names: Sequence[str]) -> str:
        """``key: a: 1, b: 2``."""
        values = zip(names, self.values, strict=True)
        return f"{self.key}: {', '.join(f'{name}: {value}' for name, value in values)}"


Differences = Mapping[str, Sequence[Difference]]  # by group: config, data, code, versions, hardware


@dataclass(frozen=True)
class Comparison:
    """Two or more runs side by side; sequences have an entry a run."""

    runs: Sequence[Run]
    names: Sequence[str]
    differences: Differences
    not_comparable: Sequence[str]
    at_equal: Mapping[str, Sequence[EqualPlace]]  # by axis: step, tokens, time
    final: Sequence[Figures]
    verdict: Verdict
    answers: Answered | None

    @property
    def problems(self) -> list[str]:
        return [problem for run in self.runs for problem in run.problems]

    @property
    def conclusions(self) -> list[str]:
        """A sentence on losses, and one on answers where they can be compared."""
        return [each.text for each in (self.verdict, self.answers) if each]

    def as_json(self) -> dict[str, object]:
        return {
            "schema": "podtune.compare/1",
            "runs": [_identity(run, name) for run, name in zip(self.runs, self.names, strict=True)],
            "differences": {group: [asdict(row) for row in rows] for group, rows in self.differences.items()},
            "not_comparable": self.not_comparable,
            "at_equal": {axis: [asdict(row) for row in rows] for axis, rows in self.at_equal.items()},
            "final": self.final,
            "verdict": asdict(self.verdict),
            "answers": asdict(self.answers) if self.answers else None,
            "problems": self.problems,
        }


def _identity(run: Run, name: str) -> dict[str, object]:
    """A run's name, place and state, and of its record what tells runs apart."""
    return {
        "name": name,
        "path": str(run.path),
        "status": run.status,
        "reason": run.record.get("reason") or "",
        "started_at": run.record.get("started_at"),
        "attempts": len(run.record.get("attempts") or []),
        **{key: run.record[key] for key in IDENTITY if key in run.record},
    }


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare two or more runs.

    Raises:
        ConfigError: one folder twice.
    """
    paths = [run.path.resolve() for run in runs]
    if twice := [str(run.path) for run, path in zip(runs, paths, strict=True) if paths.count(path) > 1]:
        raise ConfigError("the same folder is given twice", where=twice[0], fix="compare two different runs")
    names = unique_names([(run.name, run.path) for run in runs])
    short = [HASH.sub("", name) for name in names]
    names = short if len(set(short)) == len(names) else names
    why_not = excluded(runs)
    ranked = [(run, name) for run, name, why in zip(runs, names, why_not, strict=True) if not why]
    blocked, remarks = _comparability(*zip(*ranked, strict=True)) if ranked else ([], [])
    return Comparison(
        runs=runs,
        names=names,
        differences=_differences(runs),
        not_comparable=blocked + remarks + _incomplete(runs, names),
        at_equal={axis: at_equal(runs, axis, why_not) for axis in AXES},
        final=[final_figures(run) for run in runs],
        verdict=verdict(runs, names, blocked, why_not),
        answers=None if blocked else answered(runs, names),
    )


def _differences(runs: Sequence[Run]) -> Differences:
    provenance = [mapping(run.record.get("provenance")) for run in runs]
    return {
        "config": _differing([flat(settings(run)) for run in runs]),
        "data": _differing([flat(run.record.get("data")) for run in runs]),
        "code": _differing([{key: each.get(key) for key in ("git_sha", "image")} for each in provenance]),
        "versions": _differing([flat(each.get("versions")) for each in provenance]),
        "hardware": _differing([flat(each.get("hardware")) for each in provenance]),
    }


def _differing(sides: Sequence[Json]) -> list[Difference]:
    rows = [
        Difference(key, [side.get(key) for side in sides]) for key in {k: 0 for side in sides for k in side}
    ]
    return [row for row in rows if any(value != row.values[0] for value in row.values)]


def _comparability(runs: Sequence[Run], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Reasons not to compare losses at all, and other reservations, each with the values found."""
    differences = _differences(runs)
    changed = {row.key: row for group in ("config", "data") for row in differences[group]}
    blocked = [f"{why} ({changed[key].said(names)})" for key, why in BLOCKING.items() if key in changed]
    remarks = []
    if batch := changed.get("global_batch_size"):
        look = "look at equal tokens or time"
        remarks.append(f"metrics at equal steps: the global batch differs ({batch.said(names)}); {look}")
    for row in differences["hardware"][:1]:
        remarks.append(f"speed, memory and equal times: the hardware differs ({row.said(names)})")
    return blocked, remarks


def _incomplete(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    remarks = []
    for run, name in zip(runs, names, strict=True):
        if run.status != "ok":
            why = f": {run.record['reason']}" if run.record.get("reason") else ""
            remarks.append(f"final figures of {name}: it is not complete ({run.status}{why})")
        if (starts := len(run.record.get("attempts") or [])) > 1:
            remarks.append(f"equal times of {name}: its clock includes the pauses between {starts} starts")
    return remarks
