"""A job as the cluster has it: its status, and the scene from which `podtune why` finds the cause."""

from __future__ import annotations

import contextlib

from podtune.cluster.job.manifest import Json, dig, name_of
from podtune.cluster.live.client import Cluster
from podtune.cluster.live.errors import Refused
from podtune.cluster.why.causes import causes
from podtune.cluster.why.scene import Scene, about_of
from podtune.cluster.why.state import ENDS, container_statuses, phase, pod_status, queue_of, state
from podtune.run.errors import NotFound
from podtune.run.job_snapshot import JobStatus

TAIL_LINES = 500
BATCH_LABEL = "batch.kubernetes.io/job-name"


def job_scene(cluster: Cluster, job: Json) -> Scene:
    """The job and its pods; events are asked for only where something waits."""
    scene = Scene(name_of(job), jobs=[job], pods=cluster.pods(job))
    waits = not scene.pods and state(job)[0] not in ENDS
    if waits or any(phase(pod) == "Pending" for pod in scene.pods):
        _read_events(cluster, scene)
    return scene


def status_of(cluster: Cluster, job: Json) -> JobStatus:
    """A job's condition, its pods, and what is wrong with them."""
    return status_in(job_scene(cluster, job), cluster.namespace)


def status_in(scene: Scene, namespace: str) -> JobStatus:
    """The status of the scene's job."""
    (job,) = scene.jobs
    condition, message = state(job, scene.pods)
    status = dig(job, "status")
    return JobStatus(
        job=name_of(job),
        kind=job["kind"],
        namespace=namespace,
        condition=condition,
        message=message,
        started_at=status.get("startTime") or job["metadata"].get("creationTimestamp"),
        ended_at=status.get("completionTime"),
        pods=[pod_status(pod) for pod in scene.pods],
        problems=causes(scene),
    )


def scene_of(cluster: Cluster, name: str) -> Scene:
    """Everything that the cluster has of a job or pod; of the namespace's newest job if ``name`` is empty.

    Raises:
        NotFound: there is no such job or pod.
    """
    if not name:
        jobs = sorted(cluster.jobs(), key=lambda job: str(job["metadata"].get("creationTimestamp")))
        if not jobs:
            fix = "name a folder or a file, or another --namespace"
            raise NotFound("there are no jobs", where=f"namespace {cluster.namespace}", fix=fix)
        name = name_of(jobs[-1])
    scene = Scene(name)
    try:
        scene.jobs = [cluster.job(name)]
        scene.pods = cluster.pods(scene.jobs[0])
    except NotFound:
        if batch := cluster.get(cluster.path("batch/v1", "Job", name)):
            scene.jobs = [{**batch, "kind": "Job"}]
            scene.pods = cluster.pods_with(f"{BATCH_LABEL}={name}")
        elif pod := cluster.get(cluster.path("v1", "Pod", name)):
            scene.pods = [pod]
        else:
            raise
    _read_events(cluster, scene)
    for pod in scene.pods:
        for container in container_statuses(pod):
            # the log of the end that is to be explained, not that of the new start
            restarted = bool(dig(container, "lastState", "terminated"))
            with contextlib.suppress(Refused):  # it has not begun, or its log is gone
                lines = cluster.log_lines(
                    name_of(pod), container=container["name"], tail=TAIL_LINES, previous=restarted
                )
                scene.add_log(name_of(pod), "\n".join(lines))
    return scene


def _read_events(cluster: Cluster, scene: Scene) -> None:
    """Read the events about the job, its pods and claims, and Kueue's view, as far as they may be read."""
    volumes = [volume for pod in scene.pods for volume in dig(pod, "spec").get("volumes") or []]
    mounted = {dig(volume, "persistentVolumeClaim").get("claimName") for volume in volumes}
    with contextlib.suppress(Refused):
        claims = cluster.items(cluster.path("v1", "PersistentVolumeClaim"))
        scene.claims = [claim for claim in claims if name_of(claim) in mounted]
        for event in cluster.items(cluster.path("v1", "Event")):
            about = about_of(event)
            if about in mounted or about == scene.subject or about.startswith(f"{scene.subject}-"):
                scene.events.append(event)
    for job in filter(queue_of, scene.jobs):
        with contextlib.suppress(Refused):
            uid = job["metadata"]["uid"]
            scene.workloads = cluster.kueue("Workload", f"kueue.x-k8s.io/job-uid={uid}") or []
