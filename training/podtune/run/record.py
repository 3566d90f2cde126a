"""The record of a run: run.json and metrics.jsonl. Needs no torch.

Every figure a report shows comes from here. What could not be measured is absent, never zero.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import statistics
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from podtune.run.errors import warn
from podtune.run.files import replacing, write_whole

SCHEMA = "podtune.run/1"
RUN_FILE, METRICS_FILE = "run.json", "metrics.jsonl"

Status = Literal["running", "ok", "oom", "preempted", "error"]
Json = dict[str, Any]


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
    """Close the record, and its last attempt, with how it ended."""
    record.update(status=status, exit_code=exit_code, ended_at=now(), reason=reason)
    if record["attempts"]:
        record["attempts"][-1].update(ended_at=record["ended_at"], status=status, exit_code=exit_code)
    return record


@dataclass(frozen=True)
class Spread:
    """How long steps took, in seconds, over ``n`` of them. ``std`` is the sample's; one step has none."""

    mean: float
    p50: float
    p95: float
    n: int
    std: float | None = None
    p50_by_repeat: tuple[float, ...] | None = None

    @classmethod
    def of(cls, seconds: Sequence[float], *repeats: Sequence[float]) -> Spread:
        """Over every step of ``seconds`` and of further ``repeats`` of the same measurement."""
        every = [second for repeat in (seconds, *repeats) for second in repeat]
        return cls(
            mean=statistics.fmean(every),
            p50=statistics.median(every),
            p95=percentile(every, 0.95),
            n=len(every),
            std=statistics.stdev(every) if len(every) > 1 else None,
            p50_by_repeat=tuple(map(statistics.median, (seconds, *repeats))) if repeats else None,
        )


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the sorted values lie, linearly between neighbours."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


CUDA_PEAK = "CUDA allocator"
RESIDENT_PEAK = "resident peak of the process"
RESIDENT_PEAK_SINCE_START = "resident peak of the process since it started"


@dataclass(frozen=True)
class MemoryPeaks:
    """Peak memory in GiB of each rank, and of the fullest one; ``kind`` says which memory."""

    max: float
    per_rank: tuple[float, ...] | None = None
    kind: str | None = None


