"""``podtune aim-sync``: find runs, keep a Follower for each, say what was written. Needs no torch."""

from __future__ import annotations

import importlib.util
import json
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from podtune.run.aim.follower import Busy, Follower, silent
from podtune.run.aim.tracking import CLOSE_LIMIT_S
from podtune.run.errors import OK, CannotCreate, NotFound, Unavailable, UserError, warn
from podtune.run.follow import find_runs, read_record, state
from podtune.run.record import RUN_FILE

FOLLOW_POLL_S = 2.0


def sync(root: Path, repo: str, *, follow: bool, rebuild: bool, as_json: bool) -> int:
    """Write the runs at or below ``root`` to the Aim repository ``repo``; return the exit code.

    Args:
        follow: continue until the run at ``root`` has ended, with runs below it until stopped.

    Raises:
        UserError: no such folder, no run in it, Aim is not installed, or the repository cannot be written.
    """
    root, repo = Path(root), repo if "://" in repo else str(Path(repo).resolve())
    if not root.is_dir():
        raise NotFound(
            "no such folder", where=str(root), fix="give the --output_dir of a run, or a folder above it"
        )
    if importlib.util.find_spec("aim") is None:
        raise Unavailable("Aim is not installed", fix="pip install 'podtune[aim]'")
    stop = threading.Event()
    if follow:
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: stop.set())
    syncer = _Syncer(repo, retry=follow, rebuild=rebuild, as_json=as_json)
    try:
        while True:
            run_dirs = find_runs(root)
            if not run_dirs and not follow:
                fix = "give the --output_dir of a run"
                raise NotFound(f"no run here: no {RUN_FILE} in it or below it", where=str(root), fix=fix)
            ended = [syncer.update(run_dir) for run_dir in run_dirs]
            if not follow or stop.is_set() or (run_dirs == [root] and all(ended)):
                return OK
            stop.wait(FOLLOW_POLL_S)
    finally:
        for follower in syncer.followers.values():
            follower.leave()


@dataclass
class _Syncer:
    """Followers of runs, made as they are found. ``retry``: a failure is a warning, and is tried again."""

    repo: str
    retry: bool
    rebuild: bool
    as_json: bool
    followers: dict[Path, Follower] = field(default_factory=dict)

    def update(self, run_dir: Path) -> bool:
        """Bring one run up to date; True if it has ended."""
        try:
            if run_dir not in self.followers:
                self.followers[run_dir] = self._follower(run_dir)
            follower = self.followers[run_dir]
            before = follower.lines
            with silent():
                status = follower.update()
        except Exception as error:  # whatever Aim or its disk raises
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            fix = "see that the repo can be written and has space; nothing of the run is lost"
            problem = error if isinstance(error, UserError) else CannotCreate(what, fix=fix)
            if not self.retry:
                problem.where = f"{run_dir} -> {self.repo}"
                raise problem from error
            warn(f"{run_dir}: {problem.what}; trying again")
            return False
        if follower.lines > before or not self.retry:
            self._print(follower, status or "running")
        return status is not None

    def _follower(self, run_dir: Path) -> Follower:
        """The run's one writer; waits for the tracker of a run that has ended, ``CLOSE_LIMIT_S`` at most."""
        if read_record(run_dir) is None:
            raise NotFound("run.json cannot be read, or is of another schema")
        deadline = time.monotonic() + CLOSE_LIMIT_S
        while True:
            try:
                return Follower(run_dir, self.repo, rebuild=self.rebuild)
            except Busy:
                record = read_record(run_dir)
                live = record is None or state(run_dir, record)[0] == "running"
                if self.retry or live or time.monotonic() > deadline:
                    raise
            time.sleep(0.2)

    def _print(self, follower: Follower, status: str) -> None:
        run, lines, points = follower.run_dir, follower.lines, follower.points
        line = f"{run}: {lines} lines, {points} points -> Aim run {follower.hash} ({status})"
        if self.as_json:
            written = {"run": str(run), "hash": follower.hash, "lines": lines, "points": points}
            line = json.dumps({**written, "status": status})
        print(line, flush=True)
