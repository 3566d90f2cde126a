"""An ended run written to MLflow, TensorBoard or trackio, from run.json and metrics.jsonl. Needs no torch.

What was written from the same folder before is replaced, so that repeating it adds nothing twice. Metrics are
called ``split/name``.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from podtune.run.errors import DataError
from podtune.run.follow import read_record, state
from podtune.run.metrics_log import read_metrics
from podtune.run.record import METRICS_FILE, RUN_FILE, Json, mapping, timestamp

NOT_METRICS = ("time", "step", "split")
PROJECT = "podtune"
SOURCE = "podtune.source"  # a tag, by which what was written before is known


@dataclass(frozen=True)
class Point:
    """One line of metrics.jsonl: seconds since 1970, the step and the figures."""

    time: float
    step: int
    values: dict[str, float]


@dataclass(frozen=True)
class EndedRun:
    """What a tracker is told of a run; times in seconds since 1970."""

    folder: Path
    name: str
    ok: bool
    started: float
    ended: float
    settings: dict[str, str]
    points: list[Point]

    @property
    def source(self) -> str:
        """A word for the folder, whatever is in its name."""
        return hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:16]


def read_run(folder: Path) -> EndedRun:
    """Read a run's files.

    Raises:
        DataError: run.json is no record, or the run has not ended.
    """
    record, where = read_record(folder), str(folder / RUN_FILE)
    if record is None:
        raise DataError("this record cannot be read", where=where)
    if state(folder, record)[0] == "running":
        raise DataError("this run has not ended", where=where, fix="`report_to` writes while a run trains")
    started = timestamp(record.get("started_at"))
    if math.isnan(started):
        raise DataError("started_at is not a time", where=where)
    metrics = folder / METRICS_FILE
    entries = read_metrics(metrics)[0] if metrics.exists() else []
    points = [_point(entry, started) for entry in entries]
    last = points[-1].time if points else started
    ended = timestamp(record.get("ended_at"))  # a run that was killed has not written it
    return EndedRun(
        folder,
        str(record.get("name") or folder.name),
        record.get("status") == "ok",
        started,
        last if math.isnan(ended) else ended,
        {key: str(value) for key, value in mapping(record.get("config")).items() if value is not None},
        points,
    )


def _point(entry: Json, otherwise: float) -> Point:
    figures = {
        f"{entry['split']}/{name}": float(value)
        for name, value in entry.items()
        if name not in NOT_METRICS and isinstance(value, int | float)
    }
    time = timestamp(entry.get("time"))
    return Point(otherwise if math.isnan(time) else time, entry["step"], figures)


def to_tensorboard(run: EndedRun, where: str | None) -> str:
    """Write event files to ``tensorboard`` in the run's folder; there is no other ``where``."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = run.folder / "tensorboard"
    if folder.exists():
        shutil.rmtree(folder)  # refuses a link that somebody else has left there
    writer = EventFileWriter(str(folder))
    for point in run.points:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        writer.add_event(Event(wall_time=point.time, step=point.step, summary=Summary(value=values)))
    writer.close()
    return str(folder)


def to_mlflow(run: EndedRun, where: str | None) -> str:
    """Write a run to a tracking URI, by default MLflow's own, in the experiment ``podtune``."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient(tracking_uri=where)
    experiment = client.get_experiment_by_name(PROJECT)
    number = experiment.experiment_id if experiment else client.create_experiment(PROJECT)
    for old in client.search_runs([number], f"tags.`{SOURCE}` = '{run.source}'"):
        client.delete_run(old.info.run_id)
    new = client.create_run(number, start_time=round(run.started * 1000), run_name=run.name).info.run_id
    client.set_tag(new, SOURCE, run.source)
    params = [Param(key, value[:6000]) for key, value in run.settings.items()]
    metrics = [
        Metric(name, value, round(point.time * 1000), point.step)
        for point in run.points
        for name, value in point.values.items()
    ]
    # the most that one call takes: 100 parameters, 1,000 metrics
    for start in range(0, len(params), 100):
        client.log_batch(new, params=params[start : start + 100])
    for start in range(0, len(metrics), 1000):
        client.log_batch(new, metrics=metrics[start : start + 1000])
    client.set_terminated(new, "FINISHED" if run.ok else "FAILED", end_time=round(run.ended * 1000))
    return f"run {new} of experiment {PROJECT}"


def to_trackio(run: EndedRun, where: str | None) -> str:
    """Write a run to a project of trackio, by default ``podtune``."""
    import trackio

    project = where or PROJECT
    if project in trackio.SQLiteStorage.get_projects():
        for old in trackio.Api().runs(project):
            if (old.config or {}).get(SOURCE) == run.source:
                old.delete()
    config = {**run.settings, SOURCE: run.source}
    # CPU and GPU of this machine are not those that trained
    trackio.init(project, name=run.name, config=config, auto_log_gpu=False, auto_log_cpu=False)
    for point in run.points:
        trackio.log(point.values, step=point.step)
    trackio.finish()
    return f"run {run.name} of project {project}"


TRACKERS: dict[str, Callable[[EndedRun, str | None], str]] = {
    "mlflow": to_mlflow,
    "tensorboard": to_tensorboard,
    "trackio": to_trackio,
}
