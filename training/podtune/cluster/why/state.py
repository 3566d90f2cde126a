"""States of jobs and pods as the API server gives them. Knows no API client."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from podtune.cluster.job.manifest import Json, dig, name_of
from podtune.cluster.job.pytorchjob import QUEUE
from podtune.run.job_snapshot import PodStatus
from podtune.run.log_lines import duration
from podtune.run.record import timestamp

#: conditions of a Job between its end and the end of its pods
ENDING = ("SuccessCriteriaMet", "FailureTarget")
ENDS = {"Succeeded": "Succeeded", "Failed": "Failed", "Complete": "Succeeded"}


def state(job: Json, pods: Iterable[Json] = ()) -> tuple[str, str]:
    """A job's condition and its message.

    The condition is Created, Running, Restarting, Suspended, Succeeded or Failed; Pending before any.
    A TrainJob and a Job have none until they end: they run when one of their ``pods`` does. The message of
    a TrainJob that runs is its progress, where the training reports it (feature gate TrainJobStatus).
    """
    conditions = [
        condition
        for condition in dig(job, "status").get("conditions") or []
        if condition.get("status") == "True" and condition["type"] not in ENDING
    ]
    if not conditions:
        runs = any(phase(pod) != "Pending" for pod in pods)
        return ("Running", _progress(job)) if runs else ("Pending", "")
    latest = ([condition for condition in conditions if condition["type"] in ENDS] or conditions)[-1]
    return ENDS.get(latest["type"], latest["type"]), latest.get("message") or ""


def _progress(job: Json) -> str:
    reported = dig(job, "status", "trainerStatus")
    percent, left_s = (reported.get(key) for key in ("progressPercentage", "estimatedRemainingSeconds"))
    if percent is None:
        return ""
    return f"{percent} % done" + (f", about {duration(left_s)} left" if left_s else "")


def queue_of(job: Json) -> str:
    """The queue of Kueue in which the job waits to be admitted; empty if it is in none, or runs."""
    queue = str(dig(job, "metadata", "labels").get(QUEUE, ""))
    return queue if state(job)[0] in ("Pending", "Suspended") else ""


def phase(pod: Json) -> str:
    """The pod's phase: Pending, Running, Succeeded or Failed."""
    return str(dig(pod, "status").get("phase") or "Unknown")


def pod_status(pod: Json) -> PodStatus:
    """The status of a pod; its phase, or the word that says more: what it waits for, or how it ended."""
    status = dig(pod, "status")
    word = str(status.get("reason") or phase(pod))
    if phase(pod) == "Pending" and any(
        condition.get("reason") == "Unschedulable" for condition in status.get("conditions") or []
    ):
        word = "Unschedulable"
    for container in container_statuses(pod):
        waits = dig(container, "state", "waiting").get("reason")
        ended = dig(container, "state", "terminated")
        if waits not in (None, "PodInitializing", "ContainerCreating"):
            word = str(waits)
        elif ended.get("exitCode"):
            word = str(ended.get("reason") or "Error")
    # the phase stays Running until the last container has ended
    if pod["metadata"].get("deletionTimestamp"):
        word = "Terminating"
    restarts = sum(int(container.get("restartCount") or 0) for container in container_statuses(pod))
    return PodStatus(name_of(pod), word, dig(pod, "spec").get("nodeName"), restarts, start_of(pod))


def start_of(pod: Json) -> dict[str, float]:
    """Seconds of each phase up to the start of the pod's containers, each from the end of the one before."""
    status, ends = dig(pod, "status"), {"created": pod["metadata"].get("creationTimestamp")}
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "True":
            ends["scheduled"] = condition.get("lastTransitionTime")
    begins = {
        status["name"]: dig(status, "state", "running").get("startedAt")
        or dig(status, "state", "terminated").get("startedAt")
        for status in container_statuses(pod)
    }
    # the image is pulled, and volumes are mounted, before the first container begins
    ends["images and volumes"] = next(iter(begins.values()), None)
    for container in status.get("initContainerStatuses") or []:
        ends[container["name"]] = dig(container, "state", "terminated").get("finishedAt")
    if status.get("initContainerStatuses"):
        ends["started"] = next((begins[each["name"]] for each in status.get("containerStatuses") or []), None)
    times = [(name, timestamp(at)) for name, at in ends.items() if at]
    return {name: at - before for (_, before), (name, at) in itertools.pairwise(times)}


def container_statuses(pod: Json) -> list[Json]:
    """The statuses of the pod's containers, init containers first."""
    status = dig(pod, "status")
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def ends_of(pod: Json) -> Iterator[Json]:
    """Yield the ends of the pod's containers, before a restart and now."""
    for status in container_statuses(pod):
        for when in ("lastState", "state"):
            if end := dig(status, when, "terminated"):
                yield end


def has_failed(pod: Json) -> bool:
    """True if a container of the pod has ended with an error, or the pod as a whole."""
    return phase(pod) == "Failed" or any(end.get("exitCode") for end in ends_of(pod))
