"""A job's pods as local processes, under the environment and the rules that the training operator would
apply.

The manifest is the one that gets deployed. What differs here is said in the result's notes: names of pods
become the loopback address, volumes become folders, and without enough GPUs the processes train on the CPU.
"""

from __future__ import annotations

import contextlib
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from podtune.cluster.dry_run.pod_run import PodRun
from podtune.cluster.dry_run.sandbox import Sandbox
from podtune.cluster.job import pytorchjob as contract
from podtune.cluster.job import trainjob
from podtune.run.errors import DataError, UsageError, near

Json = dict[str, Any]
Emit = Callable[[str, str], None]

TICK_S = 0.05
PATIENCE_S = 3.0
STEP = re.compile(r"""\bstep['"]?\s*[ =:]\s*(\d+)""", re.IGNORECASE)
SCHEMA = "podtune.dry-run/1"


@dataclass(frozen=True)
class Fault:
    """Something done to a pod once its job has reached a step."""

    kind: Literal["kill", "stall"]
    pod: str
    step: int


@dataclass
class Result:
    """What Kubernetes would have concluded."""

    job: str
    condition: str  # Succeeded, Failed, or Running where the time was over
    reason: str
    pods: list[PodRun]
    seconds: float
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 if the job succeeded; a user's error (64-78) of a pod as it is; else 1."""
        if self.condition == "Succeeded":
            return 0
        codes = [end.code for run in self.pods for end in run.exits[-1:] if 64 <= end.code <= 78]
        return codes[0] if codes else 1


def jobs_of(documents: list[Json]) -> list[Json]:
    """The PyTorchJobs and TrainJobs among ``documents``."""
    return [document for document in documents if document.get("kind") in ("PyTorchJob", "TrainJob")]


def pods_of(job: Json, documents: list[Json]) -> list[contract.Pod]:
    """The pods that the operator, or Trainer, would create for the job."""
    return trainjob.pods(job, documents) if job["kind"] == "TrainJob" else contract.pods(job)


def parse_fault(kind: Literal["kill", "stall"], text: str, pods: list[contract.Pod]) -> Fault:
    """``POD@STEP``; the pod by its name or without the job's (``worker-0``)."""
    name, _, step = text.partition("@")
    names = [pod.name for pod in pods]
    named = [pod for pod in names if pod == name or pod.endswith(f"-{name}")]
    if len(named) != 1 or not step.isdigit():
        raise UsageError(
            f"--{kind} {text!r} is not POD@STEP{near(name, names)}",
            fix=f"for example --{kind} {names[-1]}@10 (the pods are {', '.join(names)})",
        )
    return Fault(kind, named[0], int(step))


def run(
    documents: list[Json],
    *,
    folder: Path | None,
    emit: Emit,
    faults: list[Fault] = [],  # noqa: B006  # read only
    timeout_s: float = 1800.0,
    config_overrides: Json | None = None,
    environment_overrides: dict[str, dict[str, str]] | None = None,
) -> Result:
    """Start every pod of the job among ``documents`` and see it to its end.

    Args:
        folder: where the volumes and the pods' folders are made; a temporary one that is removed if None.
        emit: called with (pod name, line) for each line of output, from threads.
        faults: done once each.
        timeout_s: the longest time for all of it; then the job counts as still running.
        config_overrides: keys set in every YAML file of a mounted ConfigMap; None removes a key.
        environment_overrides: by pod, variables set for its containers after everything else.

    Raises:
        UserError: no job, several jobs, or a pod that cannot be started here.
    """
    jobs = jobs_of(documents)
    if len(jobs) != 1:
        raise DataError(
            f"{len(jobs)} jobs among the documents", where="dry-run", fix="give one PyTorchJob or TrainJob"
        )
    with contextlib.ExitStack() as stack:
        root = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="podtune-dry-run-")))
        root.mkdir(parents=True, exist_ok=True)
        sandbox = Sandbox(root.resolve(), documents, config_overrides or {})
        operator = Operator(jobs[0], sandbox, emit, faults, environment_overrides or {})
        try:
            operator.start(timeout_s)
        finally:
            operator.end()
        return operator.result()


