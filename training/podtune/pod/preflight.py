"""The verdict of a preflight: problems of each pod and between pods, each with the pod that it is wrong on.

:mod:`podtune.pod.pod_info` gathers one pod's facts, :mod:`podtune.pod.rendezvous` brings them together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from podtune.machine import facts as machine
from podtune.pod.pod_info import PodInfo
from podtune.run.errors import DATA, OK, UNAVAILABLE
from podtune.run.output_volume import size_text

#: facts that all pods must share, with what a difference means
SAME = {
    "config_sha256": "the training configuration differs",
    "image": "the image differs",
    "versions": "installed versions differ",
    "data": "the data set differs",
    "nnodes": "the number of pods differs",
    "gpus": "the number of GPUs differs",
}
BUS_GB_PER_S = "PODTUNE_BUS_GB_PER_S"  # what the chart's nccl.preset promises
#: checks that may pass once the pods are started again
TOGETHER = ("names", "port", "rank", "all-reduce", "bandwidth")
#: checks that find something missing (exit code 69), not something wrong (65)
MISSING = ("gpu", "compiler", *TOGETHER)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, the pod it is wrong on, and what to do."""

    pod: str
    check: str
    text: str
    fix: str
    severity: Literal["error", "warning"] = "error"


@dataclass(frozen=True)
class AllReduce:
    """Speed of an all-reduce over all pods: seconds and bus bandwidth of the slowest device."""

    backend: str
    bytes: int
    seconds: float
    bus_gb_per_s: float


