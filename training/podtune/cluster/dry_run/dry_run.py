"""A job's pods as local processes, under the environment that the training operator would give them.

The manifest is the one that gets deployed. The result's notes say what differs here: names of pods become the
loopback address, volumes become folders, and without enough GPUs the processes train on the CPU.
"""

from __future__ import annotations

import contextlib
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podtune.cluster.dry_run.pod_run import PodRun
from podtune.cluster.dry_run.sandbox import Sandbox
from podtune.cluster.job.manifest import Pod
from podtune.cluster.job.pods import one_job, pods_of
from podtune.run.errors import UsageError, near

Json = dict[str, Any]
Emit = Callable[[str, str], None]

TICK_S = 0.05
# after success: ranks end together, and an operator would see the others' end a second later
PATIENCE_S = 3.0
MAX_GRACE_S = 30.0  # a dry run does not wait out terminationGracePeriodSeconds of minutes
MASTERS, PORTS = ("MASTER_ADDR", "PET_MASTER_ADDR"), ("MASTER_PORT", "PET_MASTER_PORT")
STEP = re.compile(r"""\bstep['"]?\s*[ =:]\s*(\d+)""", re.IGNORECASE)
SCHEMA = "podtune.dry-run/1"


@dataclass(frozen=True)
class Kill:
    """SIGKILL of a pod's processes once its job has reached a step."""

    pod: str
    step: int


@dataclass(frozen=True)
class Adaptation:
    """Changes that make a job fit this machine.

    Args:
        config: keys set in every YAML file of a mounted ConfigMap; None removes a key.
        variables: by pod, set for its containers after everything else.
        notes: what the changes mean, for the person to read.
    """

    config: Json = field(default_factory=dict)
    variables: dict[str, dict[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """The condition that Kubernetes would have given the job, and its pods."""

    job: str
    condition: str  # Succeeded, Failed, or Running where the time was over
    reason: str
    pods: list[PodRun]
    seconds: float
    notes: list[str]

    @property
    def exit_code(self) -> int:
        """0 if the job succeeded; a user's error (64-78) of a pod as it is; else 1."""
        if self.condition == "Succeeded":
            return 0
        codes = [end.code for run in self.pods for end in run.exits[-1:] if 64 <= end.code <= 78]
        return codes[0] if codes else 1


def parse_kill(text: str, pods: list[Pod]) -> Kill:
    """``POD@STEP``; the pod by its name or without the job's (``worker-0``)."""
    name, _, step = text.partition("@")
    names = [pod.name for pod in pods]
    matching = [pod for pod in names if pod == name or pod.endswith(f"-{name}")]
    if len(matching) != 1 or not step.isdigit():
        raise UsageError(
            f"--kill {text!r} is not POD@STEP{near(name, names)}",
            fix=f"for example --kill {names[-1]}@10 (the pods are {', '.join(names)})",
        )
    return Kill(matching[0], int(step))


def run(
    documents: list[Json],
    *,
    folder: Path | None,
    emit: Emit,
    kill: Kill | None = None,
    timeout_s: float = 1800.0,
    adaptation: Adaptation | None = None,
) -> Result:
    """Start every pod of the job among ``documents`` and see it to its end.

    Args:
        folder: where the volumes and the pods' folders are made; a temporary one that is removed if None.
        emit: called with (pod name, line) for each line of output, from threads.
        timeout_s: the longest time for all of it; then the job counts as still running.

    Raises:
        UserError: no job, several jobs, or a pod that cannot be started here.
    """
    job, adaptation = one_job(documents), adaptation or Adaptation()
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        root = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="podtune-dry-run-")))
        root.mkdir(parents=True, exist_ok=True)
        namespace = (job.get("metadata") or {}).get("namespace") or "default"
        sandbox = Sandbox(root.resolve(), documents, namespace, adaptation.config)
        operator = Operator(job, sandbox, emit, adaptation)
        condition, reason = operator.run(timeout_s, kill)
    name = f"{job['kind']} {job['metadata']['name']}"
    notes = [*adaptation.notes, *sandbox.notes]
    if sandbox.changed:
        changes = (
            f"no {key}" if value is None else f"{key}: {value}" for key, value in sandbox.changed.items()
        )
        notes.append(f"changed in the training YAML: {', '.join(changes)}")
    return Result(name, condition, reason, operator.runs, time.monotonic() - started, notes)


