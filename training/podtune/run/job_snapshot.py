"""A job in a cluster at one moment, made by cluster/live/job_log.py and shown by report/runs/job.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class PodStatus:
    """A pod as `kubectl get pods` shows it; ``phase`` is the word that says most."""

    name: str
    phase: str
    node: str | None  # None before it is scheduled
    restarts: int


@dataclass(frozen=True)
class JobSnapshot:
    """A job's condition, its pods, and its run as far as the first pod's log tells."""

    name: str
    kind: str
    namespace: str
    condition: str
    message: str
    ended: bool
    started_at: str | None
    ended_at: str | None
    pods: list[PodStatus]
    problems: list[str]
    declared: Json  # the keys of a record that the job's manifest gives
    head: Json  # the entry of the log's head line
    max_steps: int | None
    entries: dict[str, list[Json]]  # of metrics.jsonl, by split
    last_line: str
    records: list[Json]  # those that were printed, once the job has ended; of a benchmark always
    unreachable: str = ""  # why this is not the newest state, if the API server does not answer
