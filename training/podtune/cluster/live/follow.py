"""Following a job: its condition, its warnings and the logs of all its pods as one stream, through restarts
and API errors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from podtune.cluster.job import pytorchjob as contract
from podtune.cluster.job import trainjob
from podtune.cluster.live.client import Cluster, Refused, Unreachable, connect
from podtune.cluster.live.diagnose import PodProblem, held_back, in_a_queue, phase, problems, state
from podtune.run.errors import NO_INPUT, NotFound, UserError

Json = dict[str, Any]
Emit = Callable[[str, str], None]  # (who, line)

POLL_S = 1.0
LAST_LINES = 20
ENDED = ("Succeeded", "Failed")
TRAINING_CONTAINER = {"PyTorchJob": contract.CONTAINER, "TrainJob": trainjob.NODE}


class Unseen:
    """Which lines of a log are new, when it is asked for again from ``since`` on."""

    def __init__(self) -> None:
        self.since, self._at_since = "", set[str]()

    def split(self, line: str) -> tuple[str, str] | None:
        """A line's time and text, None if it was there before."""
        moment, _, text = line.partition(" ")
        # sinceTime has a resolution of a second: lines of that second come again
        if moment < self.since or line in self._at_since:
            return None
        self._at_since = {line} | ({seen for seen in self._at_since if seen[:19] == line[:19]})
        self.since = moment
        return moment, text


class LogFollower:
    """The log of one container from its beginning to the end of its pod, each line once, over reconnects."""

    def __init__(self, cluster: Cluster, pod: str, container: str, emit: Emit, done: threading.Event) -> None:
        self._cluster, self._pod, self._container, self._emit, self._done = (
            cluster,
            pod,
            container,
            emit,
            done,
        )
        self._unseen = Unseen()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            last = self._done.is_set()
            try:
                for line in self._cluster.log_lines(
                    self._pod, container=self._container, follow=not last, since=self._unseen.since
                ):
                    if new := self._unseen.split(line):
                        self._emit(self._pod, new[1])
            except UserError:
                pass  # not started yet, gone, or the connection broke: asked again from the last line on
            if last:
                return
            self._done.wait(POLL_S)


def follow(cluster: Cluster, name: str, emit: Emit) -> str:
    """Print what happens until the job has ended; returns its condition.

    ``emit`` gets ("job", line) for conditions and problems and (pod, line) for logs, from several threads.

    Raises:
        UserError: the job does not exist, or was deleted meanwhile.
    """
    followers: dict[tuple[str, str], LogFollower] = {}
    ends: dict[str, threading.Event] = {}
    emitted: set[str] = set()
    condition, silent = "", False
    try:
        while True:
            try:
                job = cluster.job(name)
                pods = cluster.pods(job)
                if silent:
                    emit("job", "the API server answers again")
                    silent = False
                now, message = state(job)
                if now != condition:
                    emit("job", f"{now}{f': {message}' if message else ''}")
                    condition = now
                _follow_pods(cluster, pods, followers, ends, emit)
                _tell(cluster, job, pods, emitted, emit)
                if condition in ENDED:
                    return condition
            except Unreachable as error:
                if not silent:
                    emit("job", f"{error.what}; trying again")
                    silent = True
            except UserError as error:
                if error.code != NO_INPUT or not condition:
                    raise
                raise NotFound(f"the job {name!r} was deleted", where=cluster.namespace) from error
            time.sleep(POLL_S)
    finally:
        for end in ends.values():
            end.set()
        for follower in followers.values():
            follower.thread.join(timeout=5)


def _follow_pods(
    cluster: Cluster,
    pods: list[Json],
    followers: dict[tuple[str, str], LogFollower],
    ends: dict[str, threading.Event],
    emit: Emit,
) -> None:
    for pod in pods:
        uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        status = pod.get("status") or {}
        end = ends.setdefault(uid, threading.Event())
        for container in [
            *(status.get("initContainerStatuses") or []),
            *(status.get("containerStatuses") or []),
        ]:
            begun = any(key in (container.get("state") or {}) for key in ("running", "terminated"))
            if begun and (uid, container["name"]) not in followers and container["name"] != "init-pytorch":
                followers[uid, container["name"]] = LogFollower(cluster, name, container["name"], emit, end)
        if status.get("phase") in ENDED:
            end.set()


def _tell(cluster: Cluster, job: Json, pods: list[Json], emitted: set[str], emit: Emit) -> None:
    for problem in problems_of(cluster, job, pods):
        line = sentence(problem)
        if line not in emitted:
            emitted.add(line)
            emit("job", line)


def problems_of(cluster: Cluster, job: Json, pods: list[Json]) -> list[PodProblem]:
    """Why the job does not run, or no longer does; events and Kueue are asked only where they can say it."""
    held = held_back(job, cluster.workloads(job)) if in_a_queue(job) else []
    waiting = any((pod.get("status") or {}).get("phase") == "Pending" for pod in pods)
    names = [job["metadata"]["name"], *(pod["metadata"]["name"] for pod in pods)]
    return held + problems(pods, cluster.events(names) if waiting else [])


def sentence(problem: PodProblem) -> str:
    """The problem as one line."""
    return f"{problem.pod}: {problem.text}" + (f" (fix: {problem.fix})" if problem.fix else "")


def summary(cluster: Cluster, job: Json) -> Json:
    """``podtune status``: the condition, each pod, and what is wrong."""
    pods = cluster.pods(job)
    names = [job["metadata"]["name"], *(pod["metadata"]["name"] for pod in pods)]
    condition, message = state(job)
    events = cluster.events(names)
    warnings = [event for event in events if event.get("type") == "Warning"]
    return {
        "schema": "podtune.status/1",
        "job": job["metadata"]["name"],
        "kind": job["kind"],
        "namespace": cluster.namespace,
        "condition": condition,
        "message": message,
        "started_at": (job.get("status") or {}).get("startTime"),
        "ended_at": (job.get("status") or {}).get("completionTime"),
        "pods": [
            {
                "name": pod["metadata"]["name"],
                "phase": phase(pod),
                "node": (pod.get("spec") or {}).get("nodeName"),
                "restarts": sum(
                    int(container.get("restartCount") or 0)
                    for container in (pod.get("status") or {}).get("containerStatuses") or []
                ),
            }
            for pod in pods
        ],
        "problems": [
            {"pod": problem.pod, "reason": problem.reason, "text": problem.text, "fix": problem.fix}
            for problem in problems_of(cluster, job, pods)
        ],
        "warnings": [" ".join(str(event.get("message")).split())[:300] for event in warnings[-5:]],
    }


def last_lines(cluster: Cluster, job: Json, pod: str, count: int = LAST_LINES) -> list[str]:
    """The end of a pod's training container's log (all for 0), of the run before if the container has just
    been started again.
    """
    container = TRAINING_CONTAINER[job["kind"]]
    for previous in (False, True):
        try:
            lines = [
                line.partition(" ")[2]
                for line in cluster.log_lines(pod, container=container, tail=count, previous=previous)
            ]
        except Refused:
            continue
        if lines:
            return lines
    return []


def logs_of(name: str, namespace: str = "") -> Iterator[str]:
    """All lines of all training containers of a job, pod after pod, for ``podtune collect --job``."""
    cluster = connect(namespace)
    job = cluster.job(name)
    for pod in cluster.pods(job):
        yield from last_lines(cluster, job, pod["metadata"]["name"], 0)
