"""The benchmark's records below a folder, each checked before a figure of it is believed. No torch.

A record that is cut off, is no record, or contradicts itself is named as damaged and gives no figure.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from podtune.run.errors import NotFound
from podtune.run.record import RUN_FILE, SCHEMA, Json, Measurements, sound


@dataclass(frozen=True)
class Source:
    """A record, and the file (relative to the report) where it stands."""

    record: Json
    path: str


@dataclass
class FolderRecords:
    """Benchmark records of a folder; ``damaged`` are sentences, ``impossible`` says why of cells not run."""

    sources: list[Source] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    impossible: dict[str, str] = field(default_factory=dict)


def read_folder(folder: Path) -> FolderRecords:
    """All benchmark records below ``folder``; those of other modes are not the benchmark's business.

    Raises:
        UserError: no such folder, or nothing of a benchmark in it: says what to run.
    """
    fix = f"podtune bench run --preset smoke --output {folder}"
    if not folder.is_dir():
        raise NotFound("no such folder", where=str(folder), fix=fix)
    found = FolderRecords()
    with contextlib.suppress(OSError, ValueError, KeyError, AttributeError, TypeError):
        listed = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["impossible"]
        found.impossible = {str(name): str(why) for name, why in listed.items()}
    for path in sorted(folder.rglob(RUN_FILE)):
        name = path.relative_to(folder).as_posix()
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        # json gives up on brackets a thousand deep by RecursionError
        except (OSError, ValueError, RecursionError) as error:
            found.damaged.append(f"{name}: damaged, it cannot be read ({error})")
            continue
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            found.damaged.append(f"{name}: damaged, it is not a {SCHEMA} record")
        elif record.get("mode") == "benchmark":
            if fault := fault_of(record):
                found.damaged.append(f"{name}: damaged, {fault}")
            else:
                found.sources.append(Source(record, name))
    if not found.sources and not found.damaged:
        raise NotFound("holds no benchmark records", where=str(folder), fix=fix)
    return found


def fault_of(record: Json) -> str | None:
    """Return the reason not to believe a benchmark record, or None."""
    if odd := sound(record)[1]:
        return odd[0]
    kinds = {"strategy": str, "model": str, "status": str, "config": dict, "measurements": dict}
    for key, kind in kinds.items():
        if not isinstance(record.get(key), kind):
            return f"'{key}' is {record.get(key)!r}"
    if record["status"] != "ok":
        return None
    measured = Measurements.read(record)
    step = measured.step_time_s
    needed = {
        "world size": record.get("world_size"),
        "global batch size": record.get("global_batch_size"),
        "step time": step.mean if step else None,
        "speed": measured.samples_per_s if measured.tokens_per_s is None else measured.tokens_per_s,
    }
    for name, value in needed.items():
        if value is None or not math.isfinite(value) or value <= 0:
            return f"its status is ok and its {name} is {value!r}"
    return None