class Operator:
    """The job's controller: creates pods, watches them, restarts or fails the job, cleans up."""

    def __init__(
        self,
        job: Json,
        sandbox: Sandbox,
        emit: Emit,
        faults: list[Fault],
        overrides: dict[str, dict[str, str]],
    ) -> None:
        self.job, self.sandbox = job, sandbox
        self.policy: Json = job["spec"].get("runPolicy") or {}
        self.condition, self.reason = "Running", ""
        self._emit, self._faults = emit, list(faults)
        self._steps = StepWatch(sandbox.root)
        self._started = time.monotonic()
        pods = pods_of(job, sandbox.documents)
        namespace = (job.get("metadata") or {}).get("namespace") or "default"
        addresses = local_addresses(pods)
        self.runs = [
            PodRun(
                pod,
                sandbox,
                namespace,
                addresses | overrides.get(pod.name, {}),
                self._line,
                self._master_ready,
            )
            for pod in pods
        ]
        if len(pods) > 1:
            sandbox.note(
                f"the pods meet at {addresses.get('MASTER_ADDR', '127.0.0.1')}: names of pods do "
                "not resolve on one machine"
            )

    def start(self, timeout_s: float) -> None:
        """Run the job to its end, or until ``timeout_s`` (activeDeadlineSeconds, if that is less) is over."""
        deadline = self.policy.get("activeDeadlineSeconds")
        while self.condition == "Running":
            for run in self.runs:
                run.tick()
            self._strike()
            self._conclude()
            passed = time.monotonic() - self._started
            if self.condition == "Running" and deadline and passed > deadline:
                self._finish("Failed", f"it was active longer than the activeDeadlineSeconds of {deadline}")
            elif self.condition == "Running" and passed > timeout_s:
                self.reason = f"still running after {timeout_s:.0f} s (--timeout)"
                return
            time.sleep(TICK_S)
        self._clean_up()

    def end(self) -> None:
        """End every process, whatever state the job is in."""
        for run in self.runs:
            run.end()

    def result(self) -> Result:
        """The verdict, with notes on what the pods left behind."""
        for run in self.runs:
            if run.backoff_s:
                self.sandbox.note(
                    f"{run.name}: Kubernetes would have waited {run.backoff_s:.0f} s more between restarts "
                    "(CrashLoopBackOff)"
                )
            if run.stalled:
                self.sandbox.note(
                    f"{run.name} hung: Kubernetes sees a running pod, nothing restarts it, and "
                    "its GPUs stay taken"
                )
        if changed := self.sandbox.changed:
            changes = ", ".join(
                f"no {key}" if value is None else f"{key}: {value}" for key, value in changed.items()
            )
            self.sandbox.note(f"changed in the training YAML: {changes}")
        seconds = time.monotonic() - self._started
        return Result(
            f"{self.job['kind']} {self.job['metadata']['name']}",
            self.condition,
            self.reason,
            self.runs,
            seconds,
            self.sandbox.notes,
        )

    def _line(self, pod: str, line: str) -> None:
        self._steps.see(line)
        self._emit(pod, line)

    def _master_ready(self) -> bool:
        return self.runs[0].phase in ("Running", "Succeeded")

    def _strike(self) -> None:
        if not self._faults:
            return
        step = self._steps.latest()
        for fault in [each for each in self._faults if step >= each.step]:
            target = next(run for run in self.runs if run.name == fault.pod)
            if target.strike(fault.kind):
                self._faults.remove(fault)
                self._emit(
                    fault.pod,
                    f"(dry-run: {'SIGKILL' if fault.kind == 'kill' else 'SIGSTOP'} at step {step})",
                )

    def _conclude(self) -> None:
        """The job's condition from the phases of its pods, as the operator decides it after each change."""
        for run in self.runs:
            if run.phase == "Failed":
                self._pod_failed(run)
            if self.condition != "Running":
                return
        self._check_backoff()
        if self.condition != "Running":
            return
        master = next((run for run in self.runs if run.pod.replica_type == "master"), None)
        succeeded = [run for run in self.runs if run.phase == "Succeeded"]
        if master is not None and master.phase == "Succeeded":
            self._finish("Succeeded", "the master succeeded")
        elif master is None and len(succeeded) == len(self.runs):
            self._finish("Succeeded", "all pods succeeded")
        elif master is None and succeeded and self.job["spec"].get("elasticPolicy") is not None:
            self._finish("Succeeded", f"{succeeded[0].name} succeeded, which is enough for an elastic job")

    def _pod_failed(self, run: PodRun) -> None:
        code = run.exits[-1].code
        said = f"{run.name} ended with exit code {code}"
        if run.pod.restart_policy == "ExitCode" and code >= contract.RETRYABLE:
            if self.policy.get("backoffLimit") == 0:
                self._finish("Failed", f"{said} and backoffLimit is 0")
            else:
                run.recreate()
        elif run.pod.restart_policy == "ExitCode":
            self._finish(
                "Failed",
                f"{said}, which is final (below {contract.RETRYABLE}) under restartPolicy ExitCode",
            )
        else:
            self._finish("Failed", f"{said} and restartPolicy is {run.pod.restart_policy}")

    def _check_backoff(self) -> None:
        """backoffLimit against the restarts of running pods; then the operator deletes them all, whatever
        cleanPodPolicy says.
        """
        limit = self.policy.get("backoffLimit")
        restarts = sum(
            run.restarts for run in self.runs if run.phase == "Running" and run.pod.restart_policy != "Never"
        )
        if limit is not None and restarts >= max(1, limit):
            self._finish("Failed", f"{restarts} restarts reached the backoffLimit of {limit}")
            for run in self.runs:
                run.delete()

    def _finish(self, condition: str, reason: str) -> None:
        self.condition, self.reason = condition, reason

    def _clean_up(self) -> None:
        """cleanPodPolicy, once the job has ended. What would stay and run on is noted, then ended, for this
        is a dry run.
        """
        policy = self.policy.get("cleanPodPolicy") or "None"
        if self.job["kind"] == "TrainJob":
            policy = "Running"  # JobSet removes a failed job's running pods
        left = [run for run in self.runs if run.phase in ("Pending", "Running")]
        if policy == "None" and left and not any(run._kill_at for run in left):
            names = ", ".join(run.name for run in left)
            self.sandbox.note(
                f"cleanPodPolicy None: {names} would run on and keep its GPUs until it ends by "
                "itself or is deleted"
            )
            return
        # Ranks end together; a real pod's end is known to the operator a second later, so peers that are done
        # count as such.
        patience = time.monotonic() + (PATIENCE_S if self.condition == "Succeeded" else 0)
        while time.monotonic() < patience and not all(run.ended for run in left):
            for run in left:
                run.tick()
            time.sleep(TICK_S)
        for run in left:
            run.delete()
        while not all(run.ended for run in left):
            for run in left:
                run.tick()
            time.sleep(TICK_S)


