"""Files on volumes that others read, and write, at the same time. Needs no torch.

A reader sees the old content or the new one. The name under which the new one is written cannot be foreseen,
so nobody can have put a link there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TextIO

_UMASK = os.umask(0o022)  # it can only be read by setting it
os.umask(_UMASK)


def open_new(path: Path) -> TextIO:
    """Open ``path`` for writing text; it must not exist, not as a link either."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o664)
    # half a surrogate pair is no UTF-8, and its escape is JSON of the same value
    return os.fdopen(file, "w", encoding="utf-8", errors="backslashreplace")


@contextlib.contextmanager
def replacing(path: Path, *, flush: bool = True) -> Iterator[TextIO]:
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


@contextlib.contextmanager
def replacing_folder(target: Path, *, within: Path | None = None) -> Iterator[Path]:
    """Make a folder, in ``within`` or beside ``target``, that takes its place when the block ends well."""
    part = (within or target.parent) / f".{target.name}.{secrets.token_hex(8)}.part"
    part.mkdir()
    try:
        yield part
        apply_umask(part)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def regular_files(folder: Path) -> dict[str, Path]:
    """List the files below ``folder`` by their names there, sorted, without links.

    Whoever may write a shared volume may have put a link there to a file of this process alone.
    """
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): path for path in files}


def apply_umask(folder: Path) -> None:
    """Give the files below ``folder`` the mode that the umask allows: safetensors leaves them at 0600."""
    for path in regular_files(folder).values():
        with contextlib.suppress(OSError):  # another user's, or a file system without modes
            mode = path.stat().st_mode
            if (wanted := mode | 0o666 & ~_UMASK) != mode:  # it would change a file's stamp
                path.chmod(wanted)


def open_regular(path: Path) -> IO[bytes]:
    """Open ``path`` for reading; a link is an OSError."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")


def remove_parts(folder: Path, name: str = "") -> None:
    """Remove what killed writers (of ``name``) left in ``folder``, where nobody else writes meanwhile."""
    for part in folder.glob(f".{name}*.part"):
        shutil.rmtree(part, ignore_errors=True)
        with contextlib.suppress(OSError):
            part.unlink()


def digest(path: Path) -> str:
    """The XXH3 hash, 128 bits, of a file's bytes: it finds damage, and does not stop a forger."""
    import xxhash

    with open_regular(path) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]


def stamp(path: Path) -> list[int]:
    """Size in bytes, mtime and ctime in ns, inode: they tell a changed file without reading it."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
