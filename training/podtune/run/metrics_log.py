"""metrics.jsonl: one object a line, written by rank 0 and read by everyone, also when it is torn or odd."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from podtune.run.errors import warn
from podtune.run.files import write_atomically
from podtune.run.record import Json, finite, is_kind, now


class MetricsLog:
    """Writer of metrics.jsonl, append-only over restarts, one line for a step and split. Rank 0 only.

    A run that resumes from ``from_step`` drops later lines, which it will write again, so that the file is
    what an uninterrupted run would have left. A line that cannot be read is dropped with a warning.
    """

    def __init__(self, path: Path, *, from_step: int = 0) -> None:
        self.path = path
        self.kept: list[Json] = []
        if path.exists():
            entries, broken = read_metrics(path)
            if broken:
                warn(f"{path}: lines that cannot be read are dropped: {_some(broken)}")
            self.kept = [entry for entry in entries if entry["step"] <= from_step]
            write_atomically(path, "".join(_line(entry) for entry in self.kept))
        self._written = {(entry["step"], entry["split"]) for entry in self.kept}
        self._file = _appending(path)

    def write(self, split: str, step: int, metrics: Json) -> None:
        """Append a line with ``time``, ``step``, ``split`` and ``metrics``, once for a step and split.

        Splits are ``train``, ``system``, and ``eval`` or, of several sets, ``eval_NAME``.
        """
        if (step, split) in self._written:
            return
        self._written.add((step, split))
        self._file.write(_line({"time": now(), "step": step, "split": split, **metrics}))
        self._file.flush()  # a line at a time: others follow the file, and a kill leaves whole lines

    def close(self) -> None:
        """Flush to the volume."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def _appending(path: Path) -> IO[str]:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o664), "a", encoding="utf-8", errors="backslashreplace")


def _line(entry: Json) -> str:
    return json.dumps(finite(entry), ensure_ascii=False) + "\n"


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")


def metrics_entries(lines: Iterable[bytes]) -> tuple[list[Json], list[int]]:
    """Entries of ``lines``, and the numbers of those that are torn or no entries. Empty lines are neither."""
    entries, broken = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if (
            isinstance(entry, dict)
            and is_kind(entry.get("step"), int)
            and isinstance(entry.get("split"), str)
        ):
            entries.append(entry)
        else:
            broken.append(number)
    return entries, broken


def read_metrics(path: Path) -> tuple[list[Json], list[int]]:
    """Entries of a metrics file, and the numbers of its broken lines; a kill in mid-write leaves one."""
    return metrics_entries(path.read_bytes().split(b"\n"))
