"""A finished run written to MLflow, TensorBoard or trackio, from run.json and metrics.jsonl. Needs no torch.

A run that was written before is replaced, so that repeating it adds nothing twice. Metrics are called
``split/name``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from podtune.run.errors import DataError
from podtune.run.follow import read_record
from podtune.run.metrics_log import read_metrics
from podtune.run.record import METRICS_FILE, RUN_FILE, Json

NOT_METRICS = ("time", "step", "split")
PROJECT = "podtune"
SOURCE_TAG = "podtune.folder"


@dataclass(frozen=True)
class Point:
    """One line of metrics.jsonl: seconds since 1970, the step and the figures."""

    time: float
    step: int
    values: dict[str, float]


@dataclass(frozen=True)
class FinishedRun:
    """What a tracker is told of a run."""

    folder: Path
    name: str
    status: str
    started: float
    ended: float
    settings: dict[str, str]
    points: list[Point]


def read_run(folder: Path) -> FinishedRun:
    """Read a run's files.

    Raises:
        DataError: run.json is no record, or the run has not ended.
    """
    record = read_record(folder)
    if record is None or not record.get("ended_at"):
        what = "this run has not ended" if record else "this record cannot be read"
        raise DataError(what, where=str(folder / RUN_FILE), fix="`report_to` writes while a run trains")
    metrics = folder / METRICS_FILE
    entries = read_metrics(metrics)[0] if metrics.exists() else []
    return FinishedRun(
        folder,
        str(record.get("name") or folder.name),
        str(record["status"]),
        _seconds(record["started_at"]),
        _seconds(record["ended_at"]),
        {key: str(value) for key, value in record.get("config", {}).items() if value is not None},
        [_point(entry) for entry in entries],
    )


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


def _point(entry: Json) -> Point:
    figures = {
        f"{entry['split']}/{name}": float(value)
        for name, value in entry.items()
        if name not in NOT_METRICS and isinstance(value, int | float)
    }
    return Point(_seconds(entry["time"]), entry["step"], figures)


def to_tensorboard(run: FinishedRun, where: str | None) -> str:
    """Write event files of a run to a folder of its own, by default ``tensorboard`` in its folder."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = Path(where, run.name) if where else run.folder / "tensorboard"
    shutil.rmtree(folder, ignore_errors=True)
    writer = EventFileWriter(str(folder))
    for point in run.points:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        writer.add_event(Event(wall_time=point.time, step=point.step, summary=Summary(value=values)))
    writer.close()
    return str(folder)


def to_mlflow(run: FinishedRun, where: str | None) -> str:
    """Write a run to a tracking URI, by default MLflow's own, in the experiment ``podtune``."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient(tracking_uri=where)
    experiment = client.get_experiment_by_name(PROJECT)
    number = experiment.experiment_id if experiment else client.create_experiment(PROJECT)
    source = str(run.folder.resolve())
    for old in client.search_runs([number]):
        if old.data.tags.get(SOURCE_TAG) == source:
            client.delete_run(old.info.run_id)
    new = client.create_run(number, start_time=round(run.started * 1000), run_name=run.name).info.run_id
    client.set_tag(new, SOURCE_TAG, source)
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
    status = "FINISHED" if run.status == "ok" else "FAILED"
    client.set_terminated(new, status, end_time=round(run.ended * 1000))
    return f"run {new} of experiment {PROJECT}"


def to_trackio(run: FinishedRun, where: str | None) -> str:
    """Write a run to a project of trackio, by default ``podtune``."""
    import trackio

    project = where or PROJECT
    if project in trackio.SQLiteStorage.get_projects():
        for old in trackio.Api().runs(project):
            if old.name == run.name:
                old.delete()
    trackio.init(project, name=run.name, config=dict(run.settings), auto_log_gpu=False, auto_log_cpu=False)
    for point in run.points:
        trackio.log(point.values, step=point.step)
    trackio.finish()
    return f"run {run.name} of project {project}"


TRACKERS: dict[str, Callable[[FinishedRun, str | None], str]] = {
    "mlflow": to_mlflow,
    "tensorboard": to_tensorboard,
    "trackio": to_trackio,
}
