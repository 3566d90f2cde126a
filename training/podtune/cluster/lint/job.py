"""A job as the rules see it: the same few questions for a PyTorchJob, a TrainJob and a runtime, and where
each answer stands in the file."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from podtune.cluster.job import pytorchjob as contract
from podtune.cluster.job import trainjob
from podtune.cluster.lint.command import Launch, launch_of
from podtune.cluster.lint.core import Refusal, refusals
from podtune.cluster.lint.documents import RUNTIMES, Document
from podtune.cluster.lint.quantity import quantity
from podtune.cluster.lint.schema import Violation
from podtune.cluster.lint.targets import Target

Json = dict[str, Any]
Place = tuple[str | int, ...]

#: what device plugins offer a device under; ``nvidia.com/roce_gdr`` and the like are not devices to train on
DEVICE = re.compile(
    r"nvidia\.com/(gpu|gpu\.shared|mig-.+)|amd\.com/gpu(\..+)?|gpu\.intel\.com/(i915|xe)(\..+)?"
    r"|aws\.amazon\.com/neuron(core|device)?|habana\.ai/gaudi.*|google\.com/tpu|huawei\.com/Ascend.*"
    r"|cambricon\.com/.*mlu.*|.*/v?gpu(\.shared)?"
)
GPU_BY_TRAINER = re.compile("gpu", re.IGNORECASE)  # how Trainer itself tells a GPU
ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
NODE = trainjob.NODE


@dataclass(frozen=True)
class JobContainer:
    """One container and its place in the document."""

    spec: Json
    path: Place
    init: bool = False

    @property
    def name(self) -> str:
        return str(self.spec.get("name") or "")

    @property
    def env(self) -> list[tuple[int, Json]]:
        """The entries with their index, so that a finding names the line."""
        return [(index, entry) for index, entry in enumerate(self.spec.get("env") or []) if "name" in entry]

    @property
    def literals(self) -> dict[str, str]:
        """The variables whose values are written in the manifest."""
        return {
            entry["name"]: str(entry.get("value") or "") for _, entry in self.env if "valueFrom" not in entry
        }

    @property
    def resources_path(self) -> Place:
        return (*self.path, "resourcesPerNode" if self.path == ("spec", "trainer") else "resources")

    @cached_property
    def gpus(self) -> int:
        """Devices by limit, or by request where no limit is set."""
        return count_gpus(self.spec, "limits") or count_gpus(self.spec, "requests")

    @property
    def command_path(self) -> Place:
        return (*self.path, "command" if self.spec.get("command") else "args")

    @cached_property
    def words(self) -> list[str]:
        """Command and args."""
        return [str(word) for word in [*(self.spec.get("command") or []), *(self.spec.get("args") or [])]]

    @cached_property
    def launch(self) -> Launch:
        """What command and args start; empty when the image decides."""
        return launch_of(tuple(self.words))


def count_gpus(container: Json, key: str) -> int:
    """Devices under ``resources.limits`` or ``resources.requests``, of any vendor."""
    amounts = (container.get("resources") or {}).get(key) or {}
    numbers = [quantity(value) for name, value in amounts.items() if "/" in name and DEVICE.fullmatch(name)]
    return sum(int(number) for number in numbers if number is not None and 0 < number < 10**6)


@dataclass(frozen=True)
class PodTemplate:
    """The pod template of one replica type, or of a replicated job of a runtime."""

    role: str  # Master, Worker; node for a TrainJob
    replicas: int
    restart_policy: str
    metadata: Json
    pod: Json
    path: Place  # of the replica; the pod spec stands at pod_path
    pod_path: Place
    containers: list[JobContainer]
    main_name: str

    @cached_property
    def main(self) -> JobContainer | None:
        """The container that trains."""
        return next((container for container in self.containers if container.name == self.main_name), None)

    @cached_property
    def init_containers(self) -> list[JobContainer]:
        return [
            JobContainer(spec, (*self.pod_path, "initContainers", index), init=True)
            for index, spec in enumerate(self.pod.get("initContainers") or [])
        ]

    @property
    def metadata_path(self) -> Place:
        return (*self.pod_path[:-1], "metadata")


@dataclass
class Surroundings:
    """What the other documents hold that a job refers to."""

    runtimes: dict[tuple[str, str], Json] = field(default_factory=dict)  # (kind, name) -> cleaned content
    claims: dict[str, list[tuple[str, list[str]]]] = field(default_factory=dict)  # name -> namespace, modes
    selectors: list[Document] = field(default_factory=list)  # that select by the labels of old operators


@dataclass
class Job:
    """A PyTorchJob, a TrainJob or a runtime with the documents around it.

    ``content`` has no value of a wrong type.
    """

    document: Document
    content: Json
    around: Surroundings = field(default_factory=Surroundings)
    violations: list[Violation] = field(default_factory=list)  # of the CRD, by the document as written
    target: Target = field(default_factory=Target)
    trainer: str = ""  # the version of Trainer whose CRD it was held against

    @property
    def kind(self) -> str:
        return self.document.kind

    @property
    def metadata(self) -> Json:
        metadata: Json = self.content.get("metadata") or {}
        return metadata

    @property
    def name(self) -> str:
        """The name, or the shortest that generateName can become."""
        generated = str(self.metadata.get("generateName") or "")
        return str(self.metadata.get("name") or (generated and generated[:58] + "x" * 5))

    @property
    def spec(self) -> Json:
        spec: Json = self.content.get("spec") or {}
        return spec

    @cached_property
    def templates(self) -> list[PodTemplate]:
        """One for each replica type, the Master first; a TrainJob has one."""
        if self.kind in RUNTIMES:
            return list(_replicated(self.content))
        return [_node(self)] if self.kind == "TrainJob" else list(_replicas(self.spec))

    def template(self, role: str) -> PodTemplate | None:
        """The template of a replica type."""
        return next((template for template in self.templates if template.role == role), None)

    @cached_property
    def refusals(self) -> list[Refusal]:
        """What the API server refuses in the pods that this document describes."""
        if self.kind == "TrainJob":
            return []
        return [
            refusal
            for template in self.templates
            for refusal in refusals(template.pod, template.pod_path, kubernetes=self.target.kubernetes)
        ]

    @property
    def pods(self) -> int:
        """How many pods the job has; for a TrainJob 0 where only the cluster knows."""
        return sum(template.replicas for template in self.templates)

    @property
    def processes_per_pod(self) -> int | None:
        """The number that is written for processes of one pod, or None."""
        if self.kind == "TrainJob":
            value = (self.spec.get("trainer") or {}).get("numProcPerNode")
        else:
            value = self.spec.get("nprocPerNode")
        text = str(value)
        return int(text) if text.isdigit() and len(text) < 7 else None

    @property
    def gpus(self) -> int:
        """The most devices of one pod."""
        return max((template.main.gpus for template in self.templates if template.main), default=0)

    @property
    def runtime(self) -> Json | None:
        """The runtime of a TrainJob, from the documents or built in; None if it is only in the cluster."""
        reference = self.spec.get("runtimeRef") or {}
        kind, name = reference.get("kind") or "ClusterTrainingRuntime", reference.get("name")
        own = self.around.runtimes.get((kind, str(name)))
        if own is None and (kind, name) == ("ClusterTrainingRuntime", "torch-distributed"):
            return trainjob.TORCH_DISTRIBUTED
        return own

    @property
    def by_torch(self) -> bool | None:
        """Whether the operator gives the pods torchrun's variables; None where only the cluster knows."""
        if self.kind != "TrainJob":
            return True
        runtime = self.runtime
        if runtime is None:
            return None
        policy = (runtime.get("spec") or {}).get("mlPolicy") or {}
        return policy.get("torch") is not None

    @cached_property
    def torch_environment(self) -> dict[str, str] | None:
        """The variables that every pod gets, with their values; those that differ by pod have the value "?".

        None where only the cluster knows.
        """
        if self.kind == "TrainJob":
            nodes = str(self.pods) if self.pods else "?"
            if self.by_torch is not True or self.spec.get("trainer") is None:
                return None
            of_trainer = ("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NPROC_PER_NODE")
            return {"PET_NNODES": nodes, "JOB_COMPLETION_INDEX": "?", **dict.fromkeys(of_trainer, "?")}
        each: tuple[str, ...]
        env = {"PYTHONUNBUFFERED": "1", "PET_NPROC_PER_NODE": str(self.spec.get("nprocPerNode") or "auto")}
        if self.template("Master") is not None:
            each = (
                "MASTER_PORT",
                "PET_MASTER_PORT",
                "MASTER_ADDR",
                "PET_MASTER_ADDR",
                "RANK",
                "PET_NODE_RANK",
            )
            env |= dict.fromkeys(each, "?")
            env["WORLD_SIZE"] = str(self.pods * (self.processes_per_pod or 1))
        if self.spec.get("elasticPolicy") is None:
            return {**env, "PET_NNODES": str(self.pods)}
        each = ("PET_NNODES", "PET_RDZV_ENDPOINT", "PET_RDZV_BACKEND", "PET_RDZV_ID", "PET_RDZV_CONF")
        return {**env, **dict.fromkeys((*each, "PET_MAX_RESTARTS", "PET_STANDALONE"), "?")}

    def mains(self) -> Iterator[tuple[PodTemplate, JobContainer]]:
        """Each template with its training container."""
        for template in self.templates:
            if template.main is not None:
                yield template, template.main

    @cached_property
    def all_containers(self) -> list[tuple[PodTemplate, JobContainer]]:
        """Every container and init container that this document holds."""
        return [
            (template, container)
            for template in self.templates
            for container in (*template.containers, *template.init_containers)
            if "runtimeRef" not in container.path
        ]


