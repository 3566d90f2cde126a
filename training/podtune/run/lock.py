"""One lock between processes and pods: a file, and signs of life in it. Needs no torch.

The kernel holds it for the process (a POSIX record lock: dropped when the process dies however it dies, not
inherited by forked workers, carried between nodes by NFS). Where a file system has no locks, or does not
carry them between nodes, the holder's heartbeat in the file decides: content that changes while one looks
belongs to the living. No clock is compared with another machine's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from podtune.run.errors import Unavailable

BEAT_S = 2.0
STALE_S = 15.0  # seven missed beats: the holder is gone
POLL_S = 0.1

_own: set[str] = set()  # paths held by this process: the kernel does not keep threads apart
_guard = threading.Lock()


class Lock:
    """A lock held by this process until :meth:`release` or its death. Made by :func:`take`."""

    def __init__(self, file: int, path: Path, key: str) -> None:
        self.path, self._file, self._key = path, file, key
        self._token, self._beats = secrets.token_hex(8), 0
        self._stop = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._show_life, name="lock", daemon=True)
        self._thread.start()

    def is_own(self) -> bool:
        """True if the file has this process's sign in it; reading drops a kernel's lock."""
        with contextlib.suppress(OSError):
            return self._token in self.path.read_text(encoding="utf-8", errors="replace")
        return False

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
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):
                self._beat()

    def _beat(self) -> None:
        self._beats += 1
        sign = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": started(os.getpid()),
            "token": self._token,
            "beats": self._beats,
            "job": os.environ.get("PODTUNE_JOB_NAME", ""),
        }
        os.pwrite(self._file, json.dumps(sign).ljust(500).encode() + b"\n", 0)
        os.fsync(self._file)


def take(
    path: Path, *, also: Callable[[], object] = lambda: None, patience_s: float | None = None
) -> Lock | None:
    """Take the lock at ``path``; None while somebody living holds it.

    A sign of life from another host, or what ``also`` returns, is watched for ``patience_s``
    (:data:`STALE_S`): what moves is alive.

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
        lock = _take(path, key, also, STALE_S if patience_s is None else patience_s)
    finally:
        if lock is None:
            with _guard:
                _own.discard(key)
    return lock


def _take(path: Path, key: str, also: Callable[[], object], patience_s: float) -> Lock | None:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o664)
    kernel = True
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(file)
            return None
        kernel = False
    try:
        if os.fstat(file).st_ino != path.stat().st_ino:  # taken away meanwhile, see hold()
            raise BlockingIOError
        if _lives(_content(file), lambda: (_content(file), also()), patience_s):
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError):
        os.close(file)
        return None
    lock = Lock(file, path, key)
    if not kernel:  # of several that came at once the last to write has it
        time.sleep(2 * BEAT_S)
        if not lock.is_own():
            lock._stop.set()
            lock._thread.join()
            os.close(file)
            return None
    return lock


def _lives(sign: str, look: Callable[[], object], patience_s: float) -> bool:
    """True if the holder that left ``sign`` is alive: by its process, or from elsewhere its beats."""
    try:
        owner: Any = json.loads(sign or "{}")
        if owner and owner["host"] == socket.gethostname():
            return bool(owner["pid"] != os.getpid() and started(owner["pid"]) == owner["started"])
    except (ValueError, KeyError, TypeError):
        pass  # not ours, or torn: watched
    before = look()
    if before == ("", None):
        return False
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        time.sleep(min(POLL_S, patience_s))
        if look() != before:
            return True
    return False


@contextlib.contextmanager
def hold(path: Path, *, until: Callable[[], bool], wait_s: float, what: str) -> Iterator[bool]:
    """Hold the lock ``path``; yield False without it as soon as ``until()`` is true: another did the work.

    For work that two may do at once without harm: a holder that shows no sign of life for :data:`STALE_S`,
    stopped or cut off, loses the lock. ``what`` it does is said in the error.

    Raises:
    UserError: a living holder kept it for ``wait_s``; names it.
    """
    end = time.monotonic() + wait_s
    sign, seen = None, time.monotonic()
    while not (done := until()) and (lock := take(path)) is None:
        if (now := _read(path)) != sign:
            sign, seen = now, time.monotonic()
        elif time.monotonic() - seen > STALE_S:
            with contextlib.suppress(OSError):
                path.unlink()
        if time.monotonic() > end:
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


def holder(path: Path) -> str:
    """Name the holder of the lock for people."""
    sign = _read(path)
    try:
        return f"process {sign['pid']} on {sign['host']}" if sign else "a running process"
    except KeyError:
        return "a running process"


def job_of(path: Path) -> str:
    """Name the job whose pod holds the lock; empty outside of a cluster."""
    return str((_read(path) or {}).get("job", ""))


def _read(path: Path) -> dict[str, Any] | None:
    with _guard:
        if os.path.realpath(path) in _own:  # closing a second handle on it would drop the kernel's lock
            return {"pid": os.getpid(), "host": socket.gethostname(), "at": time.monotonic()}
    try:
        sign = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return None
    return sign if isinstance(sign, dict) else None


def _content(file: int) -> str:
    return os.pread(file, 1000, 0).decode(errors="replace").strip()


def started(pid: int) -> float | None:
    """Read when process ``pid`` of this host was started; None if there is none, or a zombie.

    In ticks since the machine was started, which setting the clock does not change.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else float(fields[19])
