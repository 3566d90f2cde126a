"""Aim as a view of a run's files. The training process neither imports Aim nor holds its locks.

run.json and metrics.jsonl are the truth. :func:`start_tracker` starts one child process
(podtune.run.aim.follower) which tails them and is the only writer of the Aim repository; whatever Aim does
(hang, crash, a full disk, a dead server) stays in that child. Without it, ``podtune aim-sync`` builds the
same Aim run from the same files later.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from podtune.run.errors import warn

CLOSE_LIMIT_S = 60.0  # Aim's client can hang for ever when its server died: the child then ends itself


class Tracker:
    """The child process that follows a run. Made by :func:`start_tracker`."""

    def __init__(self, child: subprocess.Popen[str] | None, run_dir: Path, repo: str) -> None:
        self._child, self._run_dir, self._repo = child, run_dir, repo

    def finish(self, timeout_s: float = 5.0) -> None:
        """Let the child catch up and close the Aim run; call it once run.json says how the run ended.

        Returns within ``timeout_s`` seconds and never raises: one line on stderr says what is left to do.
        """
        child, self._child = self._child, None
        if child is None or child.stdin is None or child.stdout is None:
            return
        with contextlib.suppress(OSError, ValueError):
            child.stdin.close()  # the child reads the end of its input as "come to an end"
        try:
            if code := child.wait(timeout_s):
                self.warn(child.stdout.read().strip() or f"the tracker ended with code {code}")
        except subprocess.TimeoutExpired:
            self.warn(f"still writing after {timeout_s:.0f} s; it ends within {CLOSE_LIMIT_S:.0f} s")
        except (OSError, ValueError) as error:
            self.warn(str(error))

    def warn(self, what: str) -> None:
        """Say that the view is incomplete, and the command that completes it."""
        warn(
            f"Aim: {what}. The run's files are complete: podtune aim-sync {self._run_dir} --repo {self._repo}"
        )


def start_tracker(run_dir: Path, repo: str) -> Tracker:
    """Start the child that shows ``run_dir`` in the Aim repository ``repo`` (a folder or aim://host:port).

    Call it on rank 0 once run.json exists with status "running". Never raises: without Aim it warns and
    returns a tracker that does nothing.
    """
    run_dir = Path(run_dir).resolve()
    repo = repo if "://" in repo else str(Path(repo).resolve())
    tracker = Tracker(None, run_dir, repo)
    if importlib.util.find_spec("aim") is None:
        tracker.warn("not installed (the extra podtune[aim])")
        return tracker
    module = "podtune.run.aim.follower"
    command = [sys.executable, "-m", module, str(run_dir), repo, str(os.getpid())]
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # Aim's bars and tracebacks are no news of the training
            text=True,
            # Ctrl-C and torchrun's signals end the training first, and the child sees its files closed
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},  # the cores are the ranks'
        )
    except OSError as error:
        tracker.warn(f"the tracker did not start: {error}")
        return tracker
    return Tracker(child, run_dir, repo)
