"""Signs of life in a run's folder: who owns it, and whether it still goes on. Needs no torch.

Two files: ``.lock`` is held by rank 0 for as long as it lives (the kernel lets go of it when the process
dies, however it dies) and ``.heartbeat`` is rewritten every few seconds. A reader tells a run that goes on
from one that died without a word by the heartbeat, and a run that hangs from one that works by the time of
its last step.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from podtune.run.errors import CANNOT_CREATE, UserError

HEARTBEAT_FILE, LOCK_FILE = ".heartbeat", ".lock"
INTERVAL_S = 5.0
STALE_S = 60.0  # twelve missed beats: a paused disk or a slow network file system is not a death

Life = Literal["alive", "dead", "unknown"]


@dataclass(frozen=True)
class Beat:
    """One heartbeat: ``time`` (seconds since the epoch) of the beat, the last ``step`` and when it was
    reached.
    """

    time: float
    step: int
    step_at: float
    pid: int
    host: str


class Heartbeat:
    """Writes RUN_DIR/.heartbeat from a daemon thread until stopped. Rank 0 only.

    ``step(n)`` costs two assignments; the thread does the rest, so a hanging training loop still beats and
    shows by an old ``step_at``. A folder that cannot be written costs nothing but the heartbeat.
    """

    def __init__(self, run_dir: Path, *, interval_s: float = INTERVAL_S) -> None:
        self._path = Path(run_dir) / HEARTBEAT_FILE
        self._interval_s = interval_s
        self._step, self._step_at = 0, time.time()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._write()
        self._thread.start()

    def step(self, step: int) -> None:
        """Note that ``step`` is done."""
        self._step, self._step_at = step, time.time()

    def stop(self) -> None:
        """End the thread and take the heartbeat away: from here on run.json says how the run stands."""
        self._stop.set()
        self._thread.join(timeout=self._interval_s)
        with contextlib.suppress(OSError):
            self._path.unlink()

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _beat(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._write()

    def _write(self) -> None:
        beat = {
            "time": time.time(),
            "step": self._step,
            "step_at": self._step_at,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        # a full or vanished volume is reported by what needs it, not by the pulse
        with contextlib.suppress(OSError):
            part.write_text(json.dumps(beat), encoding="utf-8")
            part.replace(self._path)


def read_beat(run_dir: Path) -> Beat | None:
    """The last heartbeat, or None where there is none or it cannot be read."""
    try:
        found: dict[str, Any] = json.loads((Path(run_dir) / HEARTBEAT_FILE).read_text(encoding="utf-8"))
        return Beat(
            float(found["time"]),
            int(found["step"]),
            float(found["step_at"]),
            int(found["pid"]),
            str(found["host"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def life(run_dir: Path, *, at: float | None = None) -> Life:
    """Whether the process that last beat in ``run_dir`` lives. ``unknown``: there was never a heartbeat.

    On the same host the process itself is asked, so a death shows at once; from elsewhere it shows after
    STALE_S seconds.
    """
    beat = read_beat(run_dir)
    if beat is None:
        return "unknown"
    if beat.host == socket.gethostname() and not _runs(beat.pid, beat.time):
        return "dead"
    return "alive" if (at or time.time()) - beat.time < STALE_S else "dead"


def _runs(pid: int, beat_at: float) -> bool:
    """True if process ``pid`` exists here, is no zombie, and is not a later process with the same number."""
    import psutil

    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and float(process.create_time()) < beat_at + 2.0
    except psutil.Error:
        return False


class Claim:
    """The right to write in a run's folder, until :meth:`release` or the death of the process."""

    def __init__(self, file: int, path: Path) -> None:
        self._file, self._path = file, path

    def release(self) -> None:
        """Let the next job in. Harmless when repeated."""
        if self._file >= 0:
            os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def claim(run_dir: Path, *, patience_s: float = 2.5 * INTERVAL_S) -> Claim:
    """Take ``run_dir`` for this process. Call it on rank 0 only, before anything is written, and keep what it
    returns.

    A POSIX record lock: the kernel drops it when the process dies, forked data workers do not inherit it, and
    NFS carries it between nodes. Where the file system has no locks, or does not carry them between nodes, a
    foreign heartbeat decides: one that still moves within ``patience_s`` seconds belongs to a living job; a
    still one is stale and is taken over.

    Raises:
        UserError: another job writes here; names its host, process and last step.
    """
    path = Path(run_dir) / LOCK_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o664)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            owner = os.pread(file, 300, 0).decode(errors="replace").strip()
            os.close(file)
            raise _taken(run_dir, owner or "a running process") from None
    if (beat := read_beat(run_dir)) and _foreign_and_fresh(beat) and _moves(run_dir, beat, patience_s):
        os.close(file)
        raise _taken(run_dir, f"process {beat.pid} on {beat.host}, at step {beat.step}")
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return Claim(file, path)


def _foreign_and_fresh(beat: Beat) -> bool:
    return beat.host != socket.gethostname() and time.time() - beat.time < STALE_S


def _moves(run_dir: Path, before: Beat, patience_s: float) -> bool:
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        time.sleep(min(0.25, patience_s))
        if (now := read_beat(run_dir)) and now.time != before.time:
            return True
    return False


def _taken(run_dir: Path, owner: str) -> UserError:
    return UserError(
        f"another job writes here: {owner}",
        where=str(run_dir),
        fix=(
            "give this run its own --output_dir, or wait for the other one to end (a job that died lets go "
            "by itself)"
        ),
        code=CANNOT_CREATE,
    )
