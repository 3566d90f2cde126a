"""Reading a run's files while they grow: new metrics lines, and the state of the run. No torch.

The position survives a restart of the reader, and a metrics file that was cut back by a resume is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podtune.run.lock import life
from podtune.run.metrics_log import metrics_entries
from podtune.run.record import METRICS_FILE, RUN_FILE, SCHEMA, Json

_FINGERPRINT_BYTES = 4096
MAX_DEPTH = 4


@dataclass(frozen=True)
class Position:
    """The end of what was read: ``offset`` in bytes, and the SHA-256 of the bytes just before it."""

    offset: int = 0
    digest: str = ""


class MetricsTail:
    """New complete lines of a metrics file, from a position on."""

    def __init__(self, run_dir: Path, position: Position | None = None) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        self.position = position or Position()
        # inode and size at the last look: nothing is opened if both stand
        self._seen: tuple[int, int] | None = None

    def read(self) -> tuple[list[Json], bool]:
        """The new entries; with True, those of another file from its top, not the one read before.

        A torn last line stays unread until it is complete.
        """
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return [], False
        if self._seen == (status.st_ino, status.st_size):
            return [], False
        with self.path.open("rb") as file:
            rewritten = (
                self.position.offset > 0
                and _digest(file.fileno(), self.position.offset) != self.position.digest
            )
            start = 0 if rewritten else self.position.offset
            file.seek(start)
            block = file.read()
            end = start + block.rfind(b"\n") + 1
            self.position = Position(end, _digest(file.fileno(), end))
        self._seen = (status.st_ino, status.st_size)
        return metrics_entries(block[: end - start].split(b"\n"))[0], rewritten


def _digest(file: int, offset: int) -> str:
    start = max(0, offset - _FINGERPRINT_BYTES)
    content = os.pread(file, offset - start, start)
    return hashlib.sha256(content).hexdigest()[:16] if len(content) == offset - start else "short"


def read_record(run_dir: Path) -> Json | None:
    """The run.json of ``run_dir``; None while there is none, or for a schema that is not known."""
    try:
        record: Any = json.loads((Path(run_dir) / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and record.get("schema") == SCHEMA else None


def state(run_dir: Path, record: Json) -> tuple[str, str]:
    """Status and reason of a run, also of a process that died and could not write its own end."""
    status, reason = str(record.get("status", "running")), str(record.get("reason") or "")
    if status == "running":
        alive = life(run_dir)
        return ("error", "died") if alive == "dead" else (status, alive if alive == "silent" else reason)
    return status, reason


def find_runs(root: Path) -> list[Path]:
    """Folders with a run.json at or below ``root``, at most four levels deep, none inside another run."""
    run_dirs: list[Path] = []
    for folder, below, files in os.walk(root):
        if RUN_FILE in files:
            run_dirs.append(Path(folder))
            below.clear()
        elif len(Path(folder).relative_to(root).parts) == MAX_DEPTH:
            below.clear()
        below[:] = [name for name in below if not name.startswith((".", "checkpoint-"))]
    return sorted(run_dirs)