class StepWatch:
    """The newest training step that any pod has reported, in its output or in a metrics.jsonl on a volume."""

    def __init__(self, root: Path) -> None:
        self._root, self._seen, self._lock = root, -1, threading.Lock()
        self._next_look = 0.0

    def see(self, line: str) -> None:
        """Take the step out of a line of output, if it names one."""
        if (step := STEP.search(line)) and int(step[1]) > self._seen:
            with self._lock:
                self._seen = max(self._seen, int(step[1]))

    def latest(self) -> int:
        """The step, -1 before the first."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + 0.2
            for path in self._root.glob("volumes/**/metrics.jsonl"):
                for line in reversed(path.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]):
                    self.see(line)
        return self._seen


def local_addresses(pods: list[contract.Pod]) -> dict[str, str]:
    """The rendezvous variables with this machine in place of a pod's name, on a port that is free now."""
    injected = pods[0].injected
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    addresses = {name: "127.0.0.1" for name in ("MASTER_ADDR", "PET_MASTER_ADDR") if name in injected}
    addresses |= {name: str(port) for name in ("MASTER_PORT", "PET_MASTER_PORT") if name in injected}
    if "PET_RDZV_ENDPOINT" in injected:
        addresses["PET_RDZV_ENDPOINT"] = f"127.0.0.1:{port}"
    return addresses


def lines_of_environment(pods: list[contract.Pod]) -> Iterator[str]:
    """``--print-env``: every variable of every container as the cluster would set it."""
    for pod in pods:
        for container in pod.spec["containers"]:
            yield f"# {pod.name}, container {container['name']}"
            for name, value in environment_of(pod, container).items():
                yield f"{name}={value}"
            yield ""


def environment_of(pod: contract.Pod, container: Json) -> dict[str, str]:
    """Literal values as the kubelet sets them, and where the others come from in angle brackets."""
    elsewhere = {}
    for entry in container.get("env") or []:
        if "valueFrom" in entry:
            kind, source = next(iter(entry["valueFrom"].items()))
            elsewhere[entry["name"]] = f"<{kind} {' '.join(str(value) for value in source.values())}>"
    return {**elsewhere, **pod.environment(container)}
