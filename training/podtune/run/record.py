"""The record of a run: run.json and metrics.jsonl. Needs no torch.

Every figure a report shows comes from here. What could not be measured is absent, never zero.
"""

from __future__ import annotations

import datetime
import json
import math
import statistics
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from podtune.run.files import replacing

SCHEMA = "podtune.run/1"
RUN_FILE, METRICS_FILE = "run.json", "metrics.jsonl"

Status = Literal["running", "ok", "oom", "preempted", "error"]
Json = dict[str, Any]
T = typing.TypeVar("T")


def now() -> str:
    """The time in RFC 3339, UTC, to the millisecond."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def new_record(*, mode: Literal["sft", "benchmark"], name: str, config: Json, **identity: Any) -> Json:
    """A record that has started and not ended.

    ``identity`` takes the keys that compare runs: strategy, model, world_size, nnodes, nproc_per_node,
    global_batch_size, seed, data, provenance.
    """
    return {
        "schema": SCHEMA,
        "mode": mode,
        "name": name,
        "started_at": now(),
        "status": "running",
        **identity,
        "config": config,
        "measurements": {},
        "attempts": [],
    }


def end_record(record: Json, status: Status, exit_code: int, reason: str = "") -> Json:
    """Close the record and its last attempt."""
    record.update(status=status, exit_code=exit_code, ended_at=now(), reason=reason)
    if record["attempts"]:
        record["attempts"][-1].update(ended_at=record["ended_at"], status=status, exit_code=exit_code)
    return record


@dataclass(frozen=True)
class Summary:
    """Seconds a step, over ``n`` steps. ``std`` is the sample's; one step has none."""

    mean: float
    p50: float
    p95: float
    n: int
    std: float | None = None
    p50_by_repeat: tuple[float, ...] | None = None

    @classmethod
    def of(cls, seconds: Sequence[float], *repeats: Sequence[float]) -> Summary:
        """Summarise every step of ``seconds`` and of further ``repeats`` of the same measurement."""
        every = [second for repeat in (seconds, *repeats) for second in repeat]
        return cls(
            mean=statistics.fmean(every),
            p50=statistics.median(every),
            p95=statistics.quantiles(every, n=20, method="inclusive")[-1] if every[1:] else every[0],
            n=len(every),
            std=statistics.stdev(every) if len(every) > 1 else None,
            p50_by_repeat=tuple(map(statistics.median, (seconds, *repeats))) if repeats else None,
        )


def timestamp(value: object) -> float:
    """RFC 3339 to seconds since the epoch; NaN for what is no time."""
    try:
        return datetime.datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        return math.nan


CUDA_PEAK = "CUDA allocator"
RESIDENT_PEAK_SINCE_START = "resident peak of the process since it started"


@dataclass(frozen=True)
class MemoryPeaks:
    """Peak memory in GiB of each rank, and of the fullest one; ``kind`` says which memory."""

    max: float
    per_rank: tuple[float, ...] | None = None
    kind: str | None = None


@dataclass(frozen=True)
class CountedMemory:
    """GiB of tensors in one step of the fullest rank, by purpose; ``total``: the most that lived at once."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    total: float


@dataclass(frozen=True)
class Communication:
    """Bytes that one step sends, counted on the rank that sends most; by collective: all_reduce, ...

    ``seconds_by_collective`` are those of one step after the timed ones, the mean of all ranks.
    """

    bytes_per_step: float
    bytes_by_collective: Json | None = None
    calls_by_collective: Json | None = None
    seconds_by_collective: Json | None = None
    seconds_exposed: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class Losses:
    """Losses in nats per token (per image of a classifier): the first and last of training and evaluation."""

    first: float | None = None
    last: float | None = None
    eval_first: float | None = None
    eval: float | None = None


@dataclass(frozen=True)
class Parity:
    """Comparison of a strategy's first losses with one process's: ok, failed, skipped or undefined."""

    status: str
    reason: str | None = None
    max_relative_difference: float | None = None
    tolerance: float | None = None
    steps: int | None = None
    losses: tuple[float, ...] | None = None
    reference_losses: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Training:
    """Epochs of a benchmark case: mean loss, seconds, and the share of the test split that it got right."""

    loss: float
    loss_by_epoch: tuple[float, ...]
    seconds_by_epoch: tuple[float, ...]
    accuracy: float | None = None
    accuracy_by_epoch: tuple[float, ...] | None = None


@dataclass(frozen=True)
class SaveTimes:
    """Seconds that ``n`` checkpoints of this attempt took.

    ``stall_s`` and ``longest_stall_s``: how long the ranks stopped, in all and for the longest; ``write_s``:
    until they were complete on the volume.
    """

    n: int
    stall_s: float
    longest_stall_s: float
    write_s: float


@dataclass(frozen=True)
class Measurements:
    """Measurements of a run. One that could not be taken is None here, and absent in run.json."""

    steps: int | None = None
    tokens: int | None = None
    samples: int | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    step_time_s: Summary | None = None
    speeds_since_step: int | None = None  # of the last start, if it was not the first
    mfu: float | None = None
    flops_per_token: float | None = None
    flops_per_step: float | None = None
    peak_memory_gib: MemoryPeaks | None = None
    counted_memory_gib: CountedMemory | None = None
    communication: Communication | None = None
    h2d_gb_per_s: float | None = None
    loss: Losses | None = None
    time_to_first_step_s: float | None = None
    start_s: Json | None = None  # seconds by phase, up to the first step
    saves: SaveTimes | None = None
    answers: Json | None = None
    tasks: Json | None = None  # scores of lm-evaluation-harness, by podtune eval
    parity: Parity | None = None
    training: Training | None = None
    telemetry: Json | None = None
    profile: Json | None = None
    held_at_oom: Json | None = None
    memory_estimate: Json | None = None

    @classmethod
    def read(cls, record: Json) -> Measurements:
        """The measurements of a record; a value of another kind than the field's is absent."""
        return read_as(cls, mapping(record.get("measurements"))) or cls()

    def to_json(self) -> Json:
        return asdict(
            self, dict_factory=lambda items: {key: value for key, value in items if value is not None}
        )


