"""Following a job: its condition, problems and the logs of all its pods as one stream, over API errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from podtune.cluster.job.pytorchjob import INIT_CONTAINER
from podtune.cluster.live.client import Cluster, connect
from podtune.cluster.live.diagnose import container_statuses, state
from podtune.cluster.live.errors import Refused, Unreachable
from podtune.cluster.live.kinds import JOB_KINDS, name_of
from podtune.cluster.live.status import ENDED, problems_of
from podtune.run.errors import NotFound, UserError

Json = dict[str, Any]
Emit = Callable[[str, str], None]  # (who, line)

POLL_S = 1.0
LAST_LINES = 20


class Unseen:
    """A filter of log lines that are new, when the log is asked for again from ``since`` on."""

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
        self._cluster, self._pod, self._container = cluster, pod, container
        self._emit, self._done = emit, done
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


class JobFollower:
    """A job and the logs of its pods until the job has ended.

    ``emit`` gets ("job", line) for conditions and problems and (pod, line) for logs, from several threads.
    """

    def __init__(self, cluster: Cluster, name: str, emit: Emit) -> None:
        self._cluster, self._name, self._emit = cluster, name, emit
        self._logs: dict[tuple[str, str], LogFollower] = {}  # by uid of the pod and container
        self._pod_ended: dict[str, threading.Event] = {}  # by uid of the pod
        self._emitted: set[str] = set()
        self._condition, self._unreachable = "", False

    def run(self) -> str:
        """Follow the job to its end; its condition.

        Raises:
            UserError: the job does not exist, or was deleted meanwhile.
        """
        try:
            while True:
                try:
                    self._poll()
                except Unreachable as error:
                    if not self._unreachable:
                        self._emit("job", f"{error.what}; trying again")
                        self._unreachable = True
                except NotFound as error:
                    if not self._condition:
                        raise
                    what = f"the job {self._name!r} was deleted"
                    raise NotFound(what, where=self._cluster.namespace) from error
                if self._condition in ENDED:
                    return self._condition
                time.sleep(POLL_S)
        finally:
            for end in self._pod_ended.values():
                end.set()
            for log in self._logs.values():
                log.thread.join(timeout=5)

    def _poll(self) -> None:
        job = self._cluster.job(self._name)
        pods = self._cluster.pods(job)
        if self._unreachable:
            self._emit("job", "the API server answers again")
            self._unreachable = False
        condition, message = state(job, pods)
        if condition != self._condition:
            self._emit("job", f"{condition}{f': {message}' if message else ''}")
        for pod in pods:
            self._follow_pod(pod)
        for problem in map(str, problems_of(self._cluster, job, pods)):
            if problem not in self._emitted:
                self._emitted.add(problem)
                self._emit("job", problem)
        self._condition = condition

    def _follow_pod(self, pod: Json) -> None:
        """Start to follow the containers that have begun."""
        uid = pod["metadata"]["uid"]
        end = self._pod_ended.setdefault(uid, threading.Event())
        for status in container_statuses(pod):
            container = status["name"]
            begun = any(key in (status.get("state") or {}) for key in ("running", "terminated"))
            if begun and (uid, container) not in self._logs and container != INIT_CONTAINER:
                log = LogFollower(self._cluster, name_of(pod), container, self._emit, end)
                self._logs[uid, container] = log
        if (pod.get("status") or {}).get("phase") in ENDED:
            end.set()


def last_lines(cluster: Cluster, job: Json, pod: str, count: int = LAST_LINES) -> list[str]:
    """The end of a pod's training container's log (all for 0).

    It is that of the run before if the container has just been started again.
    """
    container = JOB_KINDS[job["kind"]].container
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
    """Yield all lines of a job's training containers, pod after pod."""
    cluster = connect(namespace)
    job = cluster.job(name)
    for pod in cluster.pods(job):
        yield from last_lines(cluster, job, name_of(pod), 0)
