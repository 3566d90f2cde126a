"""A job's status with its pods and problems, for ``podtune status``, ``logs --follow`` and ``watch``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from podtune.cluster.live.client import Cluster
from podtune.cluster.live.diagnose import PodProblem, held_back, in_a_queue, pod_status, problems, state
from podtune.cluster.live.kinds import name_of
from podtune.run.job_snapshot import PodStatus

Json = dict[str, Any]

ENDED = ("Succeeded", "Failed")
WARNINGS = 5


@dataclass(frozen=True)
class JobStatus:
    """A job's condition, each pod, and what is wrong; as JSON the output of ``podtune status``."""

    schema: str
    job: str
    kind: str
    namespace: str
    condition: str
    message: str
    started_at: str | None
    ended_at: str | None
    pods: list[PodStatus]
    problems: list[PodProblem]
    warnings: list[str]


def status_of(cluster: Cluster, job: Json) -> JobStatus:
    """Ask for the job's pods and events."""
    pods = cluster.pods(job)
    condition, message = state(job, pods)
    status = job.get("status") or {}
    warnings = [event for event in cluster.events(_names(job, pods)) if event.get("type") == "Warning"]
    return JobStatus(
        schema="podtune.status/1",
        job=name_of(job),
        kind=job["kind"],
        namespace=cluster.namespace,
        condition=condition,
        message=message,
        started_at=status.get("startTime"),
        ended_at=status.get("completionTime"),
        pods=[pod_status(pod) for pod in pods],
        problems=problems_of(cluster, job, pods),
        warnings=[" ".join(str(event.get("message")).split())[:300] for event in warnings[-WARNINGS:]],
    )


def problems_of(cluster: Cluster, job: Json, pods: list[Json]) -> list[PodProblem]:
    """Reasons why the job does not run, or no longer does.

    Events and Kueue are asked only where they can say it.
    """
    held = held_back(job, cluster.workloads(job)) if in_a_queue(job) else []
    waiting = any((pod.get("status") or {}).get("phase") == "Pending" for pod in pods)
    return held + problems(pods, cluster.events(_names(job, pods)) if waiting else [])


def _names(job: Json, pods: list[Json]) -> list[str]:
    return [name_of(job), *map(name_of, pods)]
