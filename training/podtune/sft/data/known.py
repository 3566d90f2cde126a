"""Which rows data files hold, remembered while the files stay as they are: they need not be read to be known.

As with git's index, a file is taken for unchanged while its size, its times and its inode are what they were.
One that was written in the last seconds is not remembered: it could be written once more within the same tick
of its file system's clock. Needs no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podtune.run.errors import UserError
from podtune.run.files import stamp, write_whole
from podtune.sft.data import files

if TYPE_CHECKING:
    from podtune.sft.data.source import DataSource

FOLDER = "known"  # in the cache of tokenised data
SETTLED_S = 3.0  # the coarsest clock of a file system ticks every two seconds
_VERSION = 1  # raise it when the same files give other rows, or another fingerprint


@dataclass(frozen=True)
class Known:
    """What is known of a source whose files have not changed.

    Attributes:
        fingerprint: of its rows, see :func:`podtune.sft.data.tokenise.fingerprint`.
        text_field: the column of plain text with which they were found to be good.
    """

    fingerprint: str
    text_field: str


class Memory:
    """What ``cache_dir`` remembers of the files of ``source``; they are looked at when this is made.

    A source that is no local file, or no cache: nothing is known, and nothing is remembered.
    """

    def __init__(self, source: DataSource, cache_dir: Path | None) -> None:
        self._began = time.time()
        self._stamps = _stamps(source) if cache_dir else None
        self._file = Path()
        if cache_dir and self._stamps:
            name = json.dumps([source.split, *self._stamps])
            self._file = cache_dir / FOLDER / f"{hashlib.sha256(name.encode()).hexdigest()[:40]}.json"

    def read(self) -> Known | None:
        """What is known; None if that is nothing, or of other versions of the files."""
        if not self._stamps:
            return None
        try:
            told = json.loads(self._file.read_text(encoding="utf-8"))
            return Known(**told["known"]) if told["of"] == self._of() else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def write(self, known: Known) -> None:
        """Remember ``known`` of the files as they were when this was made. A cache that cannot be written is
        none.
        """
        if not self._stamps:
            return
        changed_ns = max(moment for _, *moments, _ in self._stamps.values() for moment in moments)
        if self._began - changed_ns / 1e9 < SETTLED_S:
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, json.dumps({"of": self._of(), "known": vars(known)}) + "\n")

    def _of(self) -> dict[str, Any]:
        from importlib.metadata import version

        return {
            "version": [_VERSION, version("datasets"), version("pyarrow")],
            "files": self._stamps,
        }


def _stamps(source: DataSource) -> dict[str, list[int]] | None:
    """The stamp of each file that decides the rows of ``source``; None if they are not all here."""
    if source.path is None:
        return None
    try:
        folder = files.find(source.path)
        every = folder.root.rglob("*") if folder.saved else folder.files(source.split)
        return {str(path.resolve()): stamp(path) for path in sorted(every) if path.is_file()} or None
    except (OSError, UserError):
        return None
