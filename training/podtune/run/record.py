"""The record of a run: run.json, metrics.jsonl, and a copy on stdout that outlives the pod. Needs no torch.

Every figure a report shows comes from here. What could not be measured is absent, never zero.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import zlib
from base64 import b64encode
from pathlib import Path
from typing import IO, Any, Literal

SCHEMA = "podtune.run/1"
RUN_FILE, METRICS_FILE = "run.json", "metrics.jsonl"
MARKER = "PODTUNE-RECORD/1"
LINE_LENGTH = 4096  # container runtimes split lines at 16 KiB

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
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(finite(content), file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


class MetricsLog:
    """metrics.jsonl: one object a line, append-only over restarts, one line for a step and split.

    On opening for a resume from ``from_step``, later lines and a torn last line are dropped (they will be
    written again), so that the file is what an uninterrupted run would have left. Rank 0 only.
    """

    def __init__(self, path: Path, *, from_step: int = 0) -> None:
        self.path = path
        if path.exists():
            kept = [line for line in read_metrics(path) if int(line["step"]) <= from_step]
            part = path.with_name(f".{path.name}.part")
            part.write_text("".join(_line(entry) for entry in kept), encoding="utf-8")
            part.replace(path)
            self._written = {(int(entry["step"]), entry["split"]) for entry in kept}
        else:
            self._written = set()
        self._file = path.open("a", encoding="utf-8")

    def write(self, split: Literal["train", "eval", "system"], step: int, metrics: Json) -> None:
        """Append a line with ``time``, ``step``, ``split`` and ``metrics``; a step and split already there is
        left alone.
        """
        if (step, split) in self._written:
            return
        self._written.add((step, split))
        self._file.write(_line({"time": now(), "step": step, "split": split, **metrics}))
        self._file.flush()

    def close(self) -> None:
        """Flush to the volume."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def _line(entry: Json) -> str:
    return json.dumps(finite(entry), ensure_ascii=False) + "\n"


def read_metrics(path: Path) -> list[Json]:
    """The lines of a metrics file up to the first that is torn; a run killed in mid-write leaves one."""
    entries: list[Json] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError:
                break
            if not (isinstance(entry, dict) and "step" in entry and "split" in entry):
                break
            entries.append(entry)
    return entries


def emit_record(record: Json, stream: IO[str]) -> None:
    """Print the record between versioned markers, compressed, in short numbered lines with length and
    checksum.

    ``podtune collect`` finds it again in any container log, even where lines of other programs fall between.
    Format: a begin line with the id, the count of lines, the bytes of JSON and their SHA-256; the lines ``id
    index payload`` (zlib, base64); an end line with the id.
    """
    content = json.dumps(finite(record), ensure_ascii=False, separators=(",", ":")).encode()
    digest = hashlib.sha256(content).hexdigest()
    packed = b64encode(zlib.compress(content, 9)).decode()
    chunks = [packed[start : start + LINE_LENGTH] for start in range(0, len(packed), LINE_LENGTH)]
    tag = digest[:12]
    lines = [f"{MARKER} begin {tag} lines={len(chunks)} bytes={len(content)} sha256={digest}"]
    lines += [f"{MARKER} {tag} {index} {chunk}" for index, chunk in enumerate(chunks)]
    lines.append(f"{MARKER} end {tag}")
    stream.write("\n" + "\n".join(lines) + "\n")
    stream.flush()
