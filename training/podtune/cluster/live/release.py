"""A configuration of a sweep as a job in the cluster, its record copied from its logs to a folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from podtune.cluster.job.manifest import name_of
from podtune.cluster.live import submit
from podtune.cluster.live.client import Cluster
from podtune.cluster.live.errors import Unreachable
from podtune.cluster.live.follow import JobWatch, logs_of
from podtune.run.collect import collect
from podtune.run.errors import OK, SOFTWARE, NotFound
from podtune.run.files import write_atomically
from podtune.run.job_snapshot import JobStatus
from podtune.run.record import RUN_FILE, Json, write_json

PROBLEMS_FILE = "log.txt"


class Release:
    """The job of ``documents`` (the last of them), created if it is not there.

    Args:
        say: takes what keeps its pods from running, each line once.
        delete: delete the job, and what was made for it, once its record is copied.

    Raises:
        UserError: the cluster refuses it, or does not answer.
    """

    def __init__(
        self,
        cluster: Cluster,
        documents: list[Json],
        folder: Path,
        say: Callable[[str], None],
        *,
        delete: bool = False,
    ) -> None:
        self._cluster, self._folder, self._say, self._delete = cluster, folder, say, delete
        self._said = set[str]()
        self._name = name_of(documents[-1])
        if not cluster.exists(documents[-1]):
            submit.create(cluster, documents)
        self._watch = JobWatch(cluster, self._name)

    def poll(self, wait_s: float) -> int | None:
        """0 for a job that has succeeded, 70 for one that failed or was deleted, None for one that runs.

        An API server that is silent for a while is asked again.
        """
        time.sleep(wait_s)  # the API is asked again; nothing here can be waited on
        try:
            job = self._watch.look()
            self._copy(job)
        except Unreachable as error:
            self._tell(error.what)
            return None
        except NotFound as error:
            write_atomically(self._folder / PROBLEMS_FILE, f"{error.what}\n")
            return SOFTWARE
        if job.condition == "Failed":
            self._tell(f"podtune delete {self._name}, and the same sweep makes the job again")
        if not job.ended:
            return None
        if self._delete:
            self._remove()
        return OK if job.condition == "Succeeded" else SOFTWARE

    def end(self) -> None:
        """Leave it running; the same sweep comes back to it."""

    def _remove(self) -> None:
        """Delete the job and what was made for it, claims too."""
        with contextlib.suppress(NotFound):  # somebody else has deleted it
            job = self._cluster.job(self._name)
            submit.delete(self._cluster, job, submit.parts_of(self._cluster, job, volumes=True))

    def _copy(self, job: JobStatus) -> None:
        if job.ended and (records := collect(logs_of(self._cluster, self._name)).records):
            write_json(self._folder / RUN_FILE, records[-1])
        problems = [*map(str, job.problems)] or ([job.message] if job.condition == "Failed" else [])
        for line in [*problems, self._watch.unreachable]:
            self._tell(line)
        if problems:
            write_atomically(self._folder / PROBLEMS_FILE, "".join(f"{line}\n" for line in problems))

    def _tell(self, line: str) -> None:
        if line and line not in self._said:
            self._said.add(line)
            self._say(f"    {line}")
