"""The scene of a job in a cluster: only jobs, pods, logs, events and claims are read."""

from __future__ import annotations

import contextlib
from typing import Any

from podtune.cluster.live.client import Cluster
from podtune.cluster.live.diagnose import container_statuses, in_a_queue
from podtune.cluster.live.errors import Refused
from podtune.cluster.live.kinds import name_of
from podtune.cluster.why.scene import Scene
from podtune.run.errors import NotFound

Json = dict[str, Any]

TAIL_LINES = 500
BATCH_LABEL = "batch.kubernetes.io/job-name"


def from_cluster(cluster: Cluster, name: str) -> Scene:
    """Read what the cluster has of a job or pod; of the namespace's newest job if ``name`` is empty.

    Raises:
        NotFound: there is no such job or pod.
    """
    scene = Scene(name or cluster.namespace)
    if not name:
        jobs = sorted(cluster.jobs(), key=lambda job: str(job["metadata"].get("creationTimestamp")))
        if not jobs:
            fix = "name a folder or a file, or another --namespace"
            raise NotFound("there are no jobs", where=f"namespace {cluster.namespace}", fix=fix)
        name = name_of(jobs[-1])
    _find(cluster, name, scene)
    with contextlib.suppress(Refused):
        events = cluster.items(cluster.path("v1", "Event"))
        claims = cluster.items(cluster.path("v1", "PersistentVolumeClaim"))
        mounted = {
            (volume.get("persistentVolumeClaim") or {}).get("claimName")
            for pod in scene.pods
            for volume in (pod.get("spec") or {}).get("volumes") or []
        }
        scene.claims = [claim for claim in claims if name_of(claim) in mounted]
        about = {*mounted, *map(name_of, scene.pods)}
        scene.events = [event for event in events if _is_about(event, name, about)]
    for job in scene.jobs:
        scene.workloads = cluster.workloads(job) if in_a_queue(job) else []
    for pod in scene.pods:
        _read_logs(cluster, pod, scene)
    return scene


def _find(cluster: Cluster, name: str, scene: Scene) -> None:
    """Find the job with its pods, or the one pod of that name."""
    try:
        job = cluster.job(name)
    except NotFound:
        batch = cluster.get(cluster.path("batch/v1", "Job", name))
        pod = cluster.get(cluster.path("v1", "Pod", name))
        if batch is None and pod is None:
            raise
        scene.jobs = [{**batch, "kind": "Job"}] if batch else []
        scene.pods = cluster.pods_with(f"{BATCH_LABEL}={name}") if batch else [pod or {}]
    else:
        scene.jobs, scene.pods = [job], cluster.pods(job)


def _is_about(event: Json, name: str, others: set[Any]) -> bool:
    about = str((event.get("involvedObject") or {}).get("name") or "")
    return about == name or about.startswith(f"{name}-") or about in others


def _read_logs(cluster: Cluster, pod: Json, scene: Scene) -> None:
    """The end of each container's log, of the attempt before where it was started again."""
    for status in container_statuses(pod):
        restarted = bool((status.get("lastState") or {}).get("terminated"))
        with contextlib.suppress(Refused):
            lines = cluster.log_lines(
                name_of(pod), container=status["name"], tail=TAIL_LINES, previous=restarted
            )
            scene.add_log(name_of(pod), "\n".join(lines))
