"""Following a job: its condition, problems and the logs of all its pods as one stream, over API errors."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from podtune.cluster.job.manifest import Json, name_of
from podtune.cluster.job.pytorchjob import INIT_CONTAINER
from podtune.cluster.live.client import Cluster, connect
from podtune.cluster.live.errors import Refused
from podtune.cluster.live.job_log import JobWatch, Unseen
from podtune.cluster.live.kinds import JOB_KINDS
from podtune.cluster.why.state import container_statuses
from podtune.run.errors import UserError

Emit = Callable[[str, str], None]  # (who, line)

POLL_S = 1.0


def follow(cluster: Cluster, name: str, emit: Emit) -> str:
    """Follow the job and the logs of its pods to its end; its condition.

    ``emit`` gets ("job", line) for conditions and problems and (pod, line) for logs, from several threads.

    Raises:
        UserError: the job does not exist, or was deleted meanwhile.
    """
    watch, over = JobWatch(cluster, name), threading.Event()
    logs: dict[tuple[str, str], threading.Thread] = {}  # a pod that is made again keeps its name
    condition, said = "", {""}
    try:
        while True:
            job = watch.look()
            if job.condition != condition:
                condition = job.condition
                emit("job", f"{condition}: {job.message}" if job.message else condition)
            for line in (*map(str, job.problems), job.unreachable and f"{job.unreachable}; trying again"):
                if line not in said:
                    said.add(line)
                    emit("job", line)
            for pod in watch.pods:
                for status in container_statuses(pod):
                    key = name_of(pod), status["name"]
                    if key not in logs and status["name"] != INIT_CONTAINER:
                        words = (cluster, *key, emit, over)
                        logs[key] = threading.Thread(target=_follow_log, args=words, daemon=True)
                        logs[key].start()
            if job.ended:
                return condition
            time.sleep(POLL_S)
    finally:
        over.set()
        for log in logs.values():
            log.join(timeout=5)


def _follow_log(cluster: Cluster, pod: str, container: str, emit: Emit, over: threading.Event) -> None:
    """Emit the log of a container until the job is over, each line once, over restarts and reconnects."""
    unseen, last = Unseen(), False
    while not last:
        last = over.is_set()
        with contextlib.suppress(UserError):  # not started yet, gone, or the connection broke
            for line in cluster.log_lines(pod, container=container, follow=not last, since=unseen.since):
                if new := unseen.split(line):
                    emit(pod, new[1])
        over.wait(POLL_S)


def log_of(cluster: Cluster, job: Json, pod: str) -> list[str]:
    """The log of a pod's training container; none where it has not begun, or is gone."""
    with contextlib.suppress(Refused):
        lines = cluster.log_lines(pod, container=JOB_KINDS[job["kind"]].container)
        return [line.partition(" ")[2] for line in lines]
    return []


def logs_of(name: str, namespace: str = "") -> Iterator[str]:
    """Yield all lines of a job's training containers, pod after pod."""
    cluster = connect(namespace)
    job = cluster.job(name)
    for pod in cluster.pods(job):
        yield from log_of(cluster, job, name_of(pod))
