"""Reading a run's files while they grow: new metrics lines, and the state of the run. No torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

from podtune.run.lock import life
from podtune.run.metrics_log import metrics_entries
from podtune.run.record import METRICS_FILE, RUN_FILE, SCHEMA, Json

MAX_DEPTH = 4


class MetricsTail:
    """The complete lines of a metrics file that are new since the last look."""

    def __init__(self, run_dir: Path) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        self._inode, self._offset = 0, 0

    def read(self) -> list[Json]:
        """The new entries; all of them where the file is another one, which a run that resumes writes.

        A torn last line stays unread until it is complete.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset = status.st_ino, 0
            file.seek(self._offset)
            block = file.read()
        complete = block[: block.rfind(b"\n") + 1]
        self._offset += len(complete)
        return metrics_entries(complete.split(b"\n"))[0]


def read_record(run_dir: Path) -> Json | None:
    """The run.json of ``run_dir``; None while there is none, or for a schema that is not known."""
    try:
        record = json.loads((Path(run_dir) / RUN_FILE).read_text(encoding="utf-8"))
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
