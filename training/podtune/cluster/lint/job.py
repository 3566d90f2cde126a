"""A job as the rules see it: the same few questions for a PyTorchJob and a TrainJob, and where each answer
stands in the file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from podtune.cluster.job import pytorchjob as contract
from podtune.cluster.job import trainjob
from podtune.cluster.lint.documents import Document
from podtune.cluster.lint.schema import Problem

Json = dict[str, Any]
Place = tuple[str | int, ...]

GPU = re.compile(r"(nvidia\.com|amd\.com|gpu\.intel\.com)/")
SHELLS = {"sh", "bash", "dash", "ash", "zsh"}
WRAPPERS = {
    "exec",
    "tini",
    "dumb-init",
    "nohup",
    "time",
    "env",
    "stdbuf",
    "numactl",
    "nice",
    "uv",
    "poetry",
    "run",
    "--",
}
LAUNCHERS = {
    **dict.fromkeys(("torchrun", "torch.distributed.run", "torch.distributed.launch"), "torchrun"),
    **dict.fromkeys(("accelerate", "accelerate.commands.launch"), "accelerate"),
    **dict.fromkeys(("deepspeed", "deepspeed.launcher.runner"), "deepspeed"),
    **dict.fromkeys(("trl", "trl.cli"), "trl"),
    **dict.fromkeys(("podtune", "podtune.cli"), "podtune"),
}


@dataclass(frozen=True)
class Launch:
    """How a container starts its program. ``kind`` is a launcher's name, "python", or "" where that cannot be
    told.
    """

    kind: str
    argv: tuple[str, ...]  # of the launcher or python
    script: str = ""  # what a shell was given, if one is PID 1
    commands: int = 1  # simple commands in that script
    replaced: bool = True  # nothing stands between PID 1 and the program, or exec removes it


@dataclass(frozen=True)
class Container:
    """One container and its place in the document."""

    spec: Json
    path: Place

    @property
    def env(self) -> list[tuple[int, Json]]:
        """The entries with their index, so that a finding names the line."""
        return [(index, entry) for index, entry in enumerate(self.spec.get("env") or []) if "name" in entry]

    @property
    def gpus(self) -> int:
        """GPUs by limit, or by request where no limit is set."""
        return count_gpus(self.spec, "limits") or count_gpus(self.spec, "requests")

    @cached_property
    def launch(self) -> Launch:
        """What command and args start; empty when the image decides."""
        return launch_of(
            [str(word) for word in [*(self.spec.get("command") or []), *(self.spec.get("args") or [])]]
        )


def count_gpus(container: Json, key: str) -> int:
    """GPUs under ``resources.limits`` or ``resources.requests``."""
    amounts = (container.get("resources") or {}).get(key) or {}
    return sum(int(value) for name, value in amounts.items() if GPU.match(name) and str(value).isdigit())


def launch_of(argv: list[str]) -> Launch:
    """Find the launcher in a container's command, through a shell and the usual wrappers."""
    words = _unwrapped(argv)
    if words and PurePosixPath(words[0]).name in SHELLS:
        script = next((words[i + 1] for i, word in enumerate(words[:-1]) if re.fullmatch(r"-\w*c", word)), "")
        return _of_script(script) if script else Launch("", tuple(words))
    return _of_words(words)


def _of_script(script: str) -> Launch:
    joined = script.replace("\\\n", " ")
    simple = [part.strip() for part in re.split(r"\n|;|&&|\|\||\|", joined)]
    simple = [part for part in simple if part and not part.startswith("#")]
    found = Launch("", ())
    for part in simple:
        try:
            words = shlex.split(part)
        except ValueError:
            words = part.split()
        launch = _of_words(_unwrapped(words))
        if launch.kind:
            found = Launch(launch.kind, launch.argv, script, len(simple), bool(words) and words[0] == "exec")
    return found if found.kind else Launch("", (), script, len(simple), "exec " in script)


def _unwrapped(words: list[str]) -> list[str]:
    """Without leading wrappers and assignments: ``env A=1 tini -g -- torchrun`` starts ``torchrun``."""
    start = 0
    while start < len(words) and (
        PurePosixPath(words[start]).name in WRAPPERS or re.match(r"\w+=|-\w*$|--$", words[start])
    ):
        start += 1
    return words[start:]


def _of_words(words: list[str]) -> Launch:
    if not words:
        return Launch("", ())
    program = PurePosixPath(words[0]).name
    if re.fullmatch(r"python[\d.]*", program):
        module = next((words[i + 1] for i, word in enumerate(words[:-1]) if word == "-m"), "")
        script = next((word for word in words[1:] if not word.startswith("-")), "")
        return Launch(LAUNCHERS.get(module) or ("python" if module or script else ""), tuple(words))
    return Launch(LAUNCHERS.get(program, ""), tuple(words))


