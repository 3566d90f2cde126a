"""A run as its job in a cluster tells it, in the shape of a run's folder. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from podtune.report.runs.runs import Run, timestamp
from podtune.run.job_snapshot import JobSnapshot
from podtune.run.record import SCHEMA, Json

ENDS = {"Succeeded": "ok", "Failed": "error"}


@dataclass(repr=False)
class JobRun(Run):
    """A run without a folder: ``path`` is namespace, kind and name of its job."""

    snapshot: JobSnapshot = field(kw_only=True)

    @cached_property
    def status(self) -> str:
        """As the record says once the job has ended; before, the job's condition, as ``pending``."""
        condition = self.snapshot.condition
        if condition not in ENDS:
            return condition.lower()
        recorded = str(self.record.get("status", "running"))
        return ENDS[condition] if recorded == "running" else recorded

    @property
    def over(self) -> bool:
        """True once the job has ended."""
        return self.snapshot.ended

    def last_step(self) -> tuple[int, float] | None:
        """The last step in the log, and when it was printed."""
        steps = self.entries.get("train")
        return (int(steps[-1]["step"]), timestamp(steps[-1]["time"])) if steps else None

    def patience_s(self) -> float:
        """Three times the longest pause between two of its lines; for ever while there are not two."""
        times = [timestamp(entry["time"]) for entry in self.entries.get("train", [])]
        return 3 * max((later - earlier for earlier, later in pairwise(times)), default=math.inf)


def job_runs(snapshot: JobSnapshot) -> list[JobRun]:
    """Runs of a job: one, or of a benchmark one for each record printed, and itself until it ends."""
    records = snapshot.records
    if snapshot.declared.get("mode") == "benchmark":
        succeeded = replace(snapshot, condition="Succeeded")
        cells = [_run(succeeded, record, str(record.get("name"))) for record in records]
        return cells + ([] if snapshot.ended and cells else [_run(snapshot, _known(snapshot))])
    return [_run(snapshot, records[-1] if records else _known(snapshot))]


def _run(snapshot: JobSnapshot, record: Json, name: str = "") -> JobRun:
    pods = [
        f"{pod.name} {pod.phase}"
        + (f" ({pod.restarts} restart{'s' if pod.restarts > 1 else ''})" if pod.restarts else "")
        for pod in snapshot.pods
    ]
    line = "" if snapshot.entries else snapshot.last_line.strip()
    silent = snapshot.unreachable
    return JobRun(
        path=Path(snapshot.namespace, snapshot.kind, snapshot.job),
        record=record,
        name=name or snapshot.job,
        entries=snapshot.entries,
        pods=[pod.name for pod in snapshot.pods],
        notes=[("pods", ", ".join(pods) or "none"), *([("log", line)] if line else [])],
        trouble=[
            *([f"{silent}; trying again, this is how it stood"] if silent else []),
            *map(str, snapshot.problems),
        ],
        snapshot=snapshot,
    )


def _known(snapshot: JobSnapshot) -> Json:
    """Describe a run without its record, from the manifest and its first log line."""
    head: Json = {
        key: snapshot.head[key] for key in ("strategy", "world_size", "nnodes") if key in snapshot.head
    }
    reason = (
        "; ".join(map(str, snapshot.problems)) or snapshot.message if snapshot.condition == "Failed" else ""
    )
    return {
        "schema": SCHEMA,
        "started_at": snapshot.started_at,
        "ended_at": snapshot.ended_at,
        "reason": reason,
        "config": {"max_steps": snapshot.max_steps},
        "measurements": {},
        **snapshot.declared,
        **head,
    }
