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
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from podtune.cluster.dry_run.pod_run import PodRun
from podtune.cluster.dry_run.sandbox import Sandbox
from podtune.cluster.dry_run.shrink import Adaptation
from podtune.cluster.job.manifest import Json, Pod
from podtune.cluster.job.pods import one_job, pods_of
from podtune.run.errors import UsageError, near

Emit = Callable[[str, str], None]

TICK_S = 0.05
# after success: ranks end together, and an operator would see the others' end a second later
PATIENCE_S = 3.0
MAX_GRACE_S = 30.0  # a dry run does not wait out terminationGracePeriodSeconds of minutes
MASTERS, PORTS = ("MASTER_ADDR", "PET_MASTER_ADDR"), ("MASTER_PORT", "PET_MASTER_PORT")
STEP = re.compile(r"""\bstep['"]?\s*[ =:]\s*(\d+)""", re.IGNORECASE)


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


def parse_kill(text: str, pods: list[Pod]) -> tuple[str, int]:
    """The pod and the step of ``POD@STEP``; the pod by its name or without the job's (``worker-0``)."""
    name, _, step = text.partition("@")
    names = [pod.name for pod in pods]
    matching = [pod for pod in names if pod == name or pod.endswith(f"-{name}")]
    if len(matching) != 1 or not step.isdigit():
        fix = f"for example --kill {names[-1]}@10 (the pods are {', '.join(names)})"
        raise UsageError(f"--kill {text!r} is not POD@STEP{near(name, names)}", fix=fix)
    return matching[0], int(step)


def run(
    documents: list[Json],
    *,
    folder: Path | None,
    emit: Emit,
    kill: tuple[str, int] | None = None,
    timeout_s: float = 1800.0,
    adaptation: Adaptation | None = None,
) -> Result:
    """Start every pod of the job among ``documents`` and see it to its end.

    Args:
        folder: where the volumes and the pods' folders are made; a temporary one that is removed if None.
        emit: called with (pod name, line) for each line of output, from threads.
        kill: the pod whose processes get a SIGKILL once the job has reached the step.
        timeout_s: the longest time for all of it; then the job counts as still running.

    Raises:
        UserError: no job, several jobs, or a pod that cannot be started here.
    """
    job, adaptation = one_job(documents), adaptation or Adaptation()
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        root = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="podtune-dry-run-")))
        root.mkdir(parents=True, exist_ok=True)
        sandbox = Sandbox(root.resolve(), documents, adaptation.config)
        operator = Operator(job, sandbox, emit, adaptation.variables)
        condition, reason = operator.run(timeout_s, kill)
    return Result(
        job=f"{job['kind']} {job['metadata']['name']}",
        condition=condition,
        reason=reason,
        pods=operator.pods,
        seconds=time.monotonic() - started,
        notes=[*adaptation.notes, *sandbox.notes],
    )


class Operator:
    """The job's controller: starts its pods, decides how the job ended, and cleans up."""

    def __init__(self, job: Json, sandbox: Sandbox, emit: Emit, variables: dict[str, dict[str, str]]) -> None:
        self._elastic = job["spec"].get("elasticPolicy") is not None
        self._emit, self._step = emit, -1
        pods, running = pods_of(job, sandbox.documents), threading.Event()
        local = local_addresses(pods[0].variables)
        self.pods = [
            PodRun(pod, sandbox, local | variables.get(pod.name, {}), self._line, running) for pod in pods
        ]
        if len(pods) > 1:
            sandbox.note("the pods meet at 127.0.0.1: names of pods do not resolve on one machine")

    def run(self, timeout_s: float, kill: tuple[str, int] | None) -> tuple[str, str]:
        """Run the pods until the job has ended or the time is over; its condition, and the reason.

        Raises:
            UserError: a pod that cannot be started here.
        """
        deadline = time.monotonic() + timeout_s
        with ThreadPoolExecutor(len(self.pods)) as pool:
            try:
                threads = [pool.submit(pod.run) for pod in self.pods]
                while not (verdict := self._verdict()):
                    if time.monotonic() > deadline:
                        return "Running", f"still running after {timeout_s:.0f} s (--timeout)"
                    if kill and self._step >= kill[1] and self._kill(kill[0]):
                        kill = None
                    # a pod that cannot be started here has raised in its thread
                    for thread in wait(threads, TICK_S, FIRST_EXCEPTION).done:
                        thread.result()
                self._clean_up(threads, PATIENCE_S if verdict[0] == "Succeeded" else 0)
                return verdict
            finally:
                for pod in self.pods:
                    pod.end()

    def _line(self, pod: str, line: str) -> None:
        if step := STEP.search(line):
            self._step = max(self._step, int(step[1]))
        self._emit(pod, line)

    def _kill(self, name: str) -> bool:
        killed = next(pod for pod in self.pods if pod.name == name).kill()
        if killed:
            self._emit(name, f"(dry-run: SIGKILL at step {self._step})")
        return killed

    def _verdict(self) -> tuple[str, str] | None:
        """The job's condition and the reason, from the phases of its pods; None while they run."""
        succeeded = [pod for pod in self.pods if pod.phase == "Succeeded"]
        for pod in self.pods:
            if pod.phase == "Failed":
                code = pod.exits[-1].code
                final = f"which is final under restartPolicy {pod.pod.restart_policy}"
                again = f"after {pod.restarts} restart; a cluster would try again"
                how = again if pod.retries(code) else final
                return "Failed", f"{pod.name} ended with exit code {code}, {how}"
        # the operator asks a Master alone, where there is one
        if any(pod.pod.replica_type == "master" for pod in succeeded):
            return "Succeeded", "the master succeeded"
        if len(succeeded) == len(self.pods):
            return "Succeeded", "all pods succeeded"
        if succeeded and self._elastic:
            return "Succeeded", f"{succeeded[0].name} succeeded, which is enough for an elastic job"
        return None

    def _clean_up(self, threads: list[Future[None]], patience_s: float) -> None:
        """Delete the pods that have not ended by themselves."""
        wait(threads, patience_s)
        left = [pod for pod, thread in zip(self.pods, threads, strict=True) if not thread.done()]
        for pod in left:
            pod.delete()
        graces = [float(pod.pod.spec.get("terminationGracePeriodSeconds") or 30) for pod in left]
        wait(threads, min(max(graces, default=0.0), MAX_GRACE_S))


def local_addresses(variables: dict[str, str]) -> dict[str, str]:
    """The rendezvous variables with this machine in place of a pod's name, on a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    addresses = dict.fromkeys(MASTERS, "127.0.0.1") | dict.fromkeys(PORTS, port)
    addresses["PET_RDZV_ENDPOINT"] = f"127.0.0.1:{port}"
    return {name: value for name, value in addresses.items() if name in variables}


def environments(pods: list[Pod]) -> dict[str, dict[str, dict[str, str]]]:
    """The variables of every container of every pod as the cluster would set them.

    In angle brackets where those that are not literal come from.
    """
    found: dict[str, dict[str, dict[str, str]]] = {}
    for pod in pods:
        for container in pod.spec["containers"]:
            elsewhere = {}
            for entry in container.get("env") or []:
                for kind, source in (entry.get("valueFrom") or {}).items():
                    elsewhere[entry["name"]] = f"<{kind} {' '.join(map(str, source.values()))}>"
            variables = {**elsewhere, **pod.environment(container)}
            found.setdefault(pod.name, {})[container["name"]] = variables
    return found
