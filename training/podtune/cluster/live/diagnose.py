"""Diagnosis of pods that do not run: sentences from their status and events. Knows no API client."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from podtune.cluster.job.pytorchjob import QUEUE
from podtune.cluster.live.kinds import name_of
from podtune.run.errors import PEER_LOST, PREEMPTED
from podtune.run.job_snapshot import PodStatus

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
#: conditions of a Job between its end and the end of its pods
ENDING = ("SuccessCriteriaMet", "FailureTarget")
NOT_STARTED = {
    "CreateContainerConfigError": "create the Secret or ConfigMap named",
    "CreateContainerError": "the container could not start: kubectl describe pod",
    "RunContainerError": "the container could not start: kubectl describe pod",
}
PULLING = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull")


#: how much a problem explains: it is the cause; most likely it is; it follows from another; it has no words
CAUSE, LIKELY, SYMPTOM, BARE = range(4)


@dataclass(frozen=True)
class PodProblem:
    """One pod, what is wrong with it, and what to do."""

    pod: str
    reason: str  # Kubernetes' own word: OOMKilled, ImagePullBackOff, Unschedulable, ...
    text: str
    fix: str = ""
    grade: int = CAUSE
    at: str = ""  # RFC 3339, of a container that ended
    evidence: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.pod}: {self.text}" + (f" (fix: {self.fix})" if self.fix else "")


def state(job: Json, pods: Iterable[Json] = ()) -> tuple[str, str]:
    """A job's condition and its message.

    The condition is Created, Running, Restarting, Suspended, Succeeded or Failed; Pending before any.
    A TrainJob and a Job have none until they end: they run when one of their ``pods`` does.
    """
    conditions = [
        condition
        for condition in (job.get("status") or {}).get("conditions") or []
        if condition.get("status") == "True" and condition["type"] not in ENDING
    ]
    if not conditions:
        begun = any((pod.get("status") or {}).get("phase") != "Pending" for pod in pods)
        return ("Running" if begun else "Pending"), ""
    finished = [
        condition for condition in conditions if condition["type"] in ("Succeeded", "Failed", "Complete")
    ]
    latest = (finished or conditions)[-1]
    return ("Succeeded" if latest["type"] == "Complete" else latest["type"]), latest.get("message") or ""


def pod_status(pod: Json) -> PodStatus:
    """The status of a pod from its object."""
    restarts = sum(int(container.get("restartCount") or 0) for container in container_statuses(pod))
    return PodStatus(name_of(pod), _phase(pod), (pod.get("spec") or {}).get("nodeName"), restarts)


def _phase(pod: Json) -> str:
    """The pod's phase, or the word that says more: what it waits for, or how it ended."""
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    status = pod.get("status") or {}
    for container in container_statuses(pod):
        state_of_container = container.get("state") or {}
        waiting = state_of_container.get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            return str(waiting["reason"])
        terminated = state_of_container.get("terminated") or {}
        if terminated.get("exitCode"):
            return str(terminated.get("reason") or "Error")
    if status.get("phase") == "Pending" and any(
        condition.get("reason") == "Unschedulable" for condition in status.get("conditions") or []
    ):
        return "Unschedulable"
    return str(status.get("reason") or status.get("phase") or "Unknown")


def problems(pods: Iterable[Json], events: Sequence[Json]) -> list[PodProblem]:
    """Problems that keep each pod from running, or ended it; a cause before what it caused in peers."""
    found = [problem for pod in pods for problem in _of_pod(pod, events)]
    return sorted(found, key=lambda problem: (problem.grade, problem.at))


def in_a_queue(job: Json) -> str:
    """The queue of Kueue in which the job waits to be admitted; empty if it is in none, or runs."""
    queue = (job["metadata"].get("labels") or {}).get(QUEUE, "")
    return queue if state(job)[0] in ("Pending", "Suspended") else ""


def held_back(job: Json, workloads: Iterable[Json]) -> list[PodProblem]:
    """Kueue's reason for not admitting the job, from its Workloads."""
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
    return [PodProblem(name_of(job), "Queued", text, fix)]