def _replicas(spec: Json) -> Iterator[PodTemplate]:
    replicas = spec.get("pytorchReplicaSpecs") or {}
    for role in (*contract.REPLICA_TYPES, *(name for name in replicas if name not in contract.REPLICA_TYPES)):
        replica = replicas.get(role)
        if replica is None:
            continue
        template = replica.get("template") or {}
        pod = template.get("spec") or {}
        path: Place = ("spec", "pytorchReplicaSpecs", role)
        yield PodTemplate(
            role=role,
            replicas=int(replica.get("replicas", 1)),
            restart_policy=replica.get("restartPolicy") or "OnFailure",
            metadata=template.get("metadata") or {},
            pod=pod,
            path=path,
            pod_path=(*path, "template", "spec"),
            containers=_containers(pod, (*path, "template", "spec")),
            main_name=contract.CONTAINER,
        )


def _containers(pod: Json, path: Place) -> list[JobContainer]:
    return [
        JobContainer(container, (*path, "containers", index))
        for index, container in enumerate(pod.get("containers") or [])
    ]


def replicated_jobs(runtime: Json) -> list[Json]:
    """``spec.template.spec.replicatedJobs`` of a runtime."""
    spec = ((runtime.get("spec") or {}).get("template") or {}).get("spec") or {}
    jobs: list[Json] = spec.get("replicatedJobs") or []
    return jobs