@dataclass(frozen=True)
class CountedMemory:
    """Bytes of tensors in one step of the fullest rank, in GiB, by what they are for; ``total`` is the most
    that lived at once.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    total: float


@dataclass(frozen=True)
class Communication:
    """What one step sends, counted on the rank that sends most; by collective: all_reduce, ..."""

    bytes_per_step: float
    bytes_by_collective: Json | None = None
    message_bytes_by_collective: Json | None = None
    calls_by_collective: Json | None = None
    bytes_per_rank: tuple[float, ...] | None = None
    seconds_exposed: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class Losses:
    """In nats per token (per image of a classifier): the first and last of training and of evaluation."""

    first: float | None = None
    last: float | None = None
    eval_first: float | None = None
    eval: float | None = None


@dataclass(frozen=True)
class Parity:
    """Whether a strategy's first losses equal one process's: ok, failed, skipped or undefined."""

    status: str
    reason: str | None = None
    max_relative_difference: float | None = None
    tolerance: float | None = None
    steps: int | None = None
    losses: tuple[float, ...] | None = None
    reference_losses: tuple[float, ...] | None = None


@dataclass(frozen=True)
class SaveTimes:
    """Seconds that the ranks stopped for the ``n`` checkpoints of this attempt, in all and for the longest,
    and that it took until they were complete on the volume.
    """

    n: int
    stall_s: float
    longest_stall_s: float
    write_s: float


@dataclass(frozen=True)
class Measurements:
    """What a run measured. A figure that could not be measured is None here, and absent in run.json."""

    steps: int | None = None
    tokens: int | None = None
    samples: int | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    step_time_s: Spread | None = None
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
    saves: SaveTimes | None = None
    answers: Json | None = None
    tasks: Json | None = None  # scores of lm-evaluation-harness, by podtune eval
    parity: Parity | None = None
    telemetry: Json | None = None
    profile: Json | None = None
    held_at_oom: Json | None = None
    memory_estimate: Json | None = None

    @classmethod
    def read(cls, record: Json) -> Measurements:
        """Those of a record, also of one that an earlier version wrote; a value of another kind is absent."""
        measured = record.get("measurements")
        measured = dict(measured) if isinstance(measured, dict) else {}
        peaks = measured.get("peak_memory_gib")
        if isinstance(peaks, dict) and "what" in peaks:  # the benchmark's key for ``kind`` in earlier records
            measured["peak_memory_gib"] = {"kind": peaks["what"], **peaks}
        return typing.cast(Measurements, _read(cls, measured))

    def to_json(self) -> Json:
        """The ``measurements`` of run.json."""
        return asdict(
            self, dict_factory=lambda items: {key: value for key, value in items if value is not None}
        )


@cache
def _kinds(cls: type) -> dict[str, tuple[Any, bool]]:
    """By field of a dataclass its type without None, and whether it must be there."""
    hints = typing.get_type_hints(cls)
    kinds = {}
    for field in fields(cls):
        hint = hints[field.name]
        if isinstance(hint, types.UnionType):
            hint = next(kind for kind in hint.__args__ if kind is not types.NoneType)
        kinds[field.name] = (typing.get_origin(hint) or hint, field.default is MISSING)
    return kinds


def _read(kind: Any, value: Any) -> Any:
    """``value`` of a JSON file as a ``kind``, or None if it is none."""
    if value is None:
        return None
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(value, dict):
            return None
        kinds = _kinds(kind)
        # most are absent: a list of thousands of runs spends its time here
        read = {name: _read(kinds[name][0], value[name]) if name in value else None for name in kinds}
        return (
            None if any(read[name] is None for name, (_, needed) in kinds.items() if needed) else kind(**read)
        )
    if kind is float:
        return number(value)
    if kind is tuple:
        numbers = tuple(map(number, value)) if isinstance(value, list | tuple) else (None,)
        return None if None in numbers else numbers
    return value if _is(value, kind) else None


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


def sound(record: Json) -> tuple[Json, list[str]]:
    """A record that somebody else wrote without what is of the wrong kind, and what that was: one odd record
    must not end a view of many.
    """
    if _nested(record, 40):
        return {"schema": record.get("schema")}, ["it is nested too deeply"]
    return _sound(record, _SHAPE)


def _sound(value: Json, shape: Json) -> tuple[Json, list[str]]:
    if not shape:
        return value, []
    kept: Json = {}
    odd: list[str] = []
    for key, item in value.items():
        kind = shape.get(key)
        if isinstance(kind, dict) and isinstance(item, dict):
            kept[key], inside = _sound(item, kind)
            odd += [f"{key}.{line}" for line in inside]
        elif kind is None or (not isinstance(kind, dict) and _is(item, kind)):
            kept[key] = item
        elif item is not None:
            odd.append(f"{key} is {repr(item)[:60]}")
    return kept, odd


def _is(item: object, kind: type) -> bool:
    if isinstance(item, int):
        return kind is int and not isinstance(item, bool) and abs(item) < 2**63
    return isinstance(item, kind)


def _nested(value: Any, depth: int) -> bool:
    """Whether a dict or list, as JSON gives them, holds others ``depth`` levels down."""
    items = value.values() if type(value) is dict else value
    return depth == 0 or any(_nested(item, depth - 1) for item in items if type(item) in (dict, list))


def finite(value: Any) -> Any:
    """``value`` without NaN and infinity, which are not JSON: they become the strings "nan", "inf" and
    "-inf".
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def write_json(path: Path, content: Json) -> None:
    """Write ``content`` so that a reader sees the old file or the new one, never half of one."""
    with replacing(path) as file:
        json.dump(finite(content), file, indent=2, ensure_ascii=False)
        file.write("\n")


