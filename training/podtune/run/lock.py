"""One lock between processes and pods: a file, and signs of life in it. Needs no torch.

The kernel holds it for the process (a POSIX record lock: dropped when the process dies however it dies, not
inherited by forked workers, carried between nodes by NFS). Where a file system has no locks, or does not
carry them between nodes, the holder's heartbeat in the file decides: content that changes while one looks
belongs to the living. No clock is compared with another machine's.

The lock of a run's folder tells its readers more by the same heartbeat: a living run from one that was
killed, and by the time of the last step a hanging one from one that works.
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from podtune.run.errors import CannotCreate, PeerLost, Unavailable
from podtune.run.files import remove_parts
from podtune.run.record import read_as

LOCK_FILE = ".lock"  # of a run's folder
BEAT_S = 2.0
GONE_S = 15.0  # seven missed beats: the holder is gone
SILENT_S = 60.0  # to a reader a paused disk or a slow network file system is not a death
ENDING_S = 60.0  # a pod that is deleted may take as long
POLL_S = 0.1
SAY_EVERY_S = 30.0

Life = Literal["alive", "dead", "silent", "unknown"]
_own: set[str] = set()  # paths held by this process: the kernel does not keep threads apart
_guard = threading.Lock()


@dataclass(frozen=True)
class Beat:
    """One heartbeat of a lock's holder; times are seconds since the epoch by its own clock."""

    pid: int
    host: str
    started: float  # of the process, see started()
    job: str  # empty outside of a cluster
    time: float
    step: int  # the last of its run
    step_at: float

    @classmethod
    def now(cls) -> Beat:
        """The first heartbeat of this process."""
        pid, now, job = os.getpid(), time.time(), os.environ.get("PODTUNE_JOB_NAME", "")
        return cls(pid, socket.gethostname(), started(pid), job, now, 0, now)

    @classmethod
    def parse(cls, text: str) -> Beat | None:
        """Read a lock's content; None where it is torn, or no heartbeat."""
        try:
            return read_as(cls, json.loads(text))
        except (ValueError, RecursionError):
            return None

    def is_local(self) -> bool:
        """True if the process can be asked for: it is, or was, one of this host."""
        return self.host == socket.gethostname()

    def runs(self) -> bool:
        """True if the process exists on this host, and is not a later one with the same number."""
        return started(self.pid) == self.started != 0


