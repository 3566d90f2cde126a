"""A run as the pods of its job tell it: its record if they printed it, else its progress.

``podtune watch`` and ``podtune runs --cluster`` show a snapshot like a run's folder. Only jobs, pods, their
logs and events are read: the rights of docs/cluster.md, no exec and no volume.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from podtune.cluster.job.manifest import Json, name_of
from podtune.cluster.job.pods import pods_of
from podtune.cluster.live.client import Cluster
from podtune.cluster.live.errors import Forbidden, Refused, Unreachable
from podtune.cluster.live.kinds import JOB_KINDS
from podtune.cluster.live.status import job_scene, status_in
from podtune.cluster.why.scene import Scene
from podtune.run.collect import collect
from podtune.run.errors import MARKER, DataError, NotFound
from podtune.run.job_snapshot import JobSnapshot, JobStatus
from podtune.run.log_lines import parse

TAIL_LINES = 1000  # of each log that a list looks at; a record takes a handful of lines
AT_ONCE = 8  # jobs of a list that are asked for at the same time


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


@dataclass
class RunLog:
    """A run's log, line by line: the last head and start, entries by split, and the records' lines."""

    head: Json = field(default_factory=dict)
    max_steps: int | None = None
    entries: dict[str, list[Json]] = field(default_factory=dict)
    last_line: str = ""
    _record_lines: list[str] = field(default_factory=list)

    def see(self, moment: str, line: str) -> None:
        """Take up a line and its RFC 3339 time."""
        if MARKER in line:
            self._record_lines.append(line)
        elif line.strip():
            self.last_line = line
        for entry in parse(line):
            split = entry["split"]
            if split == "head":
                self.head = entry
            elif split == "start":
                self.max_steps = entry["max_steps"]
                self._back_to(entry["step"])
            else:
                self.max_steps = entry.pop("max_steps", self.max_steps)
                self.entries.setdefault(split, []).append({"time": moment, **entry})

    def _back_to(self, step: int) -> None:
        """A resumed run repeats the steps after its checkpoint."""
        self.entries = {
            split: [entry for entry in entries if entry["step"] <= step]
            for split, entries in self.entries.items()
        }
        self._record_lines.clear()

    def records(self) -> list[Json]:
        """The records that were printed, each exact; damaged ones are left out."""
        return collect(self._record_lines).records


def declared(job: Json) -> Json:
    """The keys of a record that the job's manifest gives: mode, strategy, pods and processes."""
    # numbers and command are the job's own, whatever runtime a TrainJob refers to
    known = {**job, "spec": {**job["spec"], "runtimeRef": {"name": "torch-distributed"}}}
    try:
        pods = pods_of(known, [])
    except DataError:
        return {}
    keys: Json = {"nnodes": len(pods)}
    processes = pods[0].variables.get("PET_NPROC_PER_NODE", "")
    if processes.isdigit():
        keys |= {"nproc_per_node": int(processes), "world_size": len(pods) * int(processes)}
    containers = pods[0].spec.get("containers") or []
    words = [str(word) for each in containers for word in (*each.get("command", ()), *each.get("args", ()))]
    if "podtune.training" in words:
        keys["mode"] = "sft"
    elif "bench" in words or "podtune.benchmark" in words:
        keys["mode"] = "benchmark"
    if "--strategy" in words[:-1]:
        keys["strategy"] = words[words.index("--strategy") + 1]
    return keys


def snapshot(job: Json, status: JobStatus, log: RunLog) -> JobSnapshot:
    """Put together the job's status and what its log says."""
    keys = declared(job)
    return JobSnapshot(
        **vars(status),
        declared=keys,
        head=log.head,
        max_steps=log.max_steps,
        entries=log.entries,
        last_line=log.last_line,
        records=log.records() if status.ended or keys.get("mode") == "benchmark" else [],
    )


class JobWatch:
    """One job, looked at again and again; only new lines of its log are asked for."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self._name = cluster, name
        self.pods: list[Json] = []
        self._log, self._unseen = RunLog(), Unseen()
        self._last: JobSnapshot | None = None

    def look(self) -> JobSnapshot:
        """The job as it stands; the last snapshot, with ``unreachable``, while the API server is silent.

        Raises:
            UserError: there is no such job, it was deleted meanwhile, or the user may not read what is
                needed.
            Unreachable: no answer to the first look.
        """
        try:
            job = self._cluster.job(self._name)
            scene = job_scene(self._cluster, job)
            self.pods, status = scene.pods, status_in(scene, self._cluster.namespace)
            if status.pods:
                self._read(status.pods[0].name, JOB_KINDS[job["kind"]].container)
            self._last = snapshot(job, status, self._log)
        except Unreachable as error:
            if self._last is None:
                raise
            self._last = replace(self._last, unreachable=error.what)
        except NotFound as error:
            if self._last is None:
                raise
            raise NotFound(f"the job {self._name!r} was deleted", where=self._cluster.namespace) from error
        return self._last

    def _read(self, pod: str, container: str) -> None:
        with _begun():
            for line in self._cluster.log_lines(pod, container=container, since=self._unseen.since):
                if new := self._unseen.split(line):
                    self._log.see(*new)


def snapshots(cluster: Cluster) -> list[JobSnapshot]:
    """Every job of the namespace, with the end of its first pod's log.

    Raises:
        UserError: the user may not list jobs or pods, or read logs.
        Unreachable: no answer.
    """
    jobs = cluster.jobs()
    pods: dict[tuple[str, str], list[Json]] = {}
    for kind in {job["kind"] for job in jobs}:
        label = JOB_KINDS[kind].pods_label
        for pod in cluster.pods_with(label):
            pods.setdefault((kind, pod["metadata"]["labels"][label]), []).append(pod)

    def one(job: Json) -> JobSnapshot:
        name = name_of(job)
        own = pods.get((job["kind"], name), [])
        log = RunLog()
        with _begun():
            for pod in own[:1]:
                container = JOB_KINDS[job["kind"]].container
                for line in cluster.log_lines(name_of(pod), container=container, tail=TAIL_LINES):
                    moment, _, text = line.partition(" ")
                    log.see(moment, text)
        return snapshot(job, status_in(Scene(name, jobs=[job], pods=own), cluster.namespace), log)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, jobs))


@contextlib.contextmanager
def _begun() -> Iterator[None]:
    """Pass over the refusal of a log whose container has not begun, or is gone."""
    try:
        yield
    except Forbidden:
        raise
    except Refused:
        pass
