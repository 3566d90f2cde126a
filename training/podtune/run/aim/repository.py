"""A run of an Aim repository, and the repository: the only file that imports aim, inside functions alone.

docs/aim.md has the names and contexts under which a run is shown.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import datetime
import fcntl
import importlib.util
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from podtune.run.errors import Unavailable
from podtune.run.record import Json, number, timestamp

if TYPE_CHECKING:
    import aim
    from aim.sdk.repo import Repo

PARAMS = (
    *("mode", "strategy", "model", "world_size", "nnodes", "nproc_per_node", "global_batch_size", "seed"),
    *("data", "provenance", "config"),
)
NOT_SERIES = ("time", "step", "epoch", "split", "eta_s")
PER_RANK = "per_rank"  # of a system line: a metric's value on each rank, None where it has none


class AimRun:
    """One run of an Aim repository, opened for writing. Its methods raise whatever Aim or the disk raises."""

    def __init__(self, repo: str, run_hash: str | None, record: Json) -> None:
        self._repo = open_repo(repo)
        earlier_run = run_hash if run_hash and self._repo.run_exists(run_hash) else None
        self._run = _open_run(self._repo, earlier_run, _timestamp(record.get("started_at")))
        self.hash: str = self._run.hash
        self._run.name = str(record.get("name", self.hash))
        self._run.experiment = experiment(record)
        for tag in tags(record):
            if tag not in self._run.tags:
                self._run.add_tag(tag)
        self._set({"status": "running"} | {key: record[key] for key in PARAMS if key in record})

    def track(self, entries: Sequence[Json]) -> int:
        """Write lines of metrics.jsonl and count their points. The same lines again change nothing."""
        points = 0
        for entry in entries:
            time_s, epoch = _timestamp(entry.get("time")), number(entry.get("epoch"))
            for rank, name, value in _values(entry):
                context = {"subset": str(entry["split"])} | ({} if rank is None else {"rank": rank})
                # Run.track() without its clock, which would show a run that is synced later at that hour
                self._run._tracker._track(value, time_s, name, int(entry["step"]), epoch, context=context)
                points += 1
        return points

    def release(self) -> None:
        """Close the databases of a run that goes on, so that it can be opened again."""
        self._run.close()

    def close(self, status: str, reason: str, record: Json) -> None:
        """Write how the run ended and close it, so that nothing shows it as in progress."""
        results = {key: record[key] for key in ("measurements", "exit_code") if key in record}
        self._set({"status": status, "reason": reason} | results)
        if record.get("ended_at"):
            ended, resources = _timestamp(record["ended_at"]), self._run._resources
            # Aim takes the moment of closing, which would make hours of a run that is synced later
            resources.set_run_end_time = lambda: resources.meta_run_tree.__setitem__("end_time", ended)
        self._run.close()
        if not self._repo.is_remote_repo:
            # a run that was just closed cannot be read from Python until it is indexed
            from aim.sdk.index_manager import RepoIndexManager

            # `aim up` holds the index while it runs, and then indexes by itself
            with contextlib.suppress(Exception):
                RepoIndexManager.get_index_manager(self._repo).index(self.hash)

    def _set(self, params: Json) -> None:
        for key, value in params.items():
            self._run[key] = value


def experiment(record: Json) -> str:
    """The Aim experiment: the configuration's ``experiment``, else the data set's name, else the mode."""
    config, data = record.get("config") or {}, record.get("data") or {}
    named = config.get("experiment") if isinstance(config, dict) else None
    path = Path(str(data.get("path") or "")) if isinstance(data, dict) else Path()
    # DIR/train.parquet is the data set DIR
    dataset = path.parent.name if path.suffix and path.stem in ("train", "data") else path.stem
    return str(named or dataset or record.get("mode") or "podtune")


def tags(record: Json) -> list[str]:
    """Short labels to filter by in Aim: mode, strategy and world size."""
    world = f"world-{record['world_size']}" if "world_size" in record else None
    return [str(tag) for tag in (record.get("mode"), record.get("strategy"), world) if tag]


def aim_folder() -> Path:
    """Name the folder that Aim is installed in.

    Aim's migrations (alembic) import from the working directory, which may be anybody's; there, it is Aim.
    """
    spec = importlib.util.find_spec("aim")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'aim'", name="aim")
    return Path(spec.origin).parents[1]


def open_repo(repo: str) -> Repo:
    """Aim's Repo for a folder, made if there is none, or for aim://host:port."""
    # read when aim is imported: it would report its use to its makers
    os.environ.setdefault("AIM_UI_TELEMETRY_ENABLED", "0")
    from aim.ext.cleanup import AutoClean
    from aim.sdk.repo import Repo

    if "://" in repo:
        from aim.ext.transport import client

        client.raise_exception = _raise
        return Repo.from_path(repo)
    folder = (Path(repo).parent if Path(repo).name == ".aim" else Path(repo)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(aim_folder()), (folder / ".aim-init.lock").open("a") as lock:
        try:  # of processes that initialise one repository at once, all but one fail
            fcntl.lockf(lock, fcntl.LOCK_EX)
        except OSError as error:  # some network volumes, and Aim's own database would fail there, too
            fix = "aim-sync to a repository on a volume that can"
            raise Unavailable("the volume cannot lock files", where=str(folder), fix=fix) from error
        opened = Repo.from_path(str(folder), init=not (folder / ".aim" / "VERSION").exists())
    # Aim closes what is open at exit in a thread, which Python 3.12 refuses by then; nothing is left here
    atexit.unregister(AutoClean.cleanup)
    return opened


def _raise(error: Json) -> NoReturn:
    """Raise an Aim server's error as Python's own: Aim's client would call whatever the server names."""
    name, message = str(error.get("class_name")), str(error.get("message"))
    builtin = getattr(builtins, name, None) if error.get("module_name") == "builtins" else None
    if isinstance(builtin, type) and issubclass(builtin, Exception):
        raise builtin(message)
    raise RuntimeError(f"the Aim server says {name}: {message}")


def _open_run(repo: Repo, run_hash: str | None, started_s: float) -> aim.Run:
    import aim

    started = datetime.datetime.fromtimestamp(started_s, datetime.UTC).replace(tzinfo=None)

    class Run(aim.Run):  # type: ignore[misc,unused-ignore]
        """A run that Aim dates by the training's start instead of the first look at its files."""

        @property
        def props(self) -> object:
            return self.repo.request_props(self.hash, self.read_only, started)

    # Forcing is safe: the follower's lock makes it the only writer of podtune, and the soft lock that a
    # killed one left behind would otherwise have to be removed by hand.
    return Run(
        run_hash,
        repo=repo,
        force_resume=run_hash is not None,
        system_tracking_interval=None,  # metrics.jsonl has the machine's figures
        capture_terminal_logs=False,  # Aim would put a stream of its own in place of stdout
    )


def _values(entry: Json) -> Iterator[tuple[int | None, str, float]]:
    """Rank (None for the run's own), name and value of every number in a line."""
    # always as floats: a series of whole numbers that becomes fractional would change its type in Aim
    for name, value in entry.items():
        if name not in NOT_SERIES and (figure := number(value)) is not None:
            yield None, name, figure
    for name, column in (entry.get(PER_RANK) or {}).items():
        for rank, value in enumerate(column):
            if (figure := number(value)) is not None:
                yield rank, name, figure


def _timestamp(value: object) -> float:
    found = timestamp(value)
    return time.time() if math.isnan(found) else found