@dataclass(frozen=True)
class Template:
    """The pod template of one replica type."""

    role: str  # Master, Worker; node for a TrainJob
    replicas: int
    restart_policy: str
    metadata: Json
    pod: Json
    path: Place  # of the replica; the pod spec stands at pod_path
    pod_path: Place
    containers: list[Container]

    @property
    def main(self) -> Container | None:
        """The container that trains."""
        name = trainjob.NODE if self.role == trainjob.NODE else contract.CONTAINER
        return next((one for one in self.containers if one.spec.get("name") == name), None)


@dataclass
class Job:
    """A PyTorchJob or TrainJob with the documents around it. ``content`` has no value of a wrong type."""

    document: Document
    content: Json
    others: list[Document] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)  # what the schema says of the document as written

    @property
    def kind(self) -> str:
        return self.document.kind

    @property
    def name(self) -> str:
        return str((self.content.get("metadata") or {}).get("name") or "")

    @property
    def spec(self) -> Json:
        spec: Json = self.content.get("spec") or {}
        return spec

    @cached_property
    def templates(self) -> list[Template]:
        """One for each replica type, the Master first; a TrainJob has one."""
        return [_node(self)] if self.kind == "TrainJob" else list(_replicas(self.spec))

    def template(self, role: str) -> Template | None:
        """The template of a replica type."""
        return next((one for one in self.templates if one.role == role), None)

    @property
    def pods(self) -> int:
        """How many pods the job has."""
        return sum(template.replicas for template in self.templates)

    @property
    def processes(self) -> int:
        """How many processes are announced; auto, cpu and gpu count as the GPUs of a pod, at least one."""
        gpus = max((one.main.gpus for one in self.templates if one.main), default=0)
        if self.kind == "TrainJob":
            text = str((self.spec.get("trainer") or {}).get("numProcPerNode") or "")
        else:
            text = str(self.spec.get("nprocPerNode") or "")
        return self.pods * (int(text) if text.isdigit() else max(1, gpus))

    @property
    def gpus(self) -> int:
        """GPUs of all pods."""
        return sum(one.replicas * one.main.gpus for one in self.templates if one.main)

    def mains(self) -> Iterator[tuple[Template, Container]]:
        """Each template with its training container."""
        for template in self.templates:
            if template.main is not None:
                yield template, template.main

    def all_containers(self) -> Iterator[Container]:
        """Every container and init container of every template."""
        for template in self.templates:
            yield from template.containers
            for index, spec in enumerate(template.pod.get("initContainers") or []):
                yield Container(spec, (*template.pod_path, "initContainers", index))


def _replicas(spec: Json) -> Iterator[Template]:
    replicas = spec.get("pytorchReplicaSpecs") or {}
    for role in (*contract.REPLICA_TYPES, *(name for name in replicas if name not in contract.REPLICA_TYPES)):
        replica = replicas.get(role)
        if replica is None:
            continue
        template = replica.get("template") or {}
        pod = template.get("spec") or {}
        path: Place = ("spec", "pytorchReplicaSpecs", role)
        pod_path = (*path, "template", "spec")
        yield Template(
            role=role,
            replicas=replica.get("replicas", 1),
            restart_policy=replica.get("restartPolicy") or "OnFailure",
            metadata=template.get("metadata") or {},
            pod=pod,
            path=path,
            pod_path=pod_path,
            containers=[
                Container(one, (*pod_path, "containers", index))
                for index, one in enumerate(pod.get("containers") or [])
            ],
        )


def _node(job: Job) -> Template:
    """A TrainJob's template: what spec.trainer says, over the runtime's, where that is in the same file."""
    trainer = job.spec.get("trainer") or {}
    try:
        (pod, *_) = trainjob.pods(job.content, [other.content for other in job.others])
        spec, metadata = pod.spec, {"labels": dict(pod.labels), "annotations": dict(pod.annotations)}
    # the runtime is in the cluster, or too broken to merge: the rules see spec.trainer alone
    except Exception:
        spec, metadata = {"containers": [{"name": trainjob.NODE}]}, {}
    main = next(
        (one for one in spec["containers"] if one.get("name") == trainjob.NODE), {"name": trainjob.NODE}
    )
    main = {**main, **{key: trainer[key] for key in ("image", "command", "args") if key in trainer}}
    main = {**main, "env": trainer.get("env") or []}  # without what Trainer injects
    others = [
        Container(one, ("spec", "runtimeRef"))
        for one in spec["containers"]
        if one.get("name") != trainjob.NODE
    ]
    return Template(
        role=trainjob.NODE,
        replicas=trainer.get("numNodes") or 1,
        restart_policy=spec.get("restartPolicy") or "OnFailure",
        metadata=metadata,
        pod=spec,
        path=("spec",),
        pod_path=("spec", "runtimeRef"),
        containers=[Container(main, ("spec", "trainer")), *others],
    )
