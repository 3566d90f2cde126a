"""Why a pod does not run, or no longer does: from its status and its events, as sentences. Knows no API
client.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from podtune.cluster.job.pytorchjob import QUEUE
from podtune.run.errors import PEER_LOST, PREEMPTED

Json = dict[str, Any]

EXIT_CODES = {
    PREEMPTED: "preempted after saving; it resumes when started again",
    PEER_LOST: "another pod or a collective was lost; it resumes when started again",
    137: "killed (SIGKILL)",
    139: "segmentation fault",
    134: "aborted",
    127: "the command was not found in the image",
    126: "the command could not be executed",
}
PULLING = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull")


@dataclass(frozen=True)
class PodProblem:
    """One pod, what is wrong with it, and what to do."""

    pod: str
    reason: str  # Kubernetes' own word: OOMKilled, ImagePullBackOff, Unschedulable, ...
    text: str
    fix: str = ""
    fatal: bool = True  # False: it may pass by itself


def state(job: Json) -> tuple[str, str]:
    """A job's condition and its message: Created, Running, Restarting, Suspended, Succeeded, Failed; Pending
    before any.
    """
    conditions = [
        condition
        for condition in (job.get("status") or {}).get("conditions") or []
        if condition.get("status") == "True"
    ]
    if not conditions:
        return "Pending", ""
    finished = [
        condition for condition in conditions if condition["type"] in ("Succeeded", "Failed", "Complete")
    ]
    latest = (finished or conditions)[-1]
    return ("Succeeded" if latest["type"] == "Complete" else latest["type"]), latest.get("message") or ""


def restarts(pod: Json) -> int:
    """Restarts of the pod's containers."""
    return sum(int(container.get("restartCount") or 0) for container in _statuses(pod))


def phase(pod: Json) -> str:
    """The pod's phase, or the word that says more: what it waits for, or how it ended."""
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    status = pod.get("status") or {}
    for container in _statuses(pod):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            return str(waiting["reason"])
        terminated = (container.get("state") or {}).get("terminated") or {}
        if terminated.get("exitCode"):
            return str(terminated.get("reason") or "Error")
    if status.get("phase") == "Pending" and any(
        condition.get("reason") == "Unschedulable" for condition in status.get("conditions") or []
    ):
        return "Unschedulable"
    return str(status.get("reason") or status.get("phase") or "Unknown")


def problems(pods: Iterable[Json], events: Iterable[Json]) -> list[PodProblem]:
    """What keeps each pod from running, or ended it; the cause first where one pod's end explains the
    others'.
    """
    events_read = list(events)
    problems_of_pods = [problem for pod in pods for problem in _of_pod(pod, events_read)]
    return sorted(problems_of_pods, key=lambda problem: problem.text.endswith(EXIT_CODES[PEER_LOST]))


def in_a_queue(job: Json) -> str:
    """The queue of Kueue in which the job waits to be admitted; empty if it is in none, or runs."""
    queue = (job["metadata"].get("labels") or {}).get(QUEUE, "")
    return queue if state(job)[0] in ("Pending", "Suspended") else ""


def held_back(job: Json, workloads: Iterable[Json]) -> list[PodProblem]:
    """Why Kueue has not admitted the job, from what it keeps of it."""
    conditions = [
        condition
        for workload in workloads
        for condition in (workload.get("status") or {}).get("conditions") or []
    ]
    reasons = [
        str(condition.get("message"))
        for condition in conditions
        if condition["type"] == "QuotaReserved" and condition["status"] == "False"
    ]
    if not reasons:
        return []
    fix = "it starts by itself when the queue has room for all of it"
    if "maximum capacity" in reasons[-1]:
        fix = "the queue's quota is less than the job: ask for less under `resources` and `prepare.resources`"
    elif "exist" in reasons[-1] or "inactive" in reasons[-1]:
        fix = "`podtune doctor --cluster` lists the queues of the namespace"
    text = f"waits in the queue {in_a_queue(job)} of Kueue: {reasons[-1]}"
    return [PodProblem(job["metadata"]["name"], "Queued", text, fix, fatal=False)]


