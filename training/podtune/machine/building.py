"""What is compiled while a program runs: by which compiler, and by one process at a time. Needs no torch."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from podtune.run.errors import UNAVAILABLE, UserError

ABANDONED_S = 120.0  # torch's own lock file, older than this, is a killed build's
TIMEOUT_S = 600.0


def c_compiler() -> str | None:
    """The C compiler that Triton takes (CC, gcc, clang), which every run on a GPU needs; None without."""
    named = os.environ.get("CC")
    return shutil.which(named.split()[0]) if named else shutil.which("gcc") or shutil.which("clang")


@contextmanager
def sole_builder(folder: Path, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
    """Build or load an extension in ``folder`` while no other process of this machine does.

    torch marks a build by a file ``lock``, for which the others wait for ever, also when its owner was
    killed. The kernel gives our lock back at a process's end; who holds it takes an old ``lock`` away.

    Raises:
        UserError: another process built for all of ``timeout_s``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline, mark = time.monotonic() + timeout_s, folder / "lock"
    with (folder / ".podtune-build").open("w") as ours:
        while not _locked(ours.fileno()):
            if time.monotonic() > deadline:
                raise UserError(
                    f"another process has been building in {folder} for {timeout_s:.0f} s",
                    fix="end it, or give this one a folder of its own: TORCH_EXTENSIONS_DIR",
                    code=UNAVAILABLE,
                )
            time.sleep(0.1)
        while (age := _age_s(mark)) is not None and age < ABANDONED_S:
            time.sleep(0.1)
        mark.unlink(missing_ok=True)
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _age_s(file: Path) -> float | None:
    """Seconds since ``file`` was written, None without it."""
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return None