@dataclass(frozen=True)
class Verdict:
    """Result of a preflight, the same on every pod; ``pods`` in the order of their ranks."""

    problems: tuple[Problem, ...]
    pods: tuple[PodInfo, ...]
    all_reduce: AllReduce | None = None

    @property
    def worst(self) -> Problem | None:
        """The first error, else the first warning."""
        return next(iter(errors(self.problems) or self.problems), None)

    @property
    def ok(self) -> bool:
        """True if training may start."""
        return not errors(self.problems)

    @property
    def exit_code(self) -> int:
        """0 fit, 69 for what a pod, the node or the image lacks, else 65."""
        if self.ok:
            return OK
        return UNAVAILABLE if any(each.check in MISSING for each in errors(self.problems)) else DATA

    @property
    def sentence(self) -> str:
        """One sentence that names the bad pod."""
        if self.worst:
            return f"{self.worst.pod}: {self.worst.text}"
        count = len(self.pods)
        return f"{count} pods agree and reach each other" if count > 1 else "this pod is ready"

    def to_json(self) -> dict[str, object]:
        """The verdict as ``podtune preflight --json`` prints it."""
        return {
            "schema": "podtune.preflight/1",
            "ok": self.ok,
            "sentence": self.sentence,
            "problems": [asdict(problem) for problem in self.problems],
            "measured": {"all_reduce": asdict(self.all_reduce)} if self.all_reduce else {},
            "pods": [info.to_json() for info in self.pods],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Verdict:
        """Read what :meth:`to_json` made, in another process or pod."""
        measured = content["measured"].get("all_reduce")
        return cls(
            tuple(Problem(**problem) for problem in content["problems"]),
            tuple(PodInfo.from_json(info) for info in content["pods"]),
            AllReduce(**measured) if measured else None,
        )

    def text(self) -> str:
        """Lines for people: pods, all-reduce, problems, and the sentence last."""
        lines = [
            f"{info.pod}: " + (f"{info.gpus} x {info.gpu or 'GPU'}" if info.gpus else f"{info.cpus} CPUs")
            for info in self.pods
        ]
        if measured := self.all_reduce:
            size = f"{measured.bytes >> 20} MiB by {measured.backend}"
            lines.append(f"all-reduce of {size}: {measured.bus_gb_per_s} GB/s")
        for problem in self.problems:
            lines.append(f"{problem.severity}: {problem.pod}: {problem.text}\n  fix: {problem.fix}")
        lines.append(f"preflight: {'ok' if self.ok else 'not fit'}: {self.sentence}")
        return "\n".join(lines)


def assess(pods: Sequence[PodInfo]) -> list[Problem]:
    """List what is wrong on each pod, and between them; named is the pod that differs from most others."""
    return [problem for info in pods for problem in _alone(info)] + _together(pods)


def slow(measured: AllReduce, promised_gb_per_s: float) -> Iterable[Problem]:
    """Judge the bus bandwidth between GPUs: an error below a tenth of what is promised.

    Below a quarter it is a warning. The margins are wide, because 16 MiB do not fill a fast network and nodes
    are seldom alone on theirs.
    """
    found = measured.bus_gb_per_s
    if measured.backend == "nccl" and found < promised_gb_per_s / 4:
        text = f"the all-reduce runs at {found} GB/s of the {promised_gb_per_s:g} that nccl.preset promises"
        fix = (
            "with NCCL_DEBUG=INFO look for NET/Socket where NET/IB should be (NCCL_IB_HCA, the rdma "
            "resource, IPC_LOCK), another interface (NCCL_SOCKET_IFNAME), no GDRDMA (NCCL_NET_GDR_LEVEL), or "
            f"a busy network; a slower one that is meant so: nccl.env.{BUS_GB_PER_S}"
        )
        severity: Literal["error", "warning"] = "error" if found < promised_gb_per_s / 10 else "warning"
        yield Problem("all pods", "bandwidth", text, fix, severity)


def errors(problems: Iterable[Problem]) -> list[Problem]:
    """List the problems with which training should not start."""
    return [problem for problem in problems if problem.severity == "error"]


def _alone(info: PodInfo) -> Iterable[Problem]:
    if info.volume_error:
        yield Problem(info.pod, "volume", info.volume_error, "check the claim, and fsGroup of the pod")
    if info.shm_bytes is not None and info.shm_bytes < machine.LEAST_SHM:
        fix = "mount an emptyDir with medium: Memory there (shm.sizeLimit)"
        severity: Literal["error", "warning"] = "error" if info.gpus else "warning"
        yield Problem(info.pod, "shm", f"/dev/shm has {size_text(info.shm_bytes)}", fix, severity)
    yield from _gpus(info)


def _gpus(info: PodInfo) -> Iterable[Problem]:
    promised, there = info.gpus_asked, info.gpus
    usable = there if info.gpus_usable is None else info.gpus_usable
    reason = f": {info.cuda_error}" if info.cuda_error else ""
    if there < promised:
        plural = "s" if promised > 1 else ""
        text = f"{promised} GPU{plural} asked for and {there or 'none'} there{reason}"
        fix = "check the node's driver and device plugin, and the runtimeClass that its GPUs need"
        yield Problem(info.pod, "gpu", text, fix)
    elif reason or usable < promised:
        text = f"{usable or 'none'} of {there} GPU{'s' if there > 1 else ''} can be used by CUDA{reason}"
        fix = "check the driver; on boards with NVSwitch that the fabric manager runs; or take the node out"
        yield Problem(info.pod, "gpu", text, fix)
    if info.c_compiler == "":
        text = "no C compiler, with which Triton builds a piece of the loss on every GPU"
        fix = "use an image with gcc (podtune's has it), or set CC"
        yield Problem(info.pod, "compiler", text, fix)


def _together(pods: Sequence[PodInfo]) -> list[Problem]:
    problems = []
    for key, text in SAME.items():
        groups: dict[str, list[PodInfo]] = {}
        for info in pods:
            groups.setdefault(json.dumps(getattr(info, key), sort_keys=True), []).append(info)
        if len(groups) > 1:
            # The value of most pods is taken for right; between two pods, the master's (it comes first).
            majority = max(groups.values(), key=len)
            odd, right = next(group for group in groups.values() if group is not majority)[0], majority[0]
            detail = _difference(getattr(odd, key), getattr(right, key))
            fix = "start all pods from one template: delete the job and create it again"
            problems.append(Problem(odd.pod, key, f"{text} from {right.pod}'s: {detail}", fix))
    return problems


def _difference(value: object, other: object) -> str:
    if isinstance(value, dict) and isinstance(other, dict):
        names = [name for name in sorted({*value, *other}) if value.get(name) != other.get(name)]
        return ", ".join(f"{name} {value.get(name)} instead of {other.get(name)}" for name in names)
    return f"{str(value)[:60]} instead of {str(other)[:60]}"
