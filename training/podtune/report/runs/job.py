"""A run as its job in a cluster tells it (podtune.cluster.live.job_log), in the shape of a run's folder. No
torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from podtune.report.runs.runs import Run, timestamp
from podtune.report.runs.watch import View, machine_figures
from podtune.run.log_lines import per_pod
from podtune.run.record import SCHEMA, Json

ENDS = {"Succeeded": "ok", "Failed": "error"}


@dataclass
class JobRun(Run):
    """A run without a folder: ``path`` is namespace, kind and name of its job."""

    story: Json = field(default_factory=dict)

    @cached_property
    def status(self) -> str:
        """As the record says once the job has ended; before, the job's condition: pending, created, running,
        restarting, suspended.
        """
        condition = str(self.story["condition"])
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


def job_runs(story: Json) -> list[JobRun]:
    """Runs of a job: one, or of a benchmark one for each record printed, and itself until it ends."""
    records = story["records"]
    if story["declared"].get("mode") == "benchmark":
        cells = [
            _run({**story, "condition": "Succeeded"}, record, str(record.get("name"))) for record in records
        ]
        return cells + ([] if story["ended"] and cells else [_run(story, _known(story))])
    return [_run(story, records[-1] if records else _known(story))]


def _run(story: Json, record: Json, name: str = "") -> JobRun:
    path = Path(story["namespace"], story["kind"], story["name"])
    return JobRun(path, record, name or story["name"], story["entries"], story=story)


def _known(story: Json) -> Json:
    """Describe a run without its record, from the manifest and its first log line."""
    head = {key: story["head"][key] for key in ("strategy", "world_size", "nnodes") if key in story["head"]}
    reason = "; ".join(story["problems"]) or story["message"] if story["condition"] == "Failed" else ""
    return {
        "schema": SCHEMA,
        "started_at": story["started_at"],
        "ended_at": story["ended_at"],
        "reason": reason,
        "config": {"max_steps": story["max_steps"]},
        "measurements": {},
        **story["declared"],
        **head,
    }


class JobView(View):
    """A job while it goes on; ``look`` gives its story as it stands."""

    def __init__(self, look: Callable[[], Json]) -> None:
        self._look = look
        super().__init__(self._now())

    def _now(self) -> JobRun:
        return job_runs(self._look())[-1]

    def update(self) -> None:
        """Ask again."""
        self.run = self._now()

    @property
    def story(self) -> Json:
        assert isinstance(self.run, JobRun)
        return self.run.story

    @property
    def over(self) -> bool:
        """True once the job has ended."""
        return bool(self.story["ended"])

    def machines(self) -> list[tuple[str, Json]]:
        """Each pod that exists, with what its log line says of its machine."""
        system = machine_figures(self.run)
        use = per_pod(system, int(self.run.record.get("nproc_per_node") or 1)) if system else []
        return list(zip((pod["name"] for pod in self.story["pods"]), use, strict=False))

    def facts(self, *, spark_width: int) -> list[tuple[str, str]]:
        """The run's, and its pods' phases."""
        pods = [
            f"{pod['name']} {pod['phase']}"
            + (f" ({pod['restarts']} restart{'s' if pod['restarts'] > 1 else ''})" if pod["restarts"] else "")
            for pod in self.story["pods"]
        ]
        facts = [*super().facts(spark_width=spark_width), ("pods", ", ".join(pods) or "none")]
        return (
            facts
            if self.run.entries or not self.story["last_line"]
            else [*facts, ("log", self.story["last_line"].strip())]
        )

    def warnings(self) -> list[str]:
        """The run's, what is wrong with its pods, and an API server that does not answer."""
        silent = (
            [f"{self.story['silent']}; trying again, this is how it stood"] if self.story["silent"] else []
        )
        return [*silent, *self.story["problems"], *super().warnings()]
