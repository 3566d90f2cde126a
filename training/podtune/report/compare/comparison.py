"""Comparison of runs: differences, limits, metrics at equal places, and verdicts. No torch.

:func:`compare` returns what ``podtune compare`` shows; its JSON is :meth:`Comparison.as_json`. Losses are in
nats per token. Every metric at a common place is linearly interpolated between the two recorded points around
it, and says so.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
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
from podtune.report.compare.speed import Speed, speed
from podtune.report.compare.verdict import Verdict, excluded, verdict
from podtune.report.runs.runs import AXES, Run, unique_names
from podtune.run.errors import ConfigError, DataError
from podtune.run.record import Json

HASH = re.compile(r"(?<=.)_[0-9a-f]{6}$")  # that a sweep puts behind the name of a run


@dataclass(frozen=True)
class Identity:
    """A run's name, place and state, and of its ``record`` what tells runs apart."""

    name: str
    path: str
    status: str
    reason: str
    started_at: str | None
    attempts: int
    record: Json

    def as_json(self) -> Json:
        """The entry of ``runs``."""
        fields: Json = dict(vars(self))
        record: Json = fields.pop("record")
        return fields | record


@dataclass(frozen=True)
class Difference:
    """A key whose value is not the same in all runs; None is absent."""

    key: str
    values: Sequence[Any]


@dataclass(frozen=True)
class Comparison:
    """Two or more runs side by side; sequences have an entry a run."""

    runs: Sequence[Identity]
    differences: Mapping[str, Sequence[Difference]]  # by group
    not_comparable: Sequence[str]
    at_equal: Mapping[str, Sequence[EqualPlace]]  # by axis: step, tokens, time
    final: Sequence[Figures]
    verdict: Verdict
    answers: Answered | None
    speed: Speed | None
    problems: Sequence[str]

    @property
    def names(self) -> list[str]:
        return [run.name for run in self.runs]

    @property
    def conclusions(self) -> list[str]:
        """A sentence on losses, one on answers and one on speed, where they can be said."""
        return [each.text for each in (self.verdict, self.answers, self.speed) if each]

    def as_json(self) -> Json:
        """The JSON of ``podtune compare``."""
        return {
            "schema": "podtune.compare/1",
            **asdict(self),
            "runs": [run.as_json() for run in self.runs],
            "verdict": self.verdict.as_json(),
        }


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare two or more runs.

    Raises:
        UserError: one folder twice, or two records of one run that contradict each other.
    """
    _refuse_twins(runs)
    names = short_names(unique_names([(run.name, run.path) for run in runs]))
    why_not = excluded(runs)
    ranked = [run for run, why in zip(runs, why_not, strict=True) if not why]
    ranked_names = [name for name, why in zip(names, why_not, strict=True) if not why]
    blocked, remarks = _comparability(ranked, ranked_names) if ranked else ([], [])
    differences = _differences(runs)
    changed = {row.key for rows in differences.values() for row in rows}
    return Comparison(
        runs=[_identity(run, name) for run, name in zip(runs, names, strict=True)],
        differences=differences,
        not_comparable=blocked + remarks + _incomplete(runs, names),
        at_equal={axis: at_equal(runs, axis, why_not) for axis in AXES},
        final=[final_figures(run) for run in runs],
        verdict=verdict(runs, names, blocked, why_not),
        answers=None if blocked else answered(runs, names),
        speed=speed(runs, names, changed),
        problems=[problem for run in runs for problem in run.problems],
    )


def short_names(names: Sequence[str]) -> list[str]:
    """``names`` without the hashes that a sweep appends, where they are unique without."""
    short = [HASH.sub("", name) for name in names]
    return short if len(set(short)) == len(names) else list(names)


def _differences(runs: Sequence[Run]) -> dict[str, list[Difference]]:
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


def _identity(run: Run, name: str) -> Identity:
    return Identity(
        name=name,
        path=str(run.path),
        status=run.status,
        reason=run.record.get("reason") or "",
        started_at=run.record.get("started_at"),
        attempts=len(run.record.get("attempts") or []),
        record={key: run.record[key] for key in IDENTITY if key in run.record},
    )


def _provenance(run: Run, key: str) -> Any:
    return (run.record.get("provenance") or {}).get(key)


def difference(sides: Sequence[Json]) -> list[Difference]:
    """The keys whose values differ."""
    keys = dict.fromkeys(key for side in sides for key in side)
    return [
        Difference(key, [side.get(key) for side in sides])
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
    changed = {row.key: row.values for group in ("config", "data") for row in differences[group]}
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
    for row in differences["hardware"][:1]:
        found = _list(names, row.values)
        remarks.append(f"speed, memory and equal times: the hardware differs ({row.key}: {found})")
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
