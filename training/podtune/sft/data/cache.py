"""A content-addressed store of tokenised data on a volume that processes and pods share. Needs no torch.

An entry is a folder named by the hash of everything that decides its content: rows (by a fingerprint of
their values, whatever their file and chunks), tokenizer, options, the versions of the code. It is written
under another name and renamed, so it is complete or absent. One process writes an entry, under a lock whose
holder shows a heartbeat; the others wait, within a bound, and map the same file into memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podtune.run.errors import CannotCreate
from podtune.run.files import digest, remove_parts, replacing_folder
from podtune.run.lock import hold
from podtune.sft.source.hub import hf_home

DATA_FILE, INFO_FILE = "data.arrow", "info.json"
WAIT_S = 3600.0

Info = dict[str, Any]


def default_folder() -> Path:
    """``HF_HOME/podtune/tokenized``: on the volume where models and data are."""
    return hf_home() / "podtune" / "tokenized"


def default_folder_if_usable() -> Path | None:
    """:func:`default_folder` if it can be written, else None."""
    folder = default_folder()
    try:  # a run must not fail for want of a cache that nobody asked for
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def read(folder: Path, key: str) -> tuple[Path, Info] | None:
    """The data file and the info of an entry, or None if it is absent or of another size than was written."""
    entry = folder / key
    try:
        info = json.loads((entry / INFO_FILE).read_text(encoding="utf-8"))
        valid = (entry / DATA_FILE).stat().st_size == info["bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (entry / DATA_FILE, info) if valid else None


def get_or_make(
    folder: Path, key: str, make: Callable[[Path], Info], *, wait_s: float = WAIT_S
) -> tuple[Path, Info, bool]:
    """The entry's data file, its info, and True if it was there already.

    ``make(path)`` writes the data file and returns the info. At most one process at a time runs it for a key.

    Raises:
        UserError: the folder cannot be written, or another process has held the lock for ``wait_s``.
    """
    if entry := read(folder, key):
        return *entry, True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder / f"{key}.lock"
        with hold(
            lock, until=lambda: read(folder, key) is not None, wait_s=wait_s, what="preparing this data"
        ):
            if entry := read(folder, key):
                return *entry, True
            return *_write(folder, key, make), False
    except OSError as error:  # no right, no room, a file where a folder should be
        raise CannotCreate(
            f"tokenised data cannot be written: {error.strerror or error}",
            where=str(error.filename or folder),
            fix="set --tokenized_cache (or HF_HOME) to a folder that can be written and has room",
        ) from None


def _write(folder: Path, key: str, make: Callable[[Path], Info]) -> tuple[Path, Info]:
    remove_parts(folder, key)  # this writer has the lock
    with replacing_folder(folder / key) as staging_dir:
        info = make(staging_dir / DATA_FILE)
        size = (staging_dir / DATA_FILE).stat().st_size
        info |= {"xxh3_128": digest(staging_dir / DATA_FILE), "bytes": size}
        (staging_dir / INFO_FILE).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
        # the rename could otherwise reach the disk before the content
        for name in (DATA_FILE, INFO_FILE):
            with (staging_dir / name).open("rb") as file:
                os.fsync(file.fileno())
    return folder / key / DATA_FILE, info
