"""Aim as a view of a run's files. The training process neither imports Aim nor holds its locks.

run.json and metrics.jsonl are the truth. :func:`start_tracker` starts one child process
(podtune.run.aim.follower) which tails them and is the only writer of the Aim repo; whatever Aim does (hang,
crash, a full disk, a dead server) stays in that child. Without it, ``podtune aim-sync`` builds the same Aim
run from the same files later. docs/aim.md has names and contexts.

The only file that imports aim, and only inside functions.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import datetime
import fcntl
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from podtune.run.errors import warn
from podtune.run.record import Json

CLOSE_LIMIT_S = 60.0  # Aim's client can hang for ever when its server died: the child then ends itself
IDENTITY_KEYS = (
    "mode",
    "strategy",
    "model",
    "world_size",
    "nnodes",
    "nproc_per_node",
    "global_batch_size",
    "seed",
)
PARAMS = (*IDENTITY_KEYS, "data", "provenance", "config")
NOT_SERIES = ("time", "step", "epoch", "split", "eta_s")
PER_RANK = "per_rank"  # of a system line: the figures of each rank, None where it has none
Point = tuple[int, float, float | None, float]  # step, value, epoch, seconds since the epoch


class Tracker:
    """The child process that follows a run. Made by :func:`start_tracker`."""

    def __init__(self, child: subprocess.Popen[str] | None, run_dir: Path, repo: str) -> None:
        self._child, self._run_dir, self._repo = child, run_dir, repo

    def finish(self, timeout_s: float = 5.0) -> None:
        """Let the child catch up and close the Aim run; call it once run.json says how the run ended.

        Returns within ``timeout_s`` seconds, never raises. What was not done by then is said in one line on
        stderr.
        """
        child, self._child = self._child, None
        if child is None or child.stdin is None or child.stdout is None:
            return
        with contextlib.suppress(OSError, ValueError):
            child.stdin.close()  # the child reads the end of its input as "come to an end"
        try:
            code = child.wait(timeout_s)
            said = child.stdout.read().strip() if code else ""
            if code:
                self._warn(said or f"the tracker ended with code {code}")
        except subprocess.TimeoutExpired:
            self._warn(
                f"still writing after {timeout_s:.0f} s; left to itself for at most {CLOSE_LIMIT_S:.0f} s"
            )
        except (OSError, ValueError) as error:
            self._warn(str(error))

    def _warn(self, what: str) -> None:
        warn(
            f"Aim: {what}. The run's files are complete: podtune aim-sync {self._run_dir} --repo {self._repo}"
        )


def start_tracker(run_dir: Path, repo: str) -> Tracker:
    """Start the child that shows ``run_dir`` in the Aim repo ``repo`` (a folder or aim://host:port). Rank 0
    only.

    Call it once run.json exists with status "running". Never raises: without Aim it warns and returns a
    tracker that does nothing.
    """
    run_dir = Path(run_dir).resolve()
    repo = repo if "://" in repo else str(Path(repo).resolve())
    tracker = Tracker(None, run_dir, repo)
    if importlib.util.find_spec("aim") is None:
        tracker._warn("not installed (the extra podtune[aim])")
        return tracker
    command = [
        sys.executable,
        "-m",
        "podtune.run.aim.follower",
        str(run_dir),
        "--repo",
        repo,
        "--parent",
        str(os.getpid()),
    ]
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    try:
        # A session of its own: Ctrl-C and torchrun's signals end the training first, and the child sees its
        # files closed.
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
    except OSError as error:
        tracker._warn(f"the tracker did not start: {error}")
        return tracker
    return Tracker(child, run_dir, repo)


class AimRun:
    """One run of an Aim repo, opened for writing. Every method may raise whatever Aim or the disk raises."""

    def __init__(self, repo: str, run_hash: str | None, record: Json) -> None:
        self._repo = open_repo(repo)
        earlier_run = run_hash if run_hash and self._repo.run_exists(run_hash) else None
        self._run = _writable_run(self._repo, earlier_run, record.get("started_at"))
        self.hash: str = self._run.hash
        self.created = earlier_run is None
        self._run.name = str(record.get("name", self.hash))
        self._run.experiment = experiment(record)
        for tag in tags(record):
            if tag not in self._run.tags:
                self._run.add_tag(tag)
        for key in PARAMS:
            if key in record:
                self._run[key] = _plain(record[key])
        self._run["status"] = "running"

    def track(self, entries: list[Json]) -> int:
        """Write lines of metrics.jsonl and return how many points that made. The same lines again change
        nothing.
        """
        # split, rank where it is one rank's, name
        series: dict[tuple[str, int | None, str], list[Point]] = {}
        for entry in entries:
            at, epoch = _timestamp(entry.get("time")), _number(entry.get("epoch"))
            for rank, name, number in _figures(entry):
                series.setdefault((str(entry["split"]), rank, name), []).append(
                    (int(entry["step"]), number, epoch, at)
                )
        for (split, of_rank, name), points in series.items():
            self._extend({"subset": split} | ({} if of_rank is None else {"rank": of_rank}), name, points)
        return sum(map(len, series.values()))

    def _extend(self, labels: Json, name: str, points: list[Point]) -> None:
        """What Run.track() does for each point, with two differences: a point keeps its own time also when it
        is synced
        later, and a series' summary (last, lowest, highest) is written once for all of ``points``, at half
        the cost."""
        from aim.storage.context import Context

        tracker, context = self._run._tracker, Context(labels)
        with self._repo.atomic_track(self.hash):
            info = tracker.sequence_infos[context.idx, name]
            if not info.initialized:
                tracker._init_sequence_info(context.idx, name, points[0][1])
            tracker._update_context_data(context)
            telling = {points[0], min(points, key=_value), max(points, key=_value), points[-1]}
            for step, number, _, _ in sorted(telling):
                tracker._update_sequence_info(context.idx, name, number, step)
            for step, number, epoch, at in points:
                tracker._add_value(info, number, step, epoch, at)

    def forget(self) -> None:
        """Drop every series, because the metrics file was cut back; the caller tracks it again from the
        top.
        """
        meta, series = self._run.meta_run_tree, self._run.series_run_trees[2]
        for context, names in list((meta.get("traces", {}) or {}).items()):
            for name in list(names):
                del series[(context, name)]
        for key in ("traces", "typed_traces"):
            with contextlib.suppress(KeyError):
                del meta[key]
        self._run._tracker.sequence_infos.clear()
        self._run._tracker.contexts.clear()

    def abandon(self) -> None:
        """Close the databases after a failure; the next attempt opens the run again."""
        self._run.close()

    def close(self, status: str, reason: str, record: Json) -> None:
        """Write how the run ended and let go of it, so that nothing shows it as in progress."""
        self._run["status"] = status
        self._run["reason"] = reason
        for key in ("measurements", "exit_code"):
            if key in record:
                self._run[key] = _plain(record[key])
        if record.get("ended_at"):
            ended, resources = _timestamp(record["ended_at"]), self._run._resources
            # Aim takes the moment of closing, which a later sync makes hours of
            resources.set_run_end_time = lambda: resources.meta_run_tree.__setitem__("end_time", ended)
        self._run.close()
        # `aim up` holds the index while it runs, and then indexes by itself
        with contextlib.suppress(Exception):
            _index(self._repo, self.hash)


def experiment(record: Json) -> str:
    """The Aim experiment of a run: its configuration's ``experiment``, else the name of its data set, else
    its mode.
    """
    config, data = record.get("config") or {}, record.get("data") or {}
    named = config.get("experiment") if isinstance(config, dict) else None
    path = Path(str(data.get("path") or "")) if isinstance(data, dict) else Path()
    # DIR/train.parquet is the data set DIR
    dataset = path.parent.name if path.stem in ("train", "data") else path.stem
    return str(named or dataset or record.get("mode") or "podtune")


def tags(record: Json) -> list[str]:
    """Short labels to filter by in Aim: mode, strategy and world size."""
    tags = [
        record.get("mode"),
        record.get("strategy"),
        f"world-{record['world_size']}" if "world_size" in record else None,
    ]
    return [str(tag) for tag in tags if tag]


def open_repo(repo: str) -> Any:
    """Aim's Repo object for ``repo``, made if there is none; under a file lock, because a fresh repo opened
    twice breaks.
    """
    from aim.ext.cleanup import AutoClean
    from aim.sdk.repo import Repo

    # Aim closes what is left at exit in a thread, which Python 3.12 refuses by then, with a traceback:
    # without one.
    AutoClean._registered_with_atexit = True
    atexit.unregister(AutoClean.cleanup)
    atexit.unregister(AutoClean._cleanup)
    atexit.register(AutoClean._cleanup)
    if "://" in repo:
        from aim.ext.transport import client

        client.raise_exception = _raise
        return Repo.from_path(repo)
    folder = Path(repo).parent if Path(repo).name == ".aim" else Path(repo)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".aim-init.lock").open("a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        return Repo.from_path(str(folder), init=not (folder / ".aim" / "VERSION").exists())


def _raise(error: Json) -> NoReturn:
    """In place of Aim's own, which imports and calls whatever the server names: Python's exceptions alone."""
    name, message = str(error.get("class_name")), str(error.get("message"))
    builtin = getattr(builtins, name, None) if error.get("module_name") == "builtins" else None
    if isinstance(builtin, type) and issubclass(builtin, Exception):
        raise builtin(message)
    raise RuntimeError(f"the Aim server says {name}: {message}")


def _writable_run(repo: Any, run_hash: str | None, started_at: object) -> Any:
    from aim.sdk.run import BasicRun

    created_at = datetime.datetime.fromtimestamp(_timestamp(started_at), datetime.UTC).replace(tzinfo=None)

    class RunOfFiles(BasicRun):  # type: ignore[misc,unused-ignore]
        """A run whose creation time is the training's start; without Aim's resource tracker and terminal
        capture.
        """

        _props: Any

        @property
        def props(self) -> Any:
            if self._props is None:
                self._props = self.repo.request_props(self.hash, self.read_only, created_at)
            return self._props

    # Forcing is safe: the lock of the state file makes this the only podtune process that writes this run,
    # and a leftover soft lock of a killed one (same pod name, process numbers used again) would otherwise
    # have to be removed by hand.
    return RunOfFiles(run_hash, repo=repo, force_resume=run_hash is not None)


def _index(repo: Any, run_hash: str) -> None:
    from aim.sdk.index_manager import RepoIndexManager

    if not repo.is_remote_repo:
        RepoIndexManager.get_index_manager(repo).index(run_hash)


def _plain(value: Any) -> Any:
    """``value`` as Aim stores it: no None inside, keys are strings."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value if item is not None]
    return value if isinstance(value, str | int | float | bool) else str(value)


def _figures(entry: Json) -> Iterator[tuple[int | None, str, float]]:
    """Rank (None for the run's own), name and value of every number in a line."""
    for name, value in entry.items():
        number = _number(value)
        if name not in NOT_SERIES and number is not None:
            yield None, name, number
    for name, column in (entry.get(PER_RANK) or {}).items():
        for rank, value in enumerate(column):
            if (number := _number(value)) is not None:
                yield rank, name, number


def _number(value: object) -> float | None:
    """As a float, always: a series that is whole at first and fractional later would change its type in
    Aim.
    """
    if isinstance(value, int | float):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") and isinstance(value, str) else None


def _value(point: Point) -> float:
    return point[1]


def _timestamp(value: object) -> float:
    try:
        return datetime.datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        return time.time()
