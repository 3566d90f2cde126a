"""The one writer of a run's Aim view: keeps an Aim run equal to a run's folder. Needs no torch.

``python -m podtune.run.aim.follower RUN_DIR --repo REPO --parent PID`` is the child that start_tracker()
starts.
"""

from __future__ import annotations

import argparse
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
from typing import IO, Any

from podtune.run.aim.tracking import CLOSE_LIMIT_S, AimRun
from podtune.run.follow import MetricsTail, Position, read_record, state
from podtune.run.record import Json, write_json

STATE_FILE, STATE_SCHEMA = "aim.json", "podtune.aim/1"
POLL_S = 2.0


class Follower:
    """Keeps one run of an Aim repo equal to one run's folder. Used by the tracker, ``aim-sync`` and the Aim
    pod alike.

    What was written is remembered in RUN_DIR/aim.json (beside the Aim repo where the folder is read-only):
    the run's hash, how far metrics.jsonl was read, and how the Aim run was closed. That file's lock makes
    this the only writer.
    """

    def __init__(self, run_dir: Path, repo: str, *, rebuild: bool = False) -> None:
        self.run_dir, self.repo, self.lines, self.points = Path(run_dir).resolve(), repo, 0, 0
        self._aim: AimRun | None = None
        self._folder = _state_folder(self.run_dir, repo)
        self._lock = _lock(self._folder / f".{STATE_FILE}.lock")
        # relative: equal runs have equal files, and a folder that moves with its repo keeps its run there
        self._key = repo if "://" in repo else os.path.relpath(repo, self.run_dir)
        repos = _read_state(self._folder / STATE_FILE)["repos"]
        self._state = repos.get(self._key) or repos.get(repo, {})  # of an earlier version
        # A server that dies takes its queue with it: until a run was closed there, nothing counts as written.
        unsure = "://" in repo and not self._state.get("closed")
        positions = {} if rebuild or unsure else self._state
        self._tail = MetricsTail(
            self.run_dir, Position(int(positions.get("offset", 0)), str(positions.get("digest", "")))
        )
        self._rebuild = rebuild

    def update(self, *, ended: bool = False) -> str | None:
        """Write what is new. ``ended``: the process that trains is known to be gone. Returns the final
        status, if there.

        Raises whatever Aim raises; what was not remembered as written is written again by the next call.
        """
        record = read_record(self.run_dir)
        if record is None:
            return None
        status, reason = state(self.run_dir, record)
        if ended and status == "running":
            status, reason = "error", "died"
        end = f"{status} {reason} {record.get('ended_at', '')}" if status != "running" else ""
        end += f" {record['evaluated_at']}" if end and "evaluated_at" in record else ""
        before = self._tail.position
        entries, rewritten = self._tail.read()
        if (
            not entries
            and not rewritten
            and not self._rebuild
            and (self._aim or end)
            and self._state.get("closed", "") == end
        ):
            return status if end else None
        try:
            self._write(entries, rewritten, record, status, reason, end)
        except BaseException:
            self._tail = MetricsTail(self.run_dir, before)
            self._let_go()
            raise
        return status if end else None

    def _write(
        self, entries: list[Json], rewritten: bool, record: Json, status: str, reason: str, end: str
    ) -> None:
        if self._aim is None:
            self._aim = AimRun(self.repo, self._state.get("hash"), record)
            # someone deleted the run, or the whole repo: all of it again
            if self._aim.created and self._state.get("hash"):
                self._tail = MetricsTail(self.run_dir)
                entries, _ = self._tail.read()
            self._remember(hash=self._aim.hash, closed="")
        if rewritten or self._rebuild:
            self._aim.forget()
            self._rebuild = False
        self.points += self._aim.track(entries)
        self.lines += len(entries)
        if end:
            self._aim.close(status, reason, record)
            self._aim = None
        self._remember(offset=self._tail.position.offset, digest=self._tail.position.digest, closed=end)

    def _let_go(self) -> None:
        """After a failure: close Aim's databases, which this process could not open a second time."""
        aim, self._aim = self._aim, None
        if aim is not None:
            with contextlib.suppress(Exception):
                aim.abandon()
            del aim
        gc.collect()

    def _remember(self, **changed: Any) -> None:
        self._state.update(changed)
        content = _read_state(self._folder / STATE_FILE)
        content["repos"].pop(self.repo, None)
        content["repos"][self._key] = self._state
        write_json(self._folder / STATE_FILE, content)

    @property
    def hash(self) -> str:
        """The Aim run's hash, empty before the first update."""
        return str(self._state.get("hash", ""))

    def leave(self) -> None:
        """Close what is open, as far as it was written, and let another process write this run."""
        self._let_go()
        self._lock.close()


def known_repos(run_dir: Path) -> list[str]:
    """The Aim repositories that have ``run_dir``, folders as absolute paths."""
    keys = _read_state(run_dir / STATE_FILE)["repos"]
    return [key if "://" in key else str((run_dir / key).resolve()) for key in keys]


class Busy(RuntimeError):
    """Another process writes this run's view."""


def _lock(path: Path) -> IO[str]:
    file = path.open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise Busy("another process is writing this run to Aim") from error
    return file


def _state_folder(run_dir: Path, repo: str) -> Path:
    if os.access(run_dir, os.W_OK) or "://" in repo:
        return run_dir
    folder = Path(repo) / ".podtune" / hashlib.sha256(str(run_dir).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _read_state(path: Path) -> Json:
    with contextlib.suppress(OSError, ValueError):
        state = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(state, dict) and state.get("schema") == STATE_SCHEMA:
            return state
    return {"schema": STATE_SCHEMA, "repos": {}}


def follow_parent(run_dir: Path, repo: str, parent: int) -> str:
    """Follow one run until the process that trains ends or closes our standard input. Returns "" or what went
    wrong.
    """
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
            pause = min(2 * pause, 30.0)
        if last:
            return problem


def _watch_parent(parent: int, ended: threading.Event) -> None:
    """Set ``ended`` when the parent closes our standard input or is gone; end the process if it then hangs in
    Aim.
    """
    while os.getppid() == parent and not select.select([0], [], [], POLL_S)[0]:
        pass
    ended.set()
    time.sleep(CLOSE_LIMIT_S)
    os._exit(1)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Send what Aim prints (progress bars, advice, tracebacks of its threads) to nowhere."""
    logging.getLogger("aim").setLevel(logging.CRITICAL)
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def main(arguments: list[str]) -> None:
    """The child's entry: RUN_DIR --repo REPO --parent PID; says on stdout in one line what went wrong, if it
    did.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--repo", required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args(arguments)
    os.nice(10)
    os.environ.setdefault("AIM_UI_TELEMETRY_ENABLED", "0")
    with silent():
        problem = follow_parent(options.run_dir, options.repo, options.parent)
    with contextlib.suppress(OSError):
        print(problem, flush=True)
    os._exit(1 if problem else 0)  # Aim's exit handlers wait for a server that may be gone


if __name__ == "__main__":
    main(sys.argv[1:])
