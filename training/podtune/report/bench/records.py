"""The benchmark's records below a folder, each checked before a figure of it is believed. No torch.

``run.json`` files and, where a folder has none, records in logs (``*.log``, ``*.txt``). A record that is cut
off, is no record, or contradicts itself is named as damaged and gives no figure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podtune.run.collect import collect
from podtune.run.errors import MARKER, NotFound
from podtune.run.record import RUN_FILE, SCHEMA, Json, Measurements, number, sound


@dataclass(frozen=True)
class Source:
    """A record, and the file (relative to the report) where it stands."""

    record: Json
    path: str


@dataclass
class FolderRecords:
    """Benchmark records of a folder; ``damaged`` are sentences."""

    sources: list[Source] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    impossible: dict[str, str] = field(default_factory=dict)


def read_folder(folder: Path) -> FolderRecords:
    """All benchmark records below ``folder``, in files or in the lines of a log.

    Raises:
        UserError: no such folder, or nothing of a benchmark in it: says what to run.
    """
    if not folder.is_dir():
        raise NotFound(
            "no such folder", where=str(folder), fix=f"podtune bench run --preset smoke --output {folder}"
        )
    folder_records = FolderRecords(impossible=_impossible(folder))
    files = sorted(folder.rglob(RUN_FILE))
    for path in files:
        _take(folder_records, _read(path), path.relative_to(folder).as_posix())
    with_record = {path.parent for path in files}
    for log in sorted([*folder.rglob("*.log"), *folder.rglob("*.txt")]):
        if log.parent not in with_record:
            _read_log(folder_records, log, log.relative_to(folder).as_posix())
    if not folder_records.sources and not folder_records.damaged:
        raise NotFound(
            "holds no benchmark records",
            where=str(folder),
            fix=f"podtune bench run --preset smoke --output {folder}",
        )
    return folder_records


def _impossible(folder: Path) -> dict[str, str]:
    try:
        listed = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["impossible"]
        return {str(name): str(why) for name, why in listed.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"cannot be read ({' '.join(str(error).split())[:120]})"


def _read_log(folder_records: FolderRecords, log: Path, name: str) -> None:
    with log.open(encoding="utf-8", errors="replace") as file:
        lines = list(_with_marker(file))
    if not lines:
        return
    found = collect(lines)
    already = [source.record for source in folder_records.sources]
    for record in found.records:
        if record not in already:
            _take(folder_records, record, name)
    folder_records.damaged += [f"{name}: {reason}" for reason in found.damaged]


def _with_marker(lines: Iterable[str]) -> Iterator[str]:
    """The lines from the first marker on; none of a log without one."""
    seen = False
    for line in lines:
        seen = seen or MARKER in line
        if seen:
            yield line


def _take(folder_records: FolderRecords, record: Any, name: str) -> None:
    """Add a benchmark record or say why not; records of other modes are not the benchmark's business."""
    if isinstance(record, str):
        folder_records.damaged.append(f"{name}: damaged, it {record}")
    elif not isinstance(record, dict) or record.get("schema") != SCHEMA:
        folder_records.damaged.append(f"{name}: damaged, it is not a {SCHEMA} record")
    elif record.get("mode") == "benchmark":
        if fault := fault_of(record):
            folder_records.damaged.append(f"{name}: damaged, {fault}")
        else:
            folder_records.sources.append(Source(record, name))


def fault_of(record: Json) -> str | None:
    """Return the reason not to believe a benchmark record, or None.

    Checks kinds, signs, and that its metrics agree with each other.
    """
    if odd := sound(record)[1]:
        return odd[0]
    for key, kind in (
        ("strategy", str),
        ("model", str),
        ("status", str),
        ("config", dict),
        ("measurements", dict),
    ):
        if not isinstance(record.get(key), kind):
            return f"'{key}' is {record.get(key)!r}"
    for key in ("global_batch_size", "world_size"):
        value = record.get(key)
        if (value is not None or record["status"] == "ok") and not (isinstance(value, int) and value > 0):
            return f"'{key}' is {value!r}"
    if record["status"] != "ok":
        return None
    measured = Measurements.read(record)
    step = measured.step_time_s
    if step is None or not all(map(_positive, (step.mean, step.p50, step.p95, step.n))):
        return "its status is ok and it has no step time"
    if not (step.n == 1 if step.std is None else _not_negative(step.std)):
        return f"the standard deviation of its step time is {step.std!r}"
    rows = record["global_batch_size"]
    sequence_length = number(record["config"].get("sequence_length")) or 0
    speeds = (
        ("samples_per_s", measured.samples_per_s, 1),
        ("tokens_per_s", measured.tokens_per_s, sequence_length),
    )
    for name, speed, per_row in speeds:
        if speed is None:
            continue
        if not _positive(speed):
            return f"{name} is {speed!r}"
        if not math.isclose(speed * step.mean, rows * per_row, rel_tol=0.01):
            return f"{name} {speed:.4g} contradicts its step time {step.mean:.4g} s and batch of {rows}"
    if measured.samples_per_s is None and measured.tokens_per_s is None:
        return "its status is ok and it has no speed"
    return None


def _positive(value: Any) -> bool:
    return _not_negative(value) and value > 0


def _not_negative(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    )
