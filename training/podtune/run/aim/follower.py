"""The one writer of a run's Aim view: keeps an Aim run equal to a run's folder. Needs no torch.

``python -m podtune.run.aim.follower RUN_DIR REPO PARENT_PID`` is the child of start_tracker().
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import json
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from podtune.run.aim.repository import AimRun
from podtune.run.aim.tracking import CLOSE_LIMIT_S
from podtune.run.errors import Unavailable
from podtune.run.follow import MetricsTail, read_record, state
from podtune.run.record import Json, write_json

STATE_FILE, STATE_SCHEMA = "aim.json", "podtune.aim/1"
POLL_S = 2.0


class Follower:
    """Keeps one run of an Aim repository equal to one run's folder, for the tracker and ``aim-sync`` alike.

    RUN_DIR/aim.json (beside the Aim repository where the folder is read-only) remembers the run's hash and
    how the Aim run was closed. Its lock makes this the only writer. A line that is written again changes
    nothing, so whoever opens a run writes it from the top.

    Raises:
        Unavailable: another process follows this run, and goes on doing so for ``wait_s``.
    """

    def __init__(self, run_dir: Path, repo: str, *, wait_s: float = 0.0) -> None:
        self.run_dir, self.repo, self.lines, self.points = Path(run_dir).resolve(), repo, 0, 0
        folder = _state_folder(self.run_dir, repo)
        self._path, self._lock = folder / STATE_FILE, _lock(folder / f".{STATE_FILE}.lock", wait_s)
        # relative: equal runs have equal files, and a folder that moves with its repo keeps its run there
        self._key = repo if "://" in repo else os.path.relpath(repo, self.run_dir)
        self._state = _read_repos(self._path).get(self._key, {})
        self._tail = MetricsTail(self.run_dir)
        self._aim: AimRun | None = None

    @property
    def hash(self) -> str:
        """The Aim run's hash, empty before the first update."""
        return str(self._state.get("hash", ""))

    def update(self, *, ended: bool = False) -> str | None:
        """Write new lines; return the final status, if there. ``ended``: the trainer is known to be gone.

        Raises whatever Aim raises; the next call then writes all lines again.
        """
        record = read_record(self.run_dir)
        if record is None:
            return None
        status, reason = state(self.run_dir, record)
        if ended and status == "running":
            status, reason = "error", "died"
        if status == "running":
            self._write(record)
            return None
        end = f"{status} {reason} {record.get('ended_at', '')} {record.get('evaluated_at', '')}".strip()
        there = "://" in self.repo or (Path(self.repo) / ".aim").is_dir()
        if self._aim is None and there and self._state.get("closed") == end:
            return status
        aim = self._write(record)
        try:
            aim.close(status, reason, record)
        finally:
            self.release()
        self._remember(closed=end)
        return status

    def _write(self, record: Json) -> AimRun:
        """Write the new lines to the Aim run, which is opened if it is not."""
        try:
            if self._aim is None:
                self._tail = MetricsTail(self.run_dir)
                self._aim = AimRun(self.repo, self.hash or None, record)
                self._remember(hash=self._aim.hash, closed="")
            entries = self._tail.read()
            self.points += self._aim.track(entries)
            self.lines += len(entries)
        except BaseException:
            self.release()
            raise
        return self._aim

    def _remember(self, **changed: str) -> None:
        self._state.update(changed)
        repos = _read_repos(self._path) | {self._key: self._state}
        write_json(self._path, {"schema": STATE_SCHEMA, "repos": repos})

    def release(self) -> None:
        """Close Aim's databases, which this process could not open a second time otherwise."""
        aim, self._aim = self._aim, None
        if aim is not None:
            with contextlib.suppress(Exception):
                aim.release()
            del aim
        gc.collect()  # Aim's objects refer to each other, and a database is closed with the last of them

    def leave(self) -> None:
        """Close the run as far as it was written, and let another process write it."""
        self.release()
        self._lock.close()


def _lock(path: Path, wait_s: float) -> IO[str]:
    file, deadline = path.open("a"), time.monotonic() + wait_s
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except (BlockingIOError, PermissionError) as error:  # not what a volume without locks says
            if time.monotonic() >= deadline:
                file.close()
                what = "another process is writing this run to Aim"
                raise Unavailable(what, fix="wait for it, or stop it") from error
        time.sleep(0.2)


def _state_folder(run_dir: Path, repo: str) -> Path:
    if os.access(run_dir, os.W_OK) or "://" in repo:
        return run_dir
    folder = Path(repo) / ".podtune" / hashlib.sha256(str(run_dir).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _read_repos(path: Path) -> dict[str, dict[str, str]]:
    """The run's hash and end in each repository; none where the file is missing or of another schema."""
    with contextlib.suppress(OSError, ValueError):
        state = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(state, dict) and state.get("schema") == STATE_SCHEMA:
            return dict(state["repos"])
    return {}


def follow_parent(run_dir: Path, repo: str, parent: int) -> str:
    """Follow one run until its trainer ends or closes our standard input; return "" or what went wrong."""
    follower: Follower | None = None
    pause, problem = POLL_S, ""
    ended = threading.Event()
    threading.Thread(target=_watch_parent, args=(parent, ended), daemon=True).start()
    while True:
        last = ended.wait(pause)
        try:
            follower = follower or Follower(run_dir, repo)
            follower.update(ended=last)
            pause, problem = POLL_S, ""
        # whatever Aim or its disk does, it is tried again and never reaches the training
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            pause = min(2 * pause, 30.0)  # a server that is down is not asked every two seconds
        if last:
            return problem


def _watch_parent(parent: int, ended: threading.Event) -> None:
    """Set ``ended`` when the parent is gone or closes our stdin; end the process if it then hangs in Aim."""
    while os.getppid() == parent and not select.select([0], [], [], POLL_S)[0]:
        pass
    ended.set()
    time.sleep(CLOSE_LIMIT_S)
    os._exit(1)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Discard what Aim prints: progress bars, advice, tracebacks of its threads."""
    logging.getLogger("aim").setLevel(logging.CRITICAL)
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def main(arguments: list[str]) -> None:
    """Run the child; it prints in one line on stdout what went wrong, if anything did."""
    run_dir, repo, parent = arguments
    os.nice(10)  # the ranks come first
    with silent():
        problem = follow_parent(Path(run_dir), repo, int(parent))
    with contextlib.suppress(OSError):
        print(problem, flush=True)
    os._exit(1 if problem else 0)  # Aim's exit handlers wait for a server that may be gone


if __name__ == "__main__":
    main(sys.argv[1:])
