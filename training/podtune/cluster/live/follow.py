"""Following a job: its condition, problems and the logs of all its pods as one stream, over API errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from podtune.cluster.job.manifest import Json, name_of
from podtune.cluster.job.pytorchjob import INIT_CONTAINER
from podtune.cluster.live.client import Cluster
from podtune.cluster.live.errors import Forbidden, Refused, Unreachable
from podtune.cluster.live.kinds import JOB_KINDS
from podtune.cluster.live.status import job_scene, status_in
from podtune.cluster.why.state import container_statuses
from podtune.run.errors import NotFound, UserError
from podtune.run.job_snapshot import JobStatus

Emit = Callable[[str, str], None]  # (who, line)

POLL_S = 1.0


class Unseen:
    """A filter of log lines that are new, when the log is asked for again from ``since`` on."""

    def __init__(self) -> None:
        self.since, self._at_since = "", set[str]()

    def text(self, line: str) -> str | None:
        """A line without its time, None if it was there before."""
        moment, _, text = line.partition(" ")
        # sinceTime has a resolution of a second: lines of that second come again
        if moment < self.since or line in self._at_since:
            return None
        self._at_since = {line} | ({seen for seen in self._at_since if seen[:19] == line[:19]})
        self.since = moment
        return text


class JobWatch:
    """One job, looked at again and again: its pods, and why the API server is silent, if it is."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self._name = cluster, name
        self.pods: list[Json] = []
        self.unreachable = ""
        self._last: JobStatus | None = None

    def look(self) -> JobStatus:
        """The job as it stands; as it stood, with ``unreachable``, while the API server is silent.

        Raises:
            UserError: there is no such job, it was deleted meanwhile, or the user may not read what is
                needed.
            Unreachable: no answer to the first look.
        """
        self.unreachable = ""
        try:
            scene = job_scene(self._cluster, self._cluster.job(self._name))
            self.pods, self._last = scene.pods, status_in(scene, self._cluster.namespace)
        except Unreachable as error:
            if self._last is None:
                raise
            self.unreachable = error.what
        except NotFound as error:
            if self._last is None:
                raise
            raise NotFound(f"the job {self._name!r} was deleted", where=self._cluster.namespace) from error
        return self._last


def follow(cluster: Cluster, name: str, emit: Emit) -> str:
    """Follow the job and the logs of its pods to its end; its condition.

    ``emit`` gets ("job", line) for conditions and problems and (pod, line) for logs, from several threads.

    Raises:
        UserError: the job does not exist, was deleted meanwhile, or its logs may not be read.
    """
    watch, over, forbidden = JobWatch(cluster, name), threading.Event(), list[Forbidden]()
    logs: dict[tuple[str, str], threading.Thread] = {}  # a pod that is made again keeps its name
    last, said = "", {""}
    try:
        while True:
            job = watch.look()
            condition = f"{job.condition}: {job.message}" if job.message else job.condition
            if condition != last:
                emit("job", condition)
                last = condition
            for line in (*map(str, job.problems), watch.unreachable and f"{watch.unreachable}; trying again"):
                if line not in said:
                    said.add(line)
                    emit("job", line)
            for pod in watch.pods:
                for status in container_statuses(pod):
                    key = name_of(pod), status["name"]
                    # the operator's own says only that it waits for the master
                    if key not in logs and status["name"] != INIT_CONTAINER:
                        words = (cluster, *key, emit, over, forbidden)
                        logs[key] = threading.Thread(target=_follow_log, args=words, daemon=True)
                        logs[key].start()
            if forbidden:
                raise forbidden[0]
            if job.ended:
                return job.condition
            time.sleep(POLL_S)
    finally:
        over.set()
        for log in logs.values():
            log.join(timeout=5)


def _follow_log(
    cluster: Cluster, pod: str, container: str, emit: Emit, over: threading.Event, forbidden: list[Forbidden]
) -> None:
    """Emit the log of a container until the job is over, each line once, over restarts and reconnects."""
    unseen, last = Unseen(), False
    while not last:
        last = over.is_set()
        try:
            for line in cluster.log_lines(pod, container=container, follow=not last, since=unseen.since):
                if (text := unseen.text(line)) is not None:
                    emit(pod, text)
        except Forbidden as error:
            forbidden.append(error)
            return
        except UserError:  # not started yet, gone, or the connection broke
            pass
        over.wait(POLL_S)


def log_of(cluster: Cluster, job: Json, pod: str) -> list[str]:
    """The log of a pod's training container; none where it has not begun, or is gone.

    Raises:
        Forbidden: the user may not read logs.
    """
    try:
        lines = cluster.log_lines(pod, container=JOB_KINDS[job["kind"]].container)
        return [line.partition(" ")[2] for line in lines]
    except Forbidden:
        raise
    except Refused:
        return []


def logs_of(cluster: Cluster, name: str) -> Iterator[str]:
    """Yield all lines of a job's training containers, pod after pod."""
    job = cluster.job(name)
    for pod in cluster.pods(job):
        yield from log_of(cluster, job, name_of(pod))
