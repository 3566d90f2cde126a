"""A run as its job in a cluster tells it, in the shape of a run's folder. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from podtune.report.runs.runs import Run, timestamp
from podtune.report.runs.watch import View, machine_figures
from podtune.run.job_snapshot import JobSnapshot
from podtune.run.log_lines import per_pod
from podtune.run.record import SCHEMA, Json

ENDS = {"Succeeded": "ok", "Failed": "error"}


@dataclass
class JobRun(Run):
    """A run without a folder: ``path`` is namespace, kind and name of its job."""

    snapshot: JobSnapshot = field(kw_only=True)

    @cached_property
    def status(self) -> str:
        """As the record says once the job has ended; before, the job's condition: pending, created, running,
        restarting, suspended.
        """
        condition = self.snapshot.condition
        if condition not in ENDS:
            return condition.lower()
        recorded = str(self.record.get("status", "running"))
        return ENDS[condition] if recorded == "running" else recorded

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
    path = Path(snapshot.namespace, snapshot.kind, snapshot.job)
    return JobRun(path, record, name or snapshot.job, snapshot.entries, snapshot=snapshot)


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


class JobView(View):
    """A job while it goes on; ``look`` gives it as it stands."""

    def __init__(self, look: Callable[[], JobSnapshot]) -> None:
        self._look = look
        super().__init__(self._now())

    def _now(self) -> JobRun:
        return job_runs(self._look())[-1]

    def update(self) -> None:
        """Ask again."""
        self.run = self._now()

    @property
    def snapshot(self) -> JobSnapshot:
        assert isinstance(self.run, JobRun)
        return self.run.snapshot

    @property
    def over(self) -> bool:
        """True once the job has ended."""
        return self.snapshot.ended

    def machines(self) -> list[tuple[str, Json]]:
        """Each pod that exists, with what its log line says of its machine."""
        system = machine_figures(self.run)
        use = per_pod(system, int(self.run.record.get("nproc_per_node") or 1)) if system else []
        return list(zip((pod.name for pod in self.snapshot.pods), use, strict=False))

    def facts(self, *, spark_width: int) -> list[tuple[str, str]]:
        """The run's, and its pods' phases."""
        pods = [
            f"{pod.name} {pod.phase}"
            + (f" ({pod.restarts} restart{'s' if pod.restarts > 1 else ''})" if pod.restarts else "")
            for pod in self.snapshot.pods
        ]
        facts = [*super().facts(spark_width=spark_width), ("pods", ", ".join(pods) or "none")]
        return (
            facts
            if self.run.entries or not self.snapshot.last_line
            else [*facts, ("log", self.snapshot.last_line.strip())]
        )

    def warnings(self) -> list[str]:
        """The run's, what is wrong with its pods, and an API server that does not answer."""
        silent = self.snapshot.unreachable
        stale = [f"{silent}; trying again, this is how it stood"] if silent else []
        return [*stale, *map(str, self.snapshot.problems), *super().warnings()]