def _of_pod(pod: Json, events: Sequence[Json]) -> Iterable[PodProblem]:
    name, status = name_of(pod), pod.get("status") or {}
    if reason := status.get("reason"):
        text, fix = TAKEN.get(reason, ("was refused by its node", "kubectl describe pod"))
        yield PodProblem(name, reason, f"{text}, {reason}: {status.get('message', '')}", fix)
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
            yield _unschedulable(name, condition.get("message") or "")
        if condition.get("type") == "DisruptionTarget" and not status.get("reason"):
            text, fix = TAKEN.get(condition.get("reason"), TAKEN["Evicted"])
            said = condition.get("message") or ""
            yield PodProblem(name, str(condition.get("reason")), f"{text}: {said}", fix)
    for container in container_statuses(pod):
        yield from _of_container(name, container)
    own = [event for event in events if (event.get("involvedObject") or {}).get("name") == name]
    mounting = [event for event in own if event.get("reason") in MOUNTING]
    mounted = any(event.get("reason") in ("Pulling", "Pulled", "Created") for event in own)
    if mounting and not mounted and status.get("phase") == "Pending":
        message = " ".join(str(mounting[-1].get("message")).split())[:400]
        yield PodProblem(name, mounting[-1]["reason"], message, MOUNTING[mounting[-1]["reason"]])
    if probe := next((event for event in own if "failed liveness probe" in str(event.get("message"))), None):
        text, fix = "the kubelet restarted the container for its liveness probe", "remove the probe"
        at, seen = str(probe.get("lastTimestamp") or ""), (str(probe["message"]),)
        yield PodProblem(name, "LivenessProbe", text, fix, LIKELY, at, seen)


RESUMES = "it resumes from its last checkpoint"
#: what takes a running pod away -> the sentence, and what to do
TAKEN = {
    "Evicted": ("was evicted", "ask for what it uses under `resources`; " + RESUMES),
    "EvictionByEvictionAPI": ("was evicted, as for a drained node", RESUMES),
    "DeletionByTaintManager": ("was evicted, as its node has a taint now", RESUMES),
    "TerminationByKubelet": ("was ended by its node", RESUMES),
    "Preempting": ("was preempted", "a higher priorityClassName, or wait; " + RESUMES),
    "PreemptionByScheduler": ("was preempted by a pod of higher priority", "a priorityClassName; " + RESUMES),
    "DeadlineExceeded": ("ran longer than activeDeadlineSeconds", "a longer deadline"),
    "NodeLost": ("was lost with its node", RESUMES),
    "OutOfmemory": ("found no memory on its node", "wait, or ask for less"),
    "OutOfcpu": ("found no CPU on its node", "wait, or ask for less"),
    "UnexpectedAdmissionError": ("was refused by its node, often for a device", "look at the device plugin"),
}
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
    return PodProblem(name, "Unschedulable", f"not scheduled, {what}{message}", fix)


def _of_container(pod: str, status: Json) -> Iterable[PodProblem]:
    container = status["name"]
    current = status.get("state") or {}
    waiting = current.get("waiting") or {}
    ended = current.get("terminated") or (status.get("lastState") or {}).get("terminated") or {}
    reason = waiting.get("reason")
    if reason in PULLING:
        fix = "check image.repository and image.tag, and image.pullSecrets for a private registry"
        yield PodProblem(pod, reason, f"{reason}: {status.get('image')}: {waiting.get('message', '')}", fix)
    elif reason in NOT_STARTED:
        yield PodProblem(pod, reason, f"{container}: {waiting.get('message', '')}", NOT_STARTED[reason])
    if ended.get("exitCode"):
        yield _ended(pod, container, ended, restarting=bool(waiting or current.get("running")))


def _ended(pod: str, container: str, ended: Json, *, restarting: bool) -> PodProblem:
    code, at = int(ended["exitCode"]), str(ended.get("finishedAt") or "")
    message = " ".join(str(ended.get("message") or "").split())
    reason = str(ended.get("reason") or "Error")
    if reason == "OOMKilled":
        fix = "raise resources.limits.memory, or lower the batch, the length, or shard with --strategy fsdp"
        what = f"{container} was killed for using more memory than its limit"
        return PodProblem(pod, "OOMKilled", what, fix, CAUSE, at)
    ours = re.match(rf"exit {code}: ", message)
    meaning = EXIT_CODES.get(code, "an error of the configuration or the input" if 64 <= code <= 78 else "")
    if reason in ("StartError", "ContainerCannotRun"):
        meaning = "it could not be started"
    text = f"{container} ended with exit code {code}"
    said = message[ours.end() if ours else 0 :][-1000:]
    text = f"{text}: {said}" if said else f"{text}: {meaning}" if meaning else text
    if said and meaning and code in EXIT_CODES:
        text = f"{text}; {meaning}"
    text += " (it has been started again)" if restarting else ""
    grade = SYMPTOM if code in (PREEMPTED, PEER_LOST) else CAUSE if said and (ours or code > 125) else BARE
    if code in (126, 127):
        grade = LIKELY
    fix = "correct command, or the image" if code in (126, 127, 128) else ""
    return PodProblem(pod, reason, text, fix, grade, at)


def container_statuses(pod: Json) -> list[Json]:
    """The statuses of the pod's containers, init containers first."""
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
