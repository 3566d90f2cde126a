"""What ``podtune aim-sync`` does: find runs, keep a Follower for each, say what was written. Needs no
torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
import time
from pathlib import Path

from podtune.run.aim.follower import Busy, Follower, silent
from podtune.run.aim.tracking import CLOSE_LIMIT_S
from podtune.run.errors import (
    CANNOT_CREATE,
    OK,
    UNAVAILABLE,
    NotFound,
    Unavailable,
    UserError,
    warn,
)
from podtune.run.follow import find_runs, read_record, state
from podtune.run.record import RUN_FILE

FOLLOW_POLL_S = 2.0


def sync(root: Path, repo: str, *, follow: bool, forever: bool, rebuild: bool, as_json: bool) -> int:
    """Write the runs at or below ``root`` to the Aim repo ``repo``; with ``follow`` go on. Returns the exit
    code.

    Raises:
        UserError: no such folder, no run in it, Aim is not installed, or the repo cannot be written.
    """
    root, repo = Path(root), repo if "://" in repo else str(Path(repo).resolve())
    if not root.is_dir():
        raise NotFound(
            "no such folder", where=str(root), fix="give the --output_dir of a run, or a folder above it"
        )
    if importlib.util.find_spec("aim") is None:
        raise Unavailable("Aim is not installed", fix="pip install 'podtune[aim]'")
    os.environ.setdefault("AIM_UI_TELEMETRY_ENABLED", "0")
    stop = threading.Event()
    if follow:
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: stop.set())
    followers: dict[Path, Follower] = {}
    while True:
        run_dirs = find_runs(root)
        if not run_dirs and not follow:
            raise NotFound(
                f"no run here: no {RUN_FILE} in it or below it",
                where=str(root),
                fix="give the --output_dir of a run",
            )
        ended = [
            _update(run_dir, repo, followers, rebuild=rebuild, patient=follow, as_json=as_json)
            for run_dir in run_dirs
        ]
        if not follow or stop.is_set() or (run_dirs == [root] and all(ended) and not forever):
            break
        stop.wait(FOLLOW_POLL_S)
    for follower in followers.values():
        follower.leave()
    return OK


def _update(
    run_dir: Path, repo: str, followers: dict[Path, Follower], *, rebuild: bool, patient: bool, as_json: bool
) -> bool:
    """Bring one run up to date; True if it has ended. ``patient``: a failure is a warning and is tried
    again.
    """
    try:
        if run_dir not in followers:
            if read_record(run_dir) is None:
                raise NotFound(
                    "run.json cannot be read, or is of another schema", where=str(run_dir / RUN_FILE)
                )
            followers[run_dir] = _follower(run_dir, repo, rebuild=rebuild, patient=patient)
        follower = followers[run_dir]
        before = follower.lines
        with silent():
            status = follower.update()
        if follower.lines > before or not patient:
            _say(follower, status, as_json)
        return status is not None
    except Exception as error:
        code = (
            error.code
            if isinstance(error, UserError)
            else UNAVAILABLE
            if isinstance(error, Busy)
            else CANNOT_CREATE
        )
        what = (
            error.what if isinstance(error, UserError) else f"{type(error).__name__}: {error}".splitlines()[0]
        )
        if not patient:
            fix = (
                "wait for it, or stop it"
                if isinstance(error, Busy)
                else "see that the repo can be written and has space; nothing of the run is lost"
            )
            raise UserError(what, where=f"{run_dir} -> {repo}", fix=fix, code=code) from error
        warn(f"{run_dir}: {what}; trying again")
        return False


def _follower(run_dir: Path, repo: str, *, rebuild: bool, patient: bool) -> Follower:
    """The run's one writer. The tracker of a run that has ended is waited for: it is at most
    ``CLOSE_LIMIT_S`` seconds from its own end. ``patient``: the caller comes again, so nothing is waited for.

    Raises:
        Busy: another process goes on writing this run.
    """
    deadline = time.monotonic() + CLOSE_LIMIT_S
    while True:
        try:
            return Follower(run_dir, repo, rebuild=rebuild)
        except Busy:
            record = read_record(run_dir)
            live = record is None or state(run_dir, record)[0] == "running"
            if patient or live or time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _say(follower: Follower, status: str | None, as_json: bool) -> None:
    facts = {
        "run": str(follower.run_dir),
        "hash": follower.hash,
        "lines": follower.lines,
        "points": follower.points,
        "status": status or "running",
    }
    if as_json:
        print(json.dumps(facts), flush=True)
    else:
        print(
            f"{facts['run']}: {facts['lines']} lines, {facts['points']} points -> Aim run "
            f"{facts['hash']} "
            f"({facts['status']})",
            flush=True,
        )
