"""What the pods of a job say of the run in them: its record if they printed it, else its progress, out of the
first pod's log.

Everything is a plain dictionary ("story"), which ``podtune watch`` and ``podtune runs --cluster`` show like a
run's folder. Only jobs, pods, their logs and events are read: the rights of docs/cluster.md, no exec and no
volume.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from podtune.cluster.live.client import JOB_KINDS, Cluster, Refused, Unreachable
from podtune.cluster.live.diagnose import PodProblem, phase, problems, restarts, state
from podtune.cluster.live.follow import ENDED, TRAINING_CONTAINER, Unseen, problems_of, sentence
from podtune.run.collect import collect
from podtune.run.errors import MARKER, NO_INPUT, NO_PERMISSION, NotFound, UserError
from podtune.run.log_lines import parse

Json = dict[str, Any]

# of each log that a list looks at; a record takes a handful of lines
HEAD_BYTES, TAIL_LINES = 32 * 1024, 1000
AT_ONCE = 8  # jobs of a list that are asked for at the same time


@dataclass
class RunLog:
    """A run's log, line by line: the last head and start, the entries of each split, and the records'
    lines.
    """

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


def container_of(job: Json) -> str:
    """The name of the container that trains."""
    return TRAINING_CONTAINER[job["kind"]]


def declared(job: Json) -> Json:
    """What the job's manifest says of the run: mode, strategy, pods and processes; what it does not say is
    absent.
    """
    spec = job.get("spec") or {}
    trainer: Json = {}
    if job["kind"] == "PyTorchJob":
        replicas = list((spec.get("pytorchReplicaSpecs") or {}).values())
        nodes = sum(int(replica.get("replicas", 1)) for replica in replicas)
        processes = spec.get("nprocPerNode")
        for container in (
            (((replicas[0].get("template") or {}).get("spec") or {}).get("containers") or [])
            if replicas
            else []
        ):
            trainer = container if container.get("name") == container_of(job) else trainer
    else:
        trainer = spec.get("trainer") or {}
        nodes, processes = int(trainer.get("numNodes") or 1), trainer.get("numProcPerNode")
    words = [str(word) for word in [*(trainer.get("command") or []), *(trainer.get("args") or [])]]
    said: Json = {"nnodes": nodes}
    if str(processes).isdigit():
        said |= {"nproc_per_node": int(str(processes)), "world_size": nodes * int(str(processes))}
    if "podtune.training" in words:
        said["mode"] = "sft"
    elif "bench" in words or "podtune.benchmark" in words:
        said["mode"] = "benchmark"
    if "--strategy" in words[:-1]:
        said["strategy"] = words[words.index("--strategy") + 1]
    return said


def story(cluster: Cluster, job: Json, pods: list[Json], wrong: list[PodProblem], log: RunLog) -> Json:
    """All of it: the job's condition, its pods, what is wrong, and what the log says."""
    condition, message = state(job)
    if condition == "Pending" and any((pod.get("status") or {}).get("phase") != "Pending" for pod in pods):
        condition = "Running"  # a TrainJob has no condition until it has ended
    status = job.get("status") or {}
    return {
        "name": job["metadata"]["name"],
        "kind": job["kind"],
        "namespace": cluster.namespace,
        "condition": condition,
        "message": message,
        "ended": condition in ENDED,
        "started_at": status.get("startTime") or job["metadata"].get("creationTimestamp"),
        "ended_at": status.get("completionTime"),
        "declared": declared(job),
        "pods": [
            {"name": pod["metadata"]["name"], "phase": phase(pod), "restarts": restarts(pod)} for pod in pods
        ],
        "problems": [sentence(problem) for problem in wrong],
        "head": log.head,
        "max_steps": log.max_steps,
        "entries": log.entries,
        "last_line": log.last_line,
        "records": log.records() if condition in ENDED or _is_benchmark(job) else [],
        "silent": "",
    }


def _is_benchmark(job: Json) -> bool:
    return declared(job).get("mode") == "benchmark"


class JobWatch:
    """One job, looked at again and again; only new lines of its log are asked for."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self._name = cluster, name
        self._log, self._unseen, self._pod = RunLog(), Unseen(), ""
        self._story: Json = {}

    def look(self) -> Json:
        """The story as it stands. An API server that is silent for a while leaves the last one, with
        ``silent`` saying so.

        Raises:
            UserError: there is no such job, it was deleted meanwhile, or the user may not read what is
            needed.
            Unreachable: no answer to the first look.
        """
        try:
            job = self._cluster.job(self._name)
            pods = self._cluster.pods(job)
            wrong = problems_of(self._cluster, job, pods)
            if pods:
                self._read(job, pods[0])
            self._story = story(self._cluster, job, pods, wrong, self._log)
        except Unreachable as error:
            if not self._story:
                raise
            self._story["silent"] = error.what
        except UserError as error:
            if error.code == NO_INPUT and self._story:
                raise NotFound(
                    f"the job {self._name!r} was deleted", where=self._cluster.namespace
                ) from error
            raise
        return self._story

    def _read(self, job: Json, pod: Json) -> None:
        if pod["metadata"]["uid"] != self._pod:
            self._pod, self._unseen = pod["metadata"]["uid"], Unseen()
        with _begun():
            for line in self._cluster.log_lines(
                pod["metadata"]["name"], container=container_of(job), since=self._unseen.since
            ):
                if new := self._unseen.split(line):
                    self._log.see(*new)


def stories(cluster: Cluster) -> list[Json]:
    """The story of every job of the namespace, from the beginning and the end of its first pod's log.

    Raises:
        UserError: the user may not list jobs or pods, or read logs.
        Unreachable: no answer.
    """
    jobs = cluster.jobs()
    pods = {(job["kind"], job["metadata"]["name"]): list[Json]() for job in jobs}
    for kind, (_, _, label) in JOB_KINDS.items():
        if any(job["kind"] == kind for job in jobs):
            for pod in cluster.pods_with(label):
                pods.setdefault((kind, pod["metadata"]["labels"][label]), []).append(pod)

    def one(job: Json) -> Json:
        own = pods[job["kind"], job["metadata"]["name"]]
        return story(
            cluster, job, own, problems(own, []), _ends_of_log(cluster, job, own[0]) if own else RunLog()
        )

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, jobs))


def _ends_of_log(cluster: Cluster, job: Json, pod: Json) -> RunLog:
    name, container, log = pod["metadata"]["name"], container_of(job), RunLog()
    with _begun():
        # the last one is cut off
        beginning = list(cluster.log_lines(name, container=container, first_bytes=HEAD_BYTES))[:-1]
        for line in [*beginning, *cluster.log_lines(name, container=container, tail=TAIL_LINES)]:
            moment, _, text = line.partition(" ")
            log.see(moment, text)
    return log


@contextlib.contextmanager
def _begun() -> Iterator[None]:
    """Passes over the refusal of a log whose container has not begun, or is gone."""
    try:
        yield
    except Refused as error:
        if error.code == NO_PERMISSION:
            raise