class Lock:
    """A lock held by this process until :meth:`release` or its death. Made by :func:`take`."""

    def __init__(self, file: int, path: Path, key: str) -> None:
        self.path, self._file, self._key = path, file, key
        self._first = Beat.now()
        self._step = 0, self._first.time
        self._stop = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._show_life, name="lock", daemon=True)
        self._thread.start()

    def step(self, step: int) -> None:
        """Note that ``step`` of the run is done. An assignment: the thread does the rest."""
        self._step = step, time.time()

    def release(self) -> None:
        """Release the lock. Harmless when repeated."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout=BEAT_S)
        if not self._thread.is_alive():  # else it sits in a write to a volume that does not answer
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
            os.close(self._file)
        with _guard:
            _own.discard(self._key)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _show_life(self) -> None:
        # a full or vanished volume is reported by what needs it, not by the pulse
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):
                self._beat()

    def _beat(self) -> None:
        step, step_at = self._step
        beat = replace(self._first, time=time.time(), step=step, step_at=step_at)
        # of one length: the end of a longer one must not stay behind it
        os.pwrite(self._file, json.dumps(asdict(beat)).ljust(500).encode() + b"\n", 0)
        os.fsync(self._file)


def take(path: Path) -> Lock | None:
    """Take the lock at ``path``; None while somebody living holds it.

    A heartbeat of another host is watched for :data:`GONE_S`: what moves is alive.

    Raises:
    OSError: the file cannot be made, or is a link.
    """
    key = os.path.realpath(path)
    with _guard:
        if key in _own:
            return None
        _own.add(key)
    lock = None
    try:
        lock = _take(path, key)
    finally:
        if lock is None:
            with _guard:
                _own.discard(key)
    return lock


def _take(path: Path, key: str) -> Lock | None:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o664)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(file)
            return None  # without locks of the kernel the heartbeat decides
    try:
        # taken away meanwhile, see hold()
        if os.fstat(file).st_ino != path.stat().st_ino or _lives(file):
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError):
        os.close(file)
        return None
    return Lock(file, path, key)


def _lives(file: int) -> bool:
    """True if the holder that left its heartbeat lives: by its process, or from elsewhere by its beats."""

    def content() -> str:
        return os.pread(file, 1000, 0).decode(errors="replace").strip()

    before = content()
    if (beat := Beat.parse(before)) and beat.is_local():
        return beat.pid != os.getpid() and beat.runs()
    end = time.monotonic() + GONE_S
    while before and time.monotonic() < end:
        time.sleep(min(POLL_S, GONE_S))
        if content() != before:
            return True
    return False


@contextlib.contextmanager
def hold(path: Path, *, until: Callable[[], bool], wait_s: float, what: str) -> Iterator[bool]:
    """Hold the lock ``path``; yield False without it as soon as ``until()`` is true: another did the work.

    For work that two may do at once without harm: a holder that shows no sign of life for :data:`GONE_S`,
    stopped or cut off, loses the lock. ``what`` it does is said while this waits, and in the error.

    Raises:
    UserError: a living holder kept it for ``wait_s``; names it.
    """
    began = seen = said = time.monotonic()
    beat = None
    while not (done := until()) and (lock := take(path)) is None:
        if (now := _read(path)) != beat:
            beat, seen = now, time.monotonic()
        elif time.monotonic() - seen > GONE_S:
            with contextlib.suppress(OSError):
                path.unlink()
        if time.monotonic() - said > SAY_EVERY_S:
            said = time.monotonic()
            print(f"podtune: waiting for {holder(path)}, which is {what} ({said - began:.0f} s)", flush=True)
        if time.monotonic() - began > wait_s:
            raise Unavailable(
                f"another process has been {what} for {wait_s:.0f} s: {holder(path)}",
                where=str(path),
                fix="look at that process; or prepare the data before the job, with podtune data prepare",
            )
        time.sleep(POLL_S)
    if done:
        yield False
        return
    assert lock is not None
    with lock:
        try:
            yield True
        finally:
            path.unlink(missing_ok=True)


def claim(run_dir: Path, *, ending_s: float = ENDING_S) -> Lock:
    """Lock ``run_dir`` for this process, on rank 0 only and before anything is written; keep the result.

    A process of the same job that holds it still, because its pod is ending, is waited for ``ending_s``.

    Raises:
        UserError: another job writes here; names its host, process and last step.
        PeerLost: this job's own last attempt has not ended; to be tried again.
    """
    path, end = run_dir / LOCK_FILE, time.monotonic() + ending_s
    path.parent.mkdir(parents=True, exist_ok=True)
    while (lock := take(path)) is None:
        beat, job = _read(path), os.environ.get("PODTUNE_JOB_NAME")
        if not (job and beat and beat.job == job):
            raise CannotCreate(
                f"another job writes here: {holder(path)}" + (f", at step {beat.step}" if beat else ""),
                where=str(run_dir),
                fix="give this run its own --output_dir, or wait for the other one to end (a job that died "
                "lets go by itself)",
            )
        if time.monotonic() > end:
            raise PeerLost(f"this job's last attempt has not ended after {ending_s:.0f} s: {holder(path)}")
        time.sleep(0.5)
    remove_parts(path.parent)
    return lock


def holder(path: Path) -> str:
    beat = _read(path)
    return f"process {beat.pid} on {beat.host}" if beat else "a running process"


def read_beat(run_dir: Path) -> Beat | None:
    """Read the heartbeat of the process that has locked ``run_dir``, or was killed; None without one."""
    return _read(run_dir / LOCK_FILE)


def life(run_dir: Path) -> Life:
    """Find out if the process that last beat in ``run_dir`` lives; ``unknown`` without a heartbeat.

    On the same host the process itself is asked, whatever the volume and the clocks say. From elsewhere an
    old heartbeat is ``silent``: a dead process, a volume that does not answer, or another clock.
    """
    if (beat := read_beat(run_dir)) is None:
        return "unknown"
    if beat.is_local():
        return "alive" if beat.runs() else "dead"
    return "alive" if time.time() - beat.time < SILENT_S else "silent"


def _read(path: Path) -> Beat | None:
    with _guard:
        if os.path.realpath(path) in _own:  # closing a second handle on it would drop the kernel's lock
            return Beat.now()
    try:
        return Beat.parse(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def started(pid: int) -> float:
    """Read when process ``pid`` of this host was started; 0 if there is none, or a zombie.

    In ticks since the machine was started, which setting the clock does not change.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return 0.0 if fields[0] in ("Z", "X") else float(fields[19])
