"""PT3: what a pod asks of the cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal

from podtune.cluster.job.manifest import Json, dig
from podtune.cluster.lint.diagnostic import Diagnostic, Place
from podtune.cluster.lint.documents import JOBS
from podtune.cluster.lint.job import Job
from podtune.cluster.lint.quantity import quantity
from podtune.cluster.lint.rules import ALL, WITH_PODS, rule
from podtune.cluster.lint.schema import VARIABLE
from podtune.cluster.lint.templates import JobContainer, PodTemplate

MIB, PIB = Decimal(1024**2), Decimal(1024**5)
MOST_CORES = 4096
SHM = "/dev/shm"
#: names that people write for nvidia.com/gpu, and that no device plugin offers
NOT_A_GPU = re.compile(r"(nvidia|amd)\.com/(gpus|GPUs?|Gpus?|gpu-count|vgpus|gpu_count)|(nvidia|amd)/gpus?")


@rule("PT301", "warning", fix="mount an emptyDir with medium: Memory at /dev/shm", kinds=JOBS)
def no_shared_memory(job: Job) -> Iterator[Diagnostic]:
    """NCCL between the GPUs of a pod, and DataLoader workers, die with a bus error in 64 MiB of /dev/shm.

    It is no larger unless a memory volume is mounted there.
    """
    for template, container in job.mains():
        mounts, place = container.spec.get("volumeMounts") or [], (*container.path, "volumeMounts")
        if job.kind == "TrainJob" and not mounts:
            continue  # the runtime or an override may mount it
        mount = next((each for each in mounts if str(each.get("mountPath")).rstrip("/") == SHM), None)
        if mount is None:
            if container.gpus > 1 and not template.pod.get("hostIPC"):
                message = f"nothing is mounted at {SHM} of {{role}}, which has {container.gpus} GPUs"
                yield Diagnostic(place, message)
            continue
        volumes = {volume.get("name"): volume for _, volume in template.volumes}
        empty = (volumes.get(mount.get("name")) or {}).get("emptyDir")
        if empty is not None and empty.get("medium") in (None, ""):
            yield Diagnostic(place, f"{SHM} of {{role}} is on disk: its emptyDir lacks medium: Memory")
        size, memory = (
            quantity(dig(empty).get("sizeLimit")),
            quantity(container.amounts("limits").get("memory")),
        )
        if size is not None and memory is not None and size > memory >= MIB:
            message = f"sizeLimit of {SHM} of {{role}} is above the memory limit that it counts into"
            yield Diagnostic(place, message, fix="a smaller sizeLimit")


@rule(
    "PT302", "error", by="hang", fix="accessModes: [ReadWriteMany], of a storage class that can", kinds=JOBS
)
def volume_for_one_node(job: Job) -> Iterator[Diagnostic]:
    """A job of several pods hangs on a ReadWriteOncePod claim, which is for one of them.

    A ReadWriteOnce claim is attached to one node, and pods that land on another stay in ContainerCreating (a
    warning).
    """
    own = str(job.metadata.get("namespace") or "")
    for claim, uses in _claims(job).items():
        pods = sum(template.replicas for template, _ in uses)
        for namespace, modes in job.context.claims.get(claim, []):
            elsewhere = own and namespace and own != namespace
            if pods < 2 or elsewhere or {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
                continue
            is_a = ", ".join(modes) or "without accessModes"
            message = f"the claim {claim!r} is {is_a} and {pods} pods mount it"
            yield Diagnostic(uses[0][1], message, "error" if modes == ["ReadWriteOncePod"] else "warning")


def _claims(job: Job) -> dict[str, list[tuple[PodTemplate, Place]]]:
    """The claims of the job's pods, with the templates that mount each and where."""
    uses: dict[str, list[tuple[PodTemplate, Place]]] = {}
    for template in job.templates:
        for place, volume in template.volumes:
            if claim := dig(volume, "persistentVolumeClaim").get("claimName"):
                uses.setdefault(claim, []).append((template, place))
    return uses


@rule("PT303", "error", by="operator", fix="give limits and requests of a device the same number", kinds=ALL)
def gpu_request_differs_from_limit(job: Job) -> Iterator[Diagnostic]:
    """The API server refuses a pod that requests a device or huge pages without the same limit.

    Neither can be overcommitted; limits alone are enough.
    """
    for container in job.containers:
        limits = _amounts(container, "limits")
        for name, wanted in _amounts(container, "requests").items():
            limit = limits.get(name)
            device = "/" in name and "kubernetes.io/" not in name
            if (device or name.startswith("hugepages-")) and limit != wanted:
                says = f"is limited to {limit}" if limit is not None else "has no limit"
                message = f"{container.name} of {{role}} requests {wanted} {name} and {says}"
                yield Diagnostic(container.resources_path, message)


