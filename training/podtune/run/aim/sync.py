"""``podtune aim-sync``: find runs, keep a Follower for each, say what was written. Needs no torch."""

from __future__ import annotations

import importlib.util
import json
import signal
import threading
from pathlib import Path

from podtune.run.aim.follower import POLL_S, Follower, silent
from podtune.run.aim.tracking import CLOSE_LIMIT_S
from podtune.run.errors import CannotCreate, NotFound, Unavailable, UserError, warn
from podtune.run.follow import find_runs, read_record, state
from podtune.run.record import RUN_FILE


def sync(root: Path, repo: str, *, follow: bool, as_json: bool) -> None:
    """Write the runs at or below ``root`` to the Aim repository ``repo``.

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
        for name in (signal.SIGTERM, signal.SIGINT):  # the last lines are written, and Aim's lock is let go
            signal.signal(name, lambda *_: stop.set())
    followers: dict[Path, Follower] = {}
    try:
        while True:
            run_dirs = find_runs(root)
            if not run_dirs and not follow:
                fix = "give the --output_dir of a run"
                raise NotFound(f"no run here: no {RUN_FILE} in it or below it", where=str(root), fix=fix)
            ended = [_update(run_dir, repo, followers, follow, as_json) for run_dir in run_dirs]
            if not follow or stop.is_set() or (run_dirs == [root] and all(ended)):
                return
            stop.wait(POLL_S)
    finally:
        for follower in followers.values():
            follower.leave()


def _update(run_dir: Path, repo: str, followers: dict[Path, Follower], follow: bool, as_json: bool) -> bool:
    """Bring one run up to date; True if it has ended. With ``follow`` a failure is a warning."""
    try:
        if run_dir not in followers:
            record = read_record(run_dir)
            if record is None:
                raise NotFound("run.json cannot be read, or is of another schema")
            # the tracker of a run that has ended is about to end, too
            wait = not follow and state(run_dir, record)[0] != "running"
            followers[run_dir] = Follower(run_dir, repo, wait_s=CLOSE_LIMIT_S if wait else 0.0)
        follower = followers[run_dir]
        before = follower.lines
        with silent():
            status = follower.update()
    except Exception as error:  # whatever Aim or its disk raises
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        fix = "see that the repo can be written and has space; nothing of the run is lost"
        problem = error if isinstance(error, UserError) else CannotCreate(what, fix=fix)
        if not follow:
            problem.where = f"{run_dir} -> {repo}"
            raise problem from error
        warn(f"{run_dir}: {problem.what}; trying again")
        return False
    if follower.lines > before or not follow:
        counts = {"lines": follower.lines, "points": follower.points, "status": status or "running"}
        written = {"run": str(run_dir), "hash": follower.hash, **counts}
        text = "{run}: {lines} lines, {points} points -> Aim run {hash} ({status})".format(**written)
        print(json.dumps(written) if as_json else text, flush=True)
    return status is not None
