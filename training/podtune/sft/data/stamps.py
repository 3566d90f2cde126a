"""The fingerprint of rows by the stamps of their files: an unchanged file need not be read. Needs no torch.

As with git's index, a file counts as unchanged while its size, its times and its inode are what they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from podtune.run.errors import UserError
from podtune.run.files import stamp, write_atomically

FOLDER = "known"  # in the cache of tokenised data
SETTLED_S = 3.0  # the coarsest clock of a file system ticks every two seconds
_VERSION = 2  # raise it when the same files give other rows, or another fingerprint


class FileStampCache:
    """The fingerprint that ``folder`` holds for files with the stamps that they have now.

    Args:
        folder: of the cache; without one, or without files, nothing is known and nothing is kept.
        files: all files that decide the rows. They are looked at here, before anyone reads them.
        context: what decides the rows, and their check, beside the files.
    """

    def __init__(self, folder: Path | None, files: Iterable[Path], *context: str) -> None:
        self._began_s = time.time()
        self._changed_s = 0.0
        self._file: Path | None = None
        try:
            stamps = {str(path.resolve()): stamp(path) for path in files} if folder else {}
        except (OSError, UserError):  # a file is missing: whoever reads the rows says so
            return
        if folder and stamps:
            name = json.dumps([_VERSION, version("datasets"), version("pyarrow"), context, stamps])
            self._file = folder / FOLDER / hashlib.sha256(name.encode()).hexdigest()[:40]
            self._changed_s = max(max(times) for _, *times, _ in stamps.values()) / 1e9

    def read(self) -> str | None:
        """The fingerprint; None if these files are not known as they are."""
        try:
            content = self._file.read_text(encoding="ascii") if self._file else ""
        except (OSError, ValueError):
            return None
        return content if re.fullmatch("[0-9a-f]{64}", content) else None

    def write(self, fingerprint: str) -> None:
        """Keep ``fingerprint`` for the files as they were when this was made.

        Not for files that changed within the last seconds: they could change once more within the same tick
        of their file system's clock. A cache that cannot be written is not an error.
        """
        if self._file and self._began_s - self._changed_s >= SETTLED_S:
            with contextlib.suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._file, fingerprint)
