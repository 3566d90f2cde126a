"""Pod templates and their containers, with the place of each in the document."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property

from podtune.cluster.job import pytorchjob as contract
from podtune.cluster.job.manifest import Json, dig
from podtune.cluster.job.trainjob import ANCESTOR, NODE
from podtune.cluster.lint.command import Launch, launch_of
from podtune.cluster.lint.diagnostic import Place
from podtune.cluster.lint.quantity import quantity

#: what device plugins offer a device under; ``nvidia.com/roce_gdr`` and the like are not devices to train on
DEVICE = re.compile(
    r"nvidia\.com/(gpu|gpu\.shared|mig-.+)|amd\.com/gpu(\..+)?|gpu\.intel\.com/(i915|xe)(\..+)?"
    r"|aws\.amazon\.com/neuron(core|device)?|habana\.ai/gaudi.*|google\.com/tpu|huawei\.com/Ascend.*"
    r"|cambricon\.com/.*mlu.*|.*/v?gpu(\.shared)?"
)


@dataclass(frozen=True)
class JobContainer:
    """One container and its place in the document."""

    spec: Json
    path: Place

    @property
    def name(self) -> str:
        return str(self.spec.get("name") or "")

    @property
    def image(self) -> str:
        return str(self.spec.get("image") or "")

    @property
    def env(self) -> list[tuple[int, Json]]:
        """The entries with their index, so that a finding names the line."""
        return [(index, entry) for index, entry in enumerate(self.spec.get("env") or []) if "name" in entry]

    @cached_property
    def literals(self) -> dict[str, str]:
        """The variables, with what is written in the manifest, or "" where the value is from elsewhere."""
        return {entry["name"]: str(entry.get("value") or "") for _, entry in self.env}

    @property
    def mounts(self) -> list[Json]:
        return self.spec.get("volumeMounts") or []

    @property
    def ports(self) -> list[Json]:
        return self.spec.get("ports") or []

    def amounts(self, key: str) -> dict[str, Decimal]:
        """``resources.limits`` or ``resources.requests`` as numbers."""
        numbers = {name: quantity(value) for name, value in dig(self.spec, "resources", key).items()}
        return {name: number for name, number in numbers.items() if number is not None}

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
        return [str(word) for key in ("command", "args") for word in self.spec.get(key) or []]

    @cached_property
    def launch(self) -> Launch:
        """The launcher that command and args start; of no kind where the image decides."""
        return launch_of(tuple(self.words))


def count_gpus(container: Json, key: str) -> int:
    """Devices under ``resources.limits`` or ``resources.requests``, of any vendor."""
    amounts = dig(container, "resources", key)
    numbers = [quantity(value) for name, value in amounts.items() if "/" in name and DEVICE.fullmatch(name)]
    return sum(int(number) for number in numbers if number is not None and 0 < number < 10**6)


@dataclass(frozen=True)
class PodTemplate:
    """The pod template of one replica type, or of a replicated job of a runtime."""

    role: str  # Master, Worker; node for a TrainJob, the pod for a Job
    replicas: int
    template: Json  # metadata and spec
    path: Place  # of the replica
    pod_path: Place  # of the pod's spec
    main_name: str
    of_replica: str = ""  # the restartPolicy of a PyTorchJob's replica
    of_trainjob: list[JobContainer] | None = None  # what spec.trainer and its runtime make of a TrainJob

    @property
    def metadata(self) -> Json:
        return dig(self.template, "metadata")

    @property
    def pod(self) -> Json:
        return dig(self.template, "spec")

    @property
    def restart_policy(self) -> str:
        return self.of_replica or self.pod.get("restartPolicy") or "OnFailure"

    @cached_property
    def containers(self) -> list[JobContainer]:
        return self._containers("containers") if self.of_trainjob is None else self.of_trainjob

    @cached_property
    def main(self) -> JobContainer | None:
        """The container that trains."""
        return next((container for container in self.containers if container.name == self.main_name), None)

    @cached_property
    def init_containers(self) -> list[JobContainer]:
        return self._containers("initContainers")

    def _containers(self, key: str) -> list[JobContainer]:
        specs = self.pod.get(key) or []
        return [JobContainer(spec, (*self.pod_path, key, index)) for index, spec in enumerate(specs)]

    @property
    def metadata_path(self) -> Place:
        return (*self.pod_path[:-1], "metadata")

    @property
    def volumes(self) -> list[tuple[Place, Json]]:
        """The volumes, each with its place."""
        volumes = enumerate(self.pod.get("volumes") or [])
        return [((*self.pod_path, "volumes", index), volume) for index, volume in volumes]


def replica_templates(spec: Json) -> Iterator[PodTemplate]:
    """The templates of a PyTorchJob's spec, the Master first."""
    replicas = dig(spec, "pytorchReplicaSpecs")
    for role in sorted(replicas, key=lambda role: (role not in contract.REPLICA_TYPES, role)):
        path: Place = ("spec", "pytorchReplicaSpecs", role)
        yield PodTemplate(
            role=role,
            replicas=int(replicas[role].get("replicas", 1)),
            template=dig(replicas[role], "template"),
            path=path,
            pod_path=(*path, "template", "spec"),
            main_name=contract.CONTAINER,
            of_replica=replicas[role].get("restartPolicy") or "OnFailure",
        )


def job_template(spec: Json) -> PodTemplate:
    """The template of a Job's spec; its first container with a launcher trains, else the first."""
    parallelism = int(spec.get("parallelism", 1))
    path: Place = ("spec", "template")
    template = PodTemplate(
        role="the pod",
        replicas=int(spec.get("completions", parallelism)),
        template=dig(spec, "template"),
        path=path,
        pod_path=(*path, "spec"),
        main_name="",
    )
    first = [*(each for each in template.containers if each.launch.kind), *template.containers]
    return replace(template, main_name=first[0].name if first else "")


def replicated_jobs(runtime: Json) -> list[Json]:
    """``spec.template.spec.replicatedJobs`` of a runtime."""
    return dig(runtime, "spec", "template", "spec").get("replicatedJobs") or []


def ancestor(replicated: Json) -> str:
    """The step of a TrainJob that a replicated job stands for: trainer, dataset-initializer ..., or ""."""
    return str(dig(replicated, "template", "metadata", "labels").get(ANCESTOR) or "")


def pod_of(replicated: Json) -> Json:
    """The pod's spec of a replicated job."""
    return dig(replicated, "template", "spec", "template", "spec")


def container_names(replicated: Json) -> set[str]:
    """Names of the containers and init containers of a replicated job."""
    pod = pod_of(replicated)
    return {str(each.get("name")) for key in ("containers", "initContainers") for each in pod.get(key) or []}


def runtime_templates(runtime: Json) -> Iterator[PodTemplate]:
    """The templates of a runtime's replicated jobs."""
    for index, replicated in enumerate(replicated_jobs(runtime)):
        path: Place = ("spec", "template", "spec", "replicatedJobs", index)
        yield PodTemplate(
            role=str(replicated.get("name") or ""),
            replicas=1,
            template=dig(replicated, "template", "spec", "template"),
            path=path,
            pod_path=(*path, "template", "spec", "template", "spec"),
            main_name=NODE if ancestor(replicated) == "trainer" else "",
        )
