"""The volume of a run's output: it can be written, answers, and holds the checkpoints. Needs no torch."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from podtune.run.checkpoint import checkpoints
from podtune.run.errors import CannotCreate, PeerLost, platform_fault
from podtune.run.exit import end_now
from podtune.run.launcher import LAUNCHER

ASK_S = 5.0


def check_writable(output_dir: Path) -> None:
    """Write and remove a file in ``output_dir``, or in the folder where it will be made.

    Nothing else is created or removed: the other pods may be looking at the same volume.

    Raises:
        UserError: says which folder and why.
        PeerLost: the volume fails, and held checkpoints before: to be tried again.
    """
    existing = next(
        folder for folder in (output_dir.absolute(), *output_dir.absolute().parents) if folder.exists()
    )
    probe = existing / f".write-test-{socket.gethostname()}-{os.getpid()}"
    try:
        probe.write_bytes(b"podtune")
        probe.unlink()
    except OSError as error:
        was_writable = error.errno != errno.EROFS or checkpoints(output_dir)
        if was_writable and platform_fault(error):
            raise PeerLost(f"{output_dir}: cannot be written at the moment: {error.strerror}") from None
        raise CannotCreate(
            f"cannot be written by UID {os.getuid()}: {error.strerror or error}",
            where=str(output_dir),
            fix="mount the volume read-write, let fsGroup (podSecurityContext) or its owner give it to this "
            "user, or name another folder (output_dir)",
        ) from None


@contextlib.contextmanager
def watch_volume(folder: Path, limit_s: float, *, interval_s: float = ASK_S) -> Iterator[None]:
    """End this process, and its launcher, when the volume of ``folder`` does not answer for ``limit_s``.

    A write to it may never come back, and not be interrupted either: nothing else would notice in time.
    """
    path, stop = folder / f".alive.{secrets.token_hex(8)}.part", threading.Event()

    def lost() -> None:
        with contextlib.suppress(KeyError, ValueError, ProcessLookupError):
            os.kill(int(os.environ[LAUNCHER]), signal.SIGUSR1)  # this process may not be able to end
        end_now(f"{folder}: the volume has not answered for {limit_s:.0f} s")

    def ask() -> None:
        while not stop.is_set():
            timer = threading.Timer(limit_s, lost)
            timer.daemon = True
            timer.start()
            with contextlib.suppress(OSError):  # an error is an answer, too
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o664)
                try:
                    os.pwrite(file, b"?", 0)
                    os.fsync(file)
                finally:
                    os.close(file)
            timer.cancel()
            stop.wait(interval_s)
        with contextlib.suppress(OSError):
            path.unlink()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=interval_s)


def checkpoint_bytes(weights: int, optim: str, *, model_only: bool) -> int:
    """Estimate the size of a checkpoint from the bytes of trained ``weights``.

    Adam keeps two moments, each as large as they are.
    """
    adam = optim.startswith("adamw") and "bit" not in optim and not model_only
    return weights * (3 if adam else 1)


def check_space(output_dir: Path, checkpoint_bytes: int, limit: int | None) -> None:
    """Compare what the checkpoints will take with the free space, before any step is paid for.

    ``checkpoint_bytes`` is of one; ``limit`` of them are kept (None counts as one, the least that a run
    needs) while another is written.

    Raises:
        UserError: the volume will be full before the run ends.
    """
    files = (file for path in checkpoints(output_dir) for file in path.rglob("*") if file.is_file())
    needed = checkpoint_bytes * ((limit or 1) + 1) - sum(file.stat().st_size for file in files)
    free = shutil.disk_usage(output_dir).free
    if needed > free:
        raise CannotCreate(
            f"{size_text(free)} are free and checkpoints of {size_text(checkpoint_bytes)} need about "
            f"{size_text(needed)} more",
            where=str(output_dir),
            fix="free space or enlarge the volume (persistence.output.size), lower save_total_limit, or set "
            "save_only_model "
            "(which cannot be resumed)",
        )


def size_text(count: float) -> str:
    """``count`` bytes in GiB, below one in MiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
