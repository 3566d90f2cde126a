"""Asynchronous saves: staged in shared memory, copied to the volume by a thread. Needs no torch.

The libraries write a checkpoint's files below ``/dev/shm``, at the speed of memory; that is all that ranks
stop for. During the next steps a thread of each pod copies its files to the volume, and rank 0's commits
the checkpoint (:mod:`podtune.run.checkpoint`) when every pod has copied. Until then nobody sees it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
BLOCK = 2**22
# What is written is flushed as often, so that neither the pod's memory nor another writer of the volume
# meets a backlog.
FLUSHED_BYTES = 2**25


def stage_of(output_dir: Path, node_rank: int) -> Path:
    """Name the folder in which a pod stages the checkpoints of ``output_dir``.

    The same at each start, so that what a killed one left is found.
    """
    key = hashlib.sha256(os.fsencode(output_dir.absolute())).hexdigest()[:16]
    return SHARED_MEMORY / f"podtune-{os.getuid()}-{key}-{node_rank}"


def clear(stage: Path) -> bool:
    """Make ``stage`` an empty folder of this user alone; False where that is not possible."""
    try:
        # exists() alone follows a link; rmtree refuses one, and then this folder is not used
        if stage.is_symlink() or stage.exists():
            shutil.rmtree(stage)
        stage.mkdir(mode=0o700)
    except OSError:
        return False
    return True


def staged_bytes(staged: Path) -> int:
    return sum(path.stat().st_size for path in staged.rglob("*") if path.is_file())


class BackgroundSave:
    """One staged checkpoint on its way to the volume.

    Args:
        staged: this pod's files, in memory; they are gone when they are written.
        staging_dir: the folder on the volume, not visible as a checkpoint yet.
        commit: makes it one, after :meth:`release`; None on the pods that leave it to rank 0's.
        alone: no other pod writes, so there is nothing to wait for.
    """

    def __init__(
        self, staged: Path, staging_dir: Path, commit: Callable[[], None] | None, *, alone: bool
    ) -> None:
        self._staged, self._staging_dir, self._commit = staged, staging_dir, commit
        self._copied, self._released = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        if alone:
            self.release()
        self._thread = threading.Thread(target=self._run, name="save", daemon=True)
        self._thread.start()

    @property
    def writes(self) -> bool:
        """True until this pod's files are on the volume."""
        return not self._copied.is_set()

    def release(self) -> None:
        """Let the checkpoint be committed: every pod has written."""
        self._released.set()

    def check(self) -> None:
        """Raise the thread's error, a full volume for instance."""
        if self._error is not None:
            raise self._error

    def wait_written(self) -> None:
        """Wait until this pod's files are on the volume; raises as :meth:`check`.

        A volume that does not answer is the business of :func:`podtune.run.output_volume.watch_volume`.
        """
        self._copied.wait()
        self.check()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until all is done, at most ``timeout_s``; False if it is not."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            _move(self._staged, self._staging_dir)
            self._copied.set()
            if self._commit is not None:
                self._released.wait()
                self._commit()
        except BaseException as error:  # the training raises it at its next step
            self._error = error
        finally:
            self._copied.set()


def _move(staged: Path, staging_dir: Path) -> None:
    """Copy the files below ``staged``, flushed, and free the memory of each once it is copied."""
    staging_dir.mkdir(parents=True, exist_ok=True)
    for source in sorted(staged.rglob("*")):
        target = staging_dir / source.relative_to(staged)
        if source.is_dir():
            target.mkdir(exist_ok=True)
            continue
        try:
            copy(source, target)
        except OSError as error:
            error.filename = str(target)  # writing to a file that is open names none
            raise
        source.unlink()
    shutil.rmtree(staged, ignore_errors=True)


def copy(source: Path, target: Path) -> None:
    """Copy ``source`` to ``target``, flushed to the volume when this returns."""
    block, unflushed = bytearray(BLOCK), 0
    # a buffer would make the count of unflushed bytes a lie
    with source.open("rb") as staged, target.open("wb", buffering=0) as file:
        while count := staged.readinto(block):
            left = memoryview(block)[:count]
            while left:
                left = left[file.write(left) :]
            unflushed += count
            if unflushed >= FLUSHED_BYTES:
                os.fdatasync(file.fileno())
                unflushed = 0
        os.fsync(file.fileno())