class MetricsLog:
    """metrics.jsonl: one object a line, append-only over restarts, one line for a step and split.

    On opening for a resume from ``from_step``, later lines are dropped (they will be written again), so that
    the file is what an uninterrupted run would have left. A line that cannot be read costs that line, and is
    said. Rank 0 only.
    """

    def __init__(self, path: Path, *, from_step: int = 0) -> None:
        self.path = path
        self.kept: list[Json] = []
        if path.exists():
            entries, broken = read_metrics(path)
            if broken:
                warn(f"{path}: lines that cannot be read are dropped: {_some(broken)}")
            self.kept = [entry for entry in entries if entry["step"] <= from_step]
            write_whole(path, "".join(_line(entry) for entry in self.kept))
        self._written = {(entry["step"], entry["split"]) for entry in self.kept}
        self._file = _appending(path)

    def _restore(self) -> None:
        """Write the file again that somebody deleted under the run."""
        warn(f"{self.path} was deleted while the run goes on; it is written again")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        size = os.fstat(self._file.fileno()).st_size
        write_whole(self.path, os.pread(self._file.fileno(), size, 0).decode(errors="replace"))
        self._file.close()
        self._file = _appending(self.path)

    def write(self, split: Literal["train", "eval", "system"], step: int, metrics: Json) -> None:
        """Append a line with ``time``, ``step``, ``split`` and ``metrics``; a step and split already there is
        left alone.
        """
        if (step, split) in self._written:
            return
        self._written.add((step, split))
        if not os.fstat(self._file.fileno()).st_nlink:
            self._restore()
        self._file.write(_line({"time": now(), "step": step, "split": split, **metrics}))
        self._file.flush()

    def close(self) -> None:
        """Flush to the volume."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def _appending(path: Path) -> typing.IO[str]:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o664), "a", encoding="utf-8", errors="backslashreplace")


def _line(entry: Json) -> str:
    return json.dumps(finite(entry), ensure_ascii=False) + "\n"


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")


_TOGETHER = 1000  # lines


def metrics_entry(line: bytes | str) -> Json | None:
    """A line of a metrics file, or None if it is torn, or none: every reader's judgement."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return dict(entry) if _is_entry(entry) else None


def _is_entry(entry: Any) -> bool:
    if type(entry) is not dict:
        return False
    step, split = entry.get("step"), entry.get("split")
    return type(step) is int and abs(step) < 2**63 and isinstance(split, str)


def each_entry(lines: Sequence[bytes]) -> Iterator[Json | None]:
    """:func:`metrics_entry` of each line, in less time, and in less memory: their keys are shared."""
    for start in range(0, len(lines), _TOGETHER):
        some = lines[start : start + _TOGETHER]
        yield from _entries_together(some) or map(metrics_entry, some)


def _entries_together(lines: Sequence[bytes]) -> list[Json] | None:
    """The entries of lines that are good, all of them; else None."""
    if not all(line[:1] == b"{" and line[-1:] == b"}" for line in lines):
        return None  # an object that goes on in the next line would be one
    try:
        entries = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        return None
    return entries if len(entries) == len(lines) and all(map(_is_entry, entries)) else None


def metrics_entries(lines: Sequence[bytes]) -> tuple[list[Json], list[int]]:
    """The entries of ``lines``, and the numbers of those that are none. Empty lines are neither."""
    entries, broken = [], []
    for number, (line, entry) in enumerate(zip(lines, each_entry(lines), strict=True), 1):
        if entry is not None:
            entries.append(entry)
        elif line.strip():
            broken.append(number)
    return entries, broken


def read_metrics(path: Path) -> tuple[list[Json], list[int]]:
    """The entries of a metrics file, and the numbers of its broken lines; a run killed in mid-write leaves
    one.
    """
    return metrics_entries(path.read_bytes().split(b"\n"))