class Operator:
    """The job's controller: starts its pods, decides how the job ended, and cleans up."""

    def __init__(self, job: Json, sandbox: Sandbox, emit: Emit, adaptation: Adaptation) -> None:
        self._job, self._emit = job, emit
        self._step = -1
        pods = pods_of(job, sandbox.documents)
        local = local_addresses(pods)
        running = threading.Event()
        self.runs = [
            PodRun(pod, sandbox, local | adaptation.variables.get(pod.name, {}), self._line, running)
            for pod in pods
        ]
        if len(pods) > 1:
            host = local.get("MASTER_ADDR", "127.0.0.1")
            sandbox.note(f"the pods meet at {host}: names of pods do not resolve on one machine")

    def run(self, timeout_s: float, kill: Kill | None) -> tuple[str, str]:
        """Run the pods until the job has ended or the time is over; its condition, and the reason.

        Raises:
            UserError: a pod that cannot be started here.
        """
        deadline = time.monotonic() + timeout_s
        with ThreadPoolExecutor(len(self.runs)) as pool:
            try:
                pods = [pool.submit(run.run) for run in self.runs]
                while not (verdict := self._verdict()):
                    if time.monotonic() > deadline:
                        return "Running", f"still running after {timeout_s:.0f} s (--timeout)"
                    if kill and self._step >= kill.step and self._kill(kill.pod):
                        kill = None
                    for pod in wait(pods, TICK_S, FIRST_EXCEPTION).done:
                        pod.result()
                self._clean_up(pods, PATIENCE_S if verdict[0] == "Succeeded" else 0)
                return verdict
            finally:
                for run in self.runs:
                    run.end()

    def _line(self, pod: str, line: str) -> None:
        if step := STEP.search(line):
            self._step = max(self._step, int(step[1]))
        self._emit(pod, line)

    def _kill(self, pod: str) -> bool:
        killed = next(run for run in self.runs if run.name == pod).kill()
        if killed:
            self._emit(pod, f"(dry-run: SIGKILL at step {self._step})")
        return killed

    def _verdict(self) -> tuple[str, str] | None:
        """The job's condition and the reason, from the phases of its pods; None while they run."""
        for run in self.runs:
            if run.phase == "Failed":
                return "Failed", self._reason(run)
        succeeded = [run for run in self.runs if run.phase == "Succeeded"]
        if any(run.pod.replica_type == "master" for run in succeeded):
            return "Succeeded", "the master succeeded"
        if len(succeeded) == len(self.runs):
            return "Succeeded", "all pods succeeded"
        if succeeded and self._job["spec"].get("elasticPolicy") is not None:
            return "Succeeded", f"{succeeded[0].name} succeeded, which is enough for an elastic job"
        return None

    def _reason(self, run: PodRun) -> str:
        code = run.exits[-1].code
        ended = f"{run.name} ended with exit code {code}"
        if run.retries(code):
            ended += f", after {run.restarts} restart; a cluster would try again"
            return f"{ended} (restartPolicy {run.pod.restart_policy})"
        return f"{ended}, which is final under restartPolicy {run.pod.restart_policy}"

    def _clean_up(self, pods: list[Future[None]], patience_s: float) -> None:
        """Delete the pods that have not ended by themselves."""
        wait(pods, patience_s)
        left = [run for run, pod in zip(self.runs, pods, strict=True) if not pod.done()]
        for run in left:
            run.delete()
        graces = [float(run.pod.spec.get("terminationGracePeriodSeconds") or 30) for run in left]
        wait(pods, min(max(graces, default=0.0), MAX_GRACE_S))


def local_addresses(pods: list[Pod]) -> dict[str, str]:
    """The rendezvous variables with this machine in place of a pod's name, on a port that is free now."""
    variables = pods[0].variables
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    addresses: dict[str, str] = {name: "127.0.0.1" for name in MASTERS if name in variables}
    addresses |= {name: str(port) for name in PORTS if name in variables}
    if "PET_RDZV_ENDPOINT" in variables:
        addresses["PET_RDZV_ENDPOINT"] = f"127.0.0.1:{port}"
    return addresses


def lines_of_environment(pods: list[Pod]) -> Iterator[str]:
    """``--print-env``: every variable of every container as the cluster would set it."""
    for pod in pods:
        for container in pod.spec["containers"]:
            yield f"# {pod.name}, container {container['name']}"
            for name, value in environment_of(pod, container).items():
                yield f"{name}={value}"
            yield ""


def environment_of(pod: Pod, container: Json) -> dict[str, str]:
    """Literal values as the kubelet sets them, and where the others come from in angle brackets."""
    elsewhere = {}
    for entry in container.get("env") or []:
        if "valueFrom" in entry:
            kind, source = next(iter(entry["valueFrom"].items()))
            elsewhere[entry["name"]] = f"<{kind} {' '.join(str(value) for value in source.values())}>"
    return {**elsewhere, **pod.environment(container)}