def ancestor(replicated: Json) -> str:
    """The step of a TrainJob that a replicated job stands for: trainer, dataset-initializer ..., or ""."""
    labels = ((replicated.get("template") or {}).get("metadata") or {}).get("labels") or {}
    return str(labels.get(ANCESTOR) or "")


def _replicated(runtime: Json) -> Iterator[PodTemplate]:
    for index, replicated in enumerate(replicated_jobs(runtime)):
        template = ((replicated.get("template") or {}).get("spec") or {}).get("template") or {}
        pod = template.get("spec") or {}
        path: Place = ("spec", "template", "spec", "replicatedJobs", index)
        pod_path = (*path, "template", "spec", "template", "spec")
        yield PodTemplate(
            role=str(replicated.get("name") or ""),
            replicas=1,
            restart_policy=pod.get("restartPolicy") or "OnFailure",
            metadata=template.get("metadata") or {},
            pod=pod,
            path=path,
            pod_path=pod_path,
            containers=_containers(pod, pod_path),
            main_name=NODE if ancestor(replicated) == "trainer" else "",
        )


def _node(job: Job) -> PodTemplate:
    """A TrainJob's template: what spec.trainer says, over the runtime's, where that is in the same file."""
    trainer = job.spec.get("trainer") or {}
    runtime = job.runtime
    pod: Json = {"containers": [{"name": NODE}]}
    metadata: Json = {}
    nodes = 0 if runtime is None else 1
    if runtime is not None:
        nodes = int(((runtime.get("spec") or {}).get("mlPolicy") or {}).get("numNodes") or 1)
        steps = replicated_jobs(runtime)
        step = next((replicated for replicated in steps if ancestor(replicated) == "trainer"), None)
        step = step or next((replicated for replicated in steps if replicated.get("name") == NODE), {})
        template = ((step.get("template") or {}).get("spec") or {}).get("template") or {}
        pod = copy.deepcopy(template.get("spec") or pod)
        metadata = template.get("metadata") or {}
    main = next(
        (container for container in pod.get("containers") or [] if container.get("name") == NODE),
        {"name": NODE},
    )
    # what torch-distributed does by itself is not what this job does
    inherited = {} if runtime is trainjob.TORCH_DISTRIBUTED else main
    main = {**inherited, "name": NODE, "env": trainer.get("env") or []}
    main |= {key: trainer[key] for key in ("image", "command", "args") if key in trainer}
    if "resourcesPerNode" in trainer:
        main["resources"] = trainer["resourcesPerNode"]
    beside = [
        JobContainer(container, ("spec", "runtimeRef"))
        for container in pod.get("containers") or []
        if container.get("name") != NODE
    ]
    return PodTemplate(
        role=NODE,
        replicas=int(trainer["numNodes"] if trainer.get("numNodes") is not None else nodes),
        restart_policy=pod.get("restartPolicy") or "OnFailure",
        metadata=metadata,
        pod=pod,
        path=("spec",),
        pod_path=("spec", "runtimeRef"),
        containers=[JobContainer(main, ("spec", "trainer")), *beside],
        main_name=NODE,
    )
