"""Files on volumes that others read, and write, at the same time. Needs no torch.

A reader sees the old content or the new one. The name under which the new one is written cannot be foreseen,
so nobody can have put a link there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def open_new(path: Path) -> IO[str]:
    """Open ``path`` for writing text; it must not exist, not as a link either."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o664)
    # half a surrogate pair is no UTF-8, and its escape is JSON of the same value
    return os.fdopen(file, "w", encoding="utf-8", errors="backslashreplace")


@contextlib.contextmanager
def replacing(path: Path, *, flush: bool = True) -> Iterator[IO[str]]:
    """Open a file that takes the place of ``path`` when the block ends well, flushed to the volume first."""
    part = path.with_name(f".{path.name.lstrip('.')}.{secrets.token_hex(8)}.part")
    try:
        with open_new(part) as file:
            yield file
            if flush:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_atomically(path: Path, text: str, *, flush: bool = True) -> None:
    """Replace the content of ``path`` by ``text``, as a whole."""
    with replacing(path, flush=flush) as file:
        file.write(text)


def remove_parts(folder: Path) -> None:
    """Remove what killed writers left in ``folder``, where nobody else writes meanwhile."""
    for part in folder.glob(".*.part"):
        with contextlib.suppress(OSError):
            part.unlink()


def digest(path: Path) -> str:
    """The XXH3 hash, 128 bits, of a file's bytes: it finds damage, and does not stop a forger."""
    import xxhash

    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            state.update(block)
    return state.hexdigest()


def stamp(path: Path) -> list[int]:
    """Size in bytes, mtime and ctime in ns, inode: they tell a changed file without reading it."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