def _amounts(container: JobContainer, key: str) -> dict[str, Decimal]:
    numbers = {name: quantity(value) for name, value in container.amounts(key).items()}
    return {name: number for name, number in numbers.items() if number is not None}


@rule("PT305", "error", by="operator", fix="declare the volume, or correct the name", kinds=WITH_PODS)
def mount_without_volume(job: Job) -> Iterator[Diagnostic]:
    """The API server refuses every pod with a volumeMount of a volume that the pod does not have.

    The webhook takes the job.
    """
    if dig(job.spec, "template", "spec").get("volumeClaimPolicies"):
        return  # JobSet makes volumes of a runtime's
    for template in job.templates:
        volumes = {volume.get("name") for _, volume in template.volumes}
        for container in (*template.init_containers, *template.containers):
            for index, mount in enumerate(container.spec.get("volumeMounts") or []):
                name = mount.get("name")
                if name not in volumes and not VARIABLE.search(str(name)):
                    message = f"{container.name} of {{role}} mounts {name!r}, which is not among its volumes"
                    yield Diagnostic((*container.path, "volumeMounts", index), message)


@rule("PT306", "error", by="operator", fix="make the limit at least the request", kinds=ALL)
def request_above_limit(job: Job) -> Iterator[Diagnostic]:
    """The API server refuses a pod that requests more cpu, memory or storage than its limit."""
    for container in job.containers:
        limits = _amounts(container, "limits")
        for name, wanted in _amounts(container, "requests").items():
            if "/" not in name and wanted > limits.get(name, wanted):
                message = f"{container.name} of {{role}} requests more {name} than its limit"
                yield Diagnostic((*container.resources_path, "requests", name), message)


@rule("PT307", "error", by="hang", fix="memory: 16Gi, cpu: 8 or 500m", kinds=ALL)
def amount_of_another_unit(job: Job) -> Iterator[Diagnostic]:
    """The kubelet cannot start a container in less than a MiB, and no node has thousands of cores.

    Memory without a unit is bytes, with an m thousandths of them. Cores with a unit are thousands of them,
    so the pod stays Pending.
    """
    for container in job.containers:
        for key in ("limits", "requests"):
            for name, number in _amounts(container, key).items():
                if means := _meaning(name, number, limit=key == "limits"):
                    message = f"{name} is {container.amounts(key)[name]}, which {means}"
                    sure = key == "limits" or number > MOST_CORES
                    place = (*container.resources_path, key, name)
                    yield Diagnostic(place, message, "error" if sure else "warning")
    for template in job.own_templates:
        for place, volume in template.volumes:
            size = quantity(dig(volume, "emptyDir").get("sizeLimit"))
            if size is not None and 0 < size < MIB:
                message = f"sizeLimit of {volume.get('name')} is {_bytes(size)}"
                yield Diagnostic((*place, "emptyDir", "sizeLimit"), message, "warning", "sizeLimit: 8Gi")


def _meaning(name: str, number: Decimal, *, limit: bool) -> str:
    """The sentence's end for an amount that nobody means, or ""."""
    small = 0 < number < MIB
    if name == "memory" and small and (limit or number < 4096):
        return f"is {_bytes(number)}"
    if name == "ephemeral-storage" and small and limit:
        return f"is {_bytes(number)}"
    if name == "memory" and number > PIB:
        return "no node has"
    return f"is {int(number)} cores" if name == "cpu" and number > MOST_CORES else ""


def _bytes(number: Decimal) -> str:
    return f"{number.normalize():f} bytes" if number >= 1 else "less than a byte"


@rule(
    "PT308", "error", by="hang", fix="nvidia.com/gpu, or the name under which the nodes offer it", kinds=ALL
)
def no_such_device(job: Job) -> Iterator[Diagnostic]:
    """A pod that asks for nvidia.com/gpus or the like stays Pending for ever: no device plugin offers it.

    A GPU whose number is empty is none at all (a warning).
    """
    for container in job.containers:
        written = _as_written(job.document.content, container.resources_path)
        for key in ("limits", "requests"):
            place = (*container.resources_path, key)
            for name in container.amounts(key):
                if NOT_A_GPU.fullmatch(name):
                    yield Diagnostic((*place, name), f"no node offers {name}")
            amounts = written.get(key)
            for name, value in amounts.items() if isinstance(amounts, dict) else ():
                if value is None and "/" in name:
                    yield Diagnostic((*place, name), f"{name} has no number", "warning", "write how many")


def _as_written(content: Json, place: Place) -> Json:
    """The mapping at ``place``, with the empty values that the cleaned content has no more."""
    raw: object = content
    for step in place:
        if isinstance(raw, list) and isinstance(step, int):
            raw = raw[step] if step < len(raw) else None
        else:
            raw = raw.get(step) if isinstance(raw, dict) else None
    return raw if isinstance(raw, dict) else {}
