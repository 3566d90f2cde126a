"""A run as the pods of its job tell it: its record if they printed it, else its progress.

``podtune watch`` and ``podtune runs --cluster`` show a snapshot like a run's folder. Only jobs, pods, their
logs and events are read: the rights of docs/cluster.md, no exec and no volume.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from podtune.cluster.job.manifest import dig
from podtune.cluster.live.client import Cluster
from podtune.cluster.live.diagnose import PodProblem, pod_status, problems, state
from podtune.cluster.live.errors import Forbidden, Refused, Unreachable
from podtune.cluster.live.follow import Unseen
from podtune.cluster.live.kinds import JOB_KINDS, name_of
from podtune.cluster.live.status import ENDED, problems_of
from podtune.run.collect import collect
from podtune.run.errors import MARKER, NotFound
from podtune.run.job_snapshot import JobSnapshot
from podtune.run.log_lines import parse

Json = dict[str, Any]

# of each log that a list looks at; a record takes a handful of lines
HEAD_BYTES, TAIL_LINES = 32 * 1024, 1000
AT_ONCE = 8  # jobs of a list that are asked for at the same time


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
                self._add({"time": moment, **entry})

    def _back_to(self, step: int) -> None:
        """A resumed run repeats the steps after its checkpoint."""
        self.entries = {
            split: [entry for entry in entries if entry["step"] <= step]
            for split, entries in self.entries.items()
        }
        self._record_lines.clear()

    def _add(self, entry: Json) -> None:
        entries = self.entries.setdefault(entry["split"], [])
        if not entries or entries[-1]["step"] < entry["step"]:  # a list reads the head of a short log twice
            entries.append(entry)

    def records(self) -> list[Json]:
        """The records that were printed, each exact; damaged ones are left out."""
        return collect(self._record_lines).records


def declared(job: Json) -> Json:
    """The keys of a record that the job's manifest gives: mode, strategy, pods and processes."""
    spec = job.get("spec") or {}
    container: Json = {}
    if job["kind"] == "TrainJob":
        container = spec.get("trainer") or {}
        nodes, processes = int(container.get("numNodes") or 1), container.get("numProcPerNode")
    else:
        replicas = list((spec.get("pytorchReplicaSpecs") or {"": spec}).values())
        nodes = sum(int(replica.get("replicas") or replica.get("completions") or 1) for replica in replicas)
        for each in dig(replicas[0], "template", "spec").get("containers") or []:
            container = each if each.get("name") == JOB_KINDS[job["kind"]].container else container
        own = (
            entry.get("value")
            for entry in container.get("env") or []
            if entry["name"] == "PET_NPROC_PER_NODE"
        )
        processes = spec.get("nprocPerNode") or next(own, None)
    words = [str(word) for word in [*(container.get("command") or []), *(container.get("args") or [])]]
    keys: Json = {"nnodes": nodes}
    if str(processes).isdigit():
        keys |= {"nproc_per_node": int(str(processes)), "world_size": nodes * int(str(processes))}
    if "podtune.training" in words:
        keys["mode"] = "sft"
    elif "bench" in words or "podtune.benchmark" in words:
        keys["mode"] = "benchmark"
    if "--strategy" in words[:-1]:
        keys["strategy"] = words[words.index("--strategy") + 1]
    return keys


def snapshot(
    cluster: Cluster, job: Json, pods: list[Json], found: list[PodProblem], log: RunLog
) -> JobSnapshot:
    """Put together the job's condition, its pods, their problems, and what the log says."""
    condition, message = state(job, pods)
    status, keys = job.get("status") or {}, declared(job)
    return JobSnapshot(
        name=name_of(job),
        kind=job["kind"],
        namespace=cluster.namespace,
        condition=condition,
        message=message,
        ended=condition in ENDED,
        started_at=status.get("startTime") or job["metadata"].get("creationTimestamp"),
        ended_at=status.get("completionTime"),
        pods=[pod_status(pod) for pod in pods],
        problems=[str(problem) for problem in found],
        declared=keys,
        head=log.head,
        max_steps=log.max_steps,
        entries=log.entries,
        last_line=log.last_line,
        records=log.records() if condition in ENDED or keys.get("mode") == "benchmark" else [],
    )


class JobWatch:
    """One job, looked at again and again; only new lines of its log are asked for."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self._name = cluster, name
        self._log, self._unseen, self._pod = RunLog(), Unseen(), ""
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
            pods = self._cluster.pods(job)
            found = problems_of(self._cluster, job, pods)
            if pods:
                self._read(job, pods[0])
            self._last = snapshot(self._cluster, job, pods, found, self._log)
        except Unreachable as error:
            if self._last is None:
                raise
            self._last = replace(self._last, unreachable=error.what)
        except NotFound as error:
            if self._last is None:
                raise
            raise NotFound(f"the job {self._name!r} was deleted", where=self._cluster.namespace) from error
        return self._last

    def _read(self, job: Json, pod: Json) -> None:
        if pod["metadata"]["uid"] != self._pod:
            self._pod, self._unseen = pod["metadata"]["uid"], Unseen()
        container = JOB_KINDS[job["kind"]].container
        with _begun():
            for line in self._cluster.log_lines(name_of(pod), container=container, since=self._unseen.since):
                if new := self._unseen.split(line):
                    self._log.see(*new)


def snapshots(cluster: Cluster) -> list[JobSnapshot]:
    """Every job of the namespace, with the beginning and the end of its first pod's log.

    Raises:
        UserError: the user may not list jobs or pods, or read logs.
        Unreachable: no answer.
    """
    jobs = cluster.jobs()
    pods = {(job["kind"], name_of(job)): list[Json]() for job in jobs}
    for kind, job_kind in JOB_KINDS.items():
        if any(job["kind"] == kind for job in jobs):
            for pod in cluster.pods_with(job_kind.pods_label):
                name = pod["metadata"]["labels"][job_kind.pods_label]
                pods.setdefault((kind, name), []).append(pod)

    def one(job: Json) -> JobSnapshot:
        own = pods[job["kind"], name_of(job)]
        log = _ends_of_log(cluster, job, own[0]) if own else RunLog()
        return snapshot(cluster, job, own, problems(own, []), log)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, jobs))


def _ends_of_log(cluster: Cluster, job: Json, pod: Json) -> RunLog:
    name, container, log = name_of(pod), JOB_KINDS[job["kind"]].container, RunLog()
    with _begun():
        # the last one is cut off
        beginning = list(cluster.log_lines(name, container=container, first_bytes=HEAD_BYTES))[:-1]
        for line in [*beginning, *cluster.log_lines(name, container=container, tail=TAIL_LINES)]:
            moment, _, text = line.partition(" ")
            log.see(moment, text)
    return log


@contextlib.contextmanager
def _begun() -> Iterator[None]:
    """Pass over the refusal of a log whose container has not begun, or is gone."""
    try:
        yield
    except Forbidden:
        raise
    except Refused:
        pass
