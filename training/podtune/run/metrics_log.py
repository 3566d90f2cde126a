"""metrics.jsonl: one object a line, written by rank 0 and read by everyone, also when it is torn or odd."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from podtune.run.errors import warn
from podtune.run.files import write_atomically
from podtune.run.record import Json, finite, now


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

    def _restore(self) -> None:
        """Write a file again that was deleted under the run; the open descriptor still has its content."""
        warn(f"{self.path} was deleted under the run; it is written again")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        size = os.fstat(self._file.fileno()).st_size
        write_atomically(self.path, os.pread(self._file.fileno(), size, 0).decode(errors="replace"))
        self._file.close()
        self._file = _appending(self.path)

    def write(self, split: Literal["train", "eval", "system"], step: int, metrics: Json) -> None:
        """Append a line with ``time``, ``step``, ``split`` and ``metrics``, once for a step and split."""
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


def _appending(path: Path) -> IO[str]:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o664), "a", encoding="utf-8", errors="backslashreplace")


def _line(entry: Json) -> str:
    return json.dumps(finite(entry), ensure_ascii=False) + "\n"


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")


_TOGETHER = 1000  # lines


def metrics_entry(line: bytes | str) -> Json | None:
    """A line of a metrics file, or None if it is torn or another thing: one verdict for every reader."""
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
    """:func:`metrics_entry` of each line, parsed many at a time.

    One call of the parser for a thousand lines takes less time, and less memory, since it shares their keys.
    """
    for start in range(0, len(lines), _TOGETHER):
        some = lines[start : start + _TOGETHER]
        yield from _entries_together(some) or map(metrics_entry, some)


def _entries_together(lines: Sequence[bytes]) -> list[Json] | None:
    """The entries of lines that are good, all of them; else None."""
    if not all(line[:1] == b"{" and line[-1:] == b"}" for line in lines):
        return None  # joined, an object that is broken over two lines would be a good one
    try:
        entries = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        return None
    return entries if len(entries) == len(lines) and all(map(_is_entry, entries)) else None


def metrics_entries(lines: Sequence[bytes]) -> tuple[list[Json], list[int]]:
    """Entries of ``lines``, and the numbers of broken lines. Empty lines are neither."""
    entries, broken = [], []
    for number, (line, entry) in enumerate(zip(lines, each_entry(lines), strict=True), 1):
        if entry is not None:
            entries.append(entry)
        elif line.strip():
            broken.append(number)
    return entries, broken


def read_metrics(path: Path) -> tuple[list[Json], list[int]]:
    """Entries of a metrics file, and the numbers of its broken lines; a kill in mid-write leaves one."""
    return metrics_entries(path.read_bytes().split(b"\n"))
