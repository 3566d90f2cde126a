"""A content-addressed store of tokenised data on a volume that processes and pods share. Needs no torch.

An entry is a folder named by the hash of everything that decides its content: rows, tokenizer, options, the
versions of the code that renders and encodes. It is written aside and renamed, so it is whole or absent. One
process writes an entry, under a lock whose holder shows a heartbeat; the others wait, within a bound, and map
the same file into memory.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podtune.run.errors import CANNOT_CREATE, UserError
from podtune.run.lock import hold

DATA_FILE, INFO_FILE = "data.arrow", "info.json"
WAIT_S = 3600.0

Info = dict[str, Any]


def default_folder() -> Path:
    """``HF_HOME/podtune/tokenized``: on the volume where models and data are."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(home).expanduser() / "podtune" / "tokenized"


def default_folder_if_usable() -> Path | None:
    """:func:`default_folder` if it can be written, else None: a run must not fail for want of a cache nobody
    asked for.
    """
    folder = default_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def read(folder: Path, key: str) -> tuple[Path, Info] | None:
    """The data file and the info of an entry, or None if it is absent or not what its info says."""
    entry = folder / key
    try:
        info = json.loads((entry / INFO_FILE).read_text(encoding="utf-8"))
        whole = (entry / DATA_FILE).stat().st_size == info["bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (entry / DATA_FILE, info) if whole else None


def get_or_make(
    folder: Path, key: str, make: Callable[[Path], Info], *, wait_s: float = WAIT_S
) -> tuple[Path, Info, bool]:
    """The entry's data file, its info, and whether it was there already.

    ``make(path)`` writes the data file and returns the info. At most one process at a time runs it for a key.

    Raises:
        UserError: the folder cannot be written, or another process has held the lock for ``wait_s``.
    """
    found = read(folder, key)
    if found:
        return *found, True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder / f"{key}.lock"
        with hold(
            lock, until=lambda: read(folder, key) is not None, wait_s=wait_s, what="preparing this data"
        ) as held:
            found = read(folder, key)
            if found or not held:
                found = found or read(folder, key)
                assert found is not None
                return *found, True
            return *_write(folder, key, make), False
    except OSError as error:  # no right, no room, a file where a folder should be
        raise _unwritable(folder, error) from None


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"tokenised data cannot be written: {error.strerror or error}",
        where=str(error.filename or folder),
        fix="set --tokenized_cache (or HF_HOME) to a folder that can be written and has room",
        code=CANNOT_CREATE,
    )


def _write(folder: Path, key: str, make: Callable[[Path], Info]) -> tuple[Path, Info]:
    aside = folder / f".{key}.{uuid.uuid4().hex[:8]}.part"
    aside.mkdir()
    try:
        info = make(aside / DATA_FILE)
        info["bytes"] = (aside / DATA_FILE).stat().st_size
        (aside / INFO_FILE).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
        for name in (DATA_FILE, INFO_FILE):
            with (aside / name).open("rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(folder / key, ignore_errors=True)  # an entry that read() found damaged
        aside.rename(folder / key)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder / key / DATA_FILE, info