def read_as(kind: type[T], value: object) -> T | None:
    """``value`` of a JSON file as the dataclass ``kind``; None where a field that is needed is of another."""
    return typing.cast(T | None, _read(kind, value))


@cache
def _kinds(cls: type) -> dict[str, tuple[Any, bool]]:
    """Types of a dataclass's fields without None, each with whether the field is required."""
    hints = typing.get_type_hints(cls)
    kinds = {}
    for field in fields(cls):
        hint = hints[field.name]
        if isinstance(hint, types.UnionType):
            hint = next(kind for kind in hint.__args__ if kind is not types.NoneType)
        kinds[field.name] = (typing.get_origin(hint) or hint, field.default is MISSING)
    return kinds


def _read(kind: type, value: object) -> object:
    """``value`` of a JSON file as a ``kind``, or None if it is of another."""
    if value is None:
        return None
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(value, dict):
            return None
        kinds = _kinds(kind)
        # Most fields are absent, and a list of thousands of runs spends its time here.
        read = {name: _read(kinds[name][0], value[name]) if name in value else None for name in kinds}
        return (
            None if any(read[name] is None for name, (_, needed) in kinds.items() if needed) else kind(**read)
        )
    if kind is float:
        return number(value)
    if kind is tuple:
        numbers = tuple(map(number, value)) if isinstance(value, list | tuple) else (None,)
        return None if None in numbers else numbers
    return value if is_kind(value, kind) else None


def mapping(value: object) -> Json:
    """``value`` if it is a mapping, else an empty one: records may be somebody else's, or damaged."""
    return value if isinstance(value, dict) else {}


def number(value: object) -> float | None:
    """``value`` as a float, the "nan", "inf" and "-inf" of :func:`finite` included; else None."""
    if type(value) is float:
        return value
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None


_TEXTS = ("mode", "name", "started_at", "ended_at", "evaluated_at", "status", "reason", "strategy", "model")
_COUNTS = ("world_size", "nnodes", "nproc_per_node", "global_batch_size", "seed", "exit_code")
_SHAPE: Json = {
    **dict.fromkeys(_TEXTS, str),
    **dict.fromkeys(_COUNTS, int),
    "config": {},
    "data": {"path": str, "fingerprint": str, "tokenizer": str},
    "provenance": {"hardware": {}, "versions": {}, "git_sha": str, "image": str},
    "measurements": {},
    "attempts": list,
}


def sound(record: Json, shape: Json = _SHAPE) -> tuple[Json, list[str]]:
    """A foreign record without values of the wrong kind, and a list of those.

    One odd record must not end a view of many.
    """
    kept: Json = {}
    odd: list[str] = []
    for key, item in record.items():
        kind = shape.get(key)
        if isinstance(kind, dict) and isinstance(item, dict):
            kept[key], inside = sound(item, kind)
            odd += [f"{key}.{line}" for line in inside]
        elif kind is None or (not isinstance(kind, dict) and is_kind(item, kind)):
            kept[key] = item
        elif item is not None:
            odd.append(f"{key} is {repr(item)[:60]}")
    return kept, odd


def is_kind(item: object, kind: type) -> bool:
    """True if ``item`` of a JSON file is a ``kind``: true is no number, and an integer has 64 bits."""
    if isinstance(item, int):
        return kind is int and not isinstance(item, bool) and abs(item) < 2**63
    return isinstance(item, kind)


def finite(value: object) -> object:
    """``value`` with NaN and infinity, which are not JSON, as the strings "nan", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Replace a JSON file: a reader sees the old content or the new, never half of one."""
    with replacing(path) as file:
        json.dump(finite(content), file, indent=2, ensure_ascii=False)
        file.write("\n")