def _of_pod(pod: Json, events: list[Json]) -> Iterable[PodProblem]:
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    if status.get("reason") in ("Evicted", "DeadlineExceeded", "NodeLost", "Preempting", "OutOfmemory"):
        yield PodProblem(
            name,
            status["reason"],
            f"{status['reason']}: {status.get('message', '')}",
            "it resumes from its last checkpoint",
        )
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
            yield _unschedulable(name, condition.get("message") or "")
    for container in _statuses(pod):
        yield from _of_container(name, container)
    mounting = [
        event
        for event in events
        if (event.get("involvedObject") or {}).get("name") == name and event.get("reason") in MOUNTING
    ]
    if mounting and status.get("phase") == "Pending":
        message = " ".join(str(mounting[-1].get("message")).split())[:400]
        yield PodProblem(name, mounting[-1]["reason"], message, MOUNTING[mounting[-1]["reason"]], fatal=False)


MOUNTING = {
    "FailedMount": "check that the claim, ConfigMap or Secret named exists and is bound: kubectl get pvc",
    "FailedAttachVolume": (
        "a ReadWriteOnce volume is attached to one node at a time: use ReadWriteMany, or one pod"
    ),
    "FailedCreatePodSandBox": "look at the node's network: kubectl describe pod",
}


def _unschedulable(name: str, message: str) -> PodProblem:
    missing = re.findall(r"Insufficient ([\w./-]+)", message)
    fix = "wait, or ask for less under `resources`"
    if any("gpu" in reason for reason in missing):
        fix = (
            "no node has so many free GPUs: wait, ask for fewer, or check that the GPU operator runs on "
            "the nodes"
        )
    elif "persistentvolumeclaim" in message.lower() or "PersistentVolume" in message:
        fix = "the claim is not bound: kubectl get pvc shows why"
    elif "taint" in message:
        fix = "add the taint named to `tolerations`"
    elif "affinity" in message or "selector" in message:
        fix = "no node carries the labels of `nodeSelector` or `affinity`"
    what = f"missing {', '.join(sorted(set(missing)))}: " if missing else ""
    return PodProblem(name, "Unschedulable", f"not scheduled, {what}{message}", fix, fatal=False)


def _of_container(pod: str, status: Json) -> Iterable[PodProblem]:
    container = status["name"]
    current = status.get("state") or {}
    waiting = current.get("waiting") or {}
    ended = current.get("terminated") or (status.get("lastState") or {}).get("terminated") or {}
    reason = waiting.get("reason")
    if reason in PULLING:
        fix = "check image.repository and image.tag, and image.pullSecrets for a private registry"
        yield PodProblem(pod, reason, f"{reason}: {status.get('image')}: {waiting.get('message', '')}", fix)
    elif reason == "CreateContainerConfigError":
        yield PodProblem(
            pod,
            reason,
            f"{container}: {waiting.get('message', '')}",
            "create the Secret or ConfigMap named",
        )
    elif reason in ("CreateContainerError", "RunContainerError"):
        yield PodProblem(
            pod,
            reason,
            f"{container}: {waiting.get('message', '')}",
            "the container could not start: kubectl describe pod",
        )
    if ended and ended.get("exitCode"):
        yield _ended(pod, container, ended, restarting=bool(waiting or current.get("running")))


def _ended(pod: str, container: str, ended: Json, *, restarting: bool) -> PodProblem:
    code = int(ended["exitCode"])
    message = " ".join(str(ended.get("message") or "").split())
    if ended.get("reason") == "OOMKilled":
        fix = "raise resources.limits.memory, or lower the batch, the length, or shard with --strategy fsdp"
        what = f"{container} was killed for using more memory than its limit"
        return PodProblem(pod, "OOMKilled", what, fix)
    meaning = EXIT_CODES.get(code) or (
        ("an error of the configuration or the input") if 64 <= code <= 78 else ""
    )
    if ended.get("reason") == "StartError":
        meaning = "it could not be started"
    text = f"{container} ended with exit code {code}"
    said = re.sub(r"^exit \d+: ", "", message)[-1000:]
    text = f"{text}: {said}" if said else f"{text}: {meaning}" if meaning else text
    if said and meaning and code in EXIT_CODES:
        text = f"{text}; {meaning}"
    return PodProblem(
        pod,
        str(ended.get("reason") or "Error"),
        text + (" (it has been started again)" if restarting else ""),
        "",
        not restarting,
    )


def _statuses(pod: Json) -> list[Json]:
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
