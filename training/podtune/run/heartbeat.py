"""Signs of life in a run's folder: its owner, its heartbeat, and an answering volume. Needs no torch.

Two files: ``.lock`` is held by rank 0 for as long as it lives (:mod:`podtune.run.lock`) and ``.heartbeat``
is rewritten every few seconds. A reader tells a living run from one that was killed by the heartbeat, and a
hanging run from a working one by the time of its last step.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

from podtune.run.errors import PEER_LOST, CannotCreate, PeerLost, UserError, terminate_log
from podtune.run.files import remove_parts, write_atomically
from podtune.run.launcher import LAUNCHER
from podtune.run.lock import Lock, holder, job_of, started, take

HEARTBEAT_FILE, LOCK_FILE = ".heartbeat", ".lock"
INTERVAL_S = 5.0
STALE_S = 60.0  # twelve missed beats: a paused disk or a slow network file system is not a death
WATCH_S = 15.0  # three beats: a foreign heartbeat that moves meanwhile is alive, whatever its clock says
ENDING_S = 60.0  # a pod that is deleted may take as long

Life = Literal["alive", "dead", "silent", "unknown"]


@dataclass(frozen=True)
class Beat:
    """One heartbeat: its ``time`` (seconds since the epoch), the last ``step`` and when it was reached."""

    time: float
    step: int
    step_at: float
    pid: int
    host: str
    started: float | None = None  # of the process, see :func:`podtune.run.lock.started`


class Heartbeat:
    """Writer of RUN_DIR/.heartbeat, from a daemon thread until stopped. Rank 0 only.

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
            "started": started(os.getpid()),
        }
        # a full or vanished volume is reported by what needs it, not by the pulse
        with contextlib.suppress(OSError):
            write_atomically(self._path, json.dumps(beat), flush=False)


class VolumeWatch:
    """Ends this process, and its launcher, when the volume of ``folder`` has not answered for ``limit_s``.

    A write to it may never come back, and not be interrupted either: nothing else would notice in time.
    """

    def __init__(self, folder: Path, limit_s: float, *, interval_s: float = INTERVAL_S) -> None:
        self._path = Path(folder) / f".alive.{secrets.token_hex(8)}.part"
        self._limit_s, self._interval_s = limit_s, interval_s
        self._answered = time.monotonic()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._ask, self._watch)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End watching; harmless when repeated."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=self._interval_s)

    def __enter__(self) -> VolumeWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _ask(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # an error is an answer, too
                file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o664)
                try:
                    os.pwrite(file, str(time.time()).encode(), 0)
                    os.fsync(file)
                finally:
                    os.close(file)
            self._answered = time.monotonic()
            if self._stop.wait(self._interval_s):
                break
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._limit_s / 10)):
            if (silent := time.monotonic() - self._answered) > self._limit_s:
                self._lost(silent)

    def _lost(self, silent_s: float) -> NoReturn:
        message = f"{self._path.parent}: the volume has not answered for {silent_s:.0f} s"
        print(f"podtune: error: {message}", file=sys.stderr, flush=True)
        terminate_log(message, PEER_LOST)
        with contextlib.suppress(KeyError, ValueError, ProcessLookupError):
            os.kill(int(os.environ[LAUNCHER]), signal.SIGUSR1)  # this process may not be able to end
        os._exit(PEER_LOST)


def read_beat(run_dir: Path) -> Beat | None:
    """Read the last heartbeat; None where there is none or it cannot be read."""
    try:
        beat: dict[str, Any] = json.loads((Path(run_dir) / HEARTBEAT_FILE).read_text(encoding="utf-8"))
        return Beat(
            float(beat["time"]),
            int(beat["step"]),
            float(beat["step_at"]),
            int(beat["pid"]),
            str(beat["host"]),
            beat.get("started"),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def life(run_dir: Path) -> Life:
    """Find out if the process that last beat in ``run_dir`` lives; ``unknown`` without a heartbeat.

    On the same host the process itself is asked, whatever the volume and the clocks say. From elsewhere an
    old heartbeat is ``silent``: a dead process, a volume that does not answer, or another clock.
    """
    beat = read_beat(run_dir)
    if beat is None:
        return "unknown"
    if beat.host == socket.gethostname():
        return "alive" if _runs(beat) else "dead"
    return "alive" if time.time() - beat.time < STALE_S else "silent"


def _runs(beat: Beat) -> bool:
    """True if the process that beat exists here, and is not a later one with the same number."""
    now = started(beat.pid)
    return now is not None and beat.started in (now, None)


def claim(run_dir: Path, *, patience_s: float = WATCH_S, ending_s: float = ENDING_S) -> Lock:
    """Lock ``run_dir`` for this process, on rank 0 only and before anything is written; keep the result.

    A process of the same job that holds it still, because its pod is ending, is waited for ``ending_s``.

    Raises:
        UserError: another job writes here; names its host, process and last step.
        PeerLost: this job's own last attempt has not ended; to be tried again.
    """
    path = Path(run_dir) / LOCK_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + ending_s
    while (lock := take(path, also=lambda: _moving(run_dir), patience_s=patience_s)) is None:
        job = os.environ.get("PODTUNE_JOB_NAME")
        if not job or job_of(path) != job:
            raise _taken(run_dir)
        if time.monotonic() > end:
            raise PeerLost(f"this job's last attempt has not ended after {ending_s:.0f} s: {holder(path)}")
        time.sleep(0.5)
    remove_parts(path.parent)
    return lock


def _moving(run_dir: Path) -> tuple[float, int] | None:
    """Read what changes of the heartbeat while its process lives, even if its ``.lock`` was removed."""
    beat = read_beat(run_dir)
    return (beat.time, beat.step) if beat and _may_live(beat) else None


def _may_live(beat: Beat) -> bool:
    return beat.host != socket.gethostname() or _runs(beat)


def _taken(run_dir: Path) -> UserError:
    beat = read_beat(run_dir)
    owner = f"process {beat.pid} on {beat.host}, at step {beat.step}" if beat else holder(run_dir / LOCK_FILE)
    return CannotCreate(
        f"another job writes here: {owner}",
        where=str(run_dir),
        fix="give this run its own --output_dir, or wait for the other one to end (a job that died lets go "
        "by itself)",
    )
