"""PT3: what a pod asks of the cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator

from podtune.cluster.job.manifest import Json, dig
from podtune.cluster.lint.diagnostic import Diagnostic, Place
from podtune.cluster.lint.documents import JOBS
from podtune.cluster.lint.job import Job
from podtune.cluster.lint.quantity import quantity
from podtune.cluster.lint.rules import ALL, WITH_PODS, rule
from podtune.cluster.lint.schema import VARIABLE

MIB, MOST_CORES = 1024**2, 4096
SHM = "/dev/shm"
#: names that people write for nvidia.com/gpu, and that no device plugin offers
NOT_A_GPU = re.compile(r"(nvidia|amd)\.com/(gpus|GPUs?|Gpus?|gpu-count|vgpus|gpu_count)|(nvidia|amd)/gpus?")


@rule("PT301", "warning", fix="mount an emptyDir with medium: Memory at /dev/shm", kinds=JOBS)
def no_shared_memory(job: Job) -> Iterator[Diagnostic]:
    """NCCL between the GPUs of a pod, and DataLoader workers, die with a bus error in 64 MiB of /dev/shm.

    It is no larger unless a memory volume is mounted there.
    """
    for template, container in job.mains():
        place = (*container.path, "volumeMounts")
        if job.kind == "TrainJob" and not container.mounts:
            continue  # the runtime or an override may mount it
        at_shm = [each for each in container.mounts if str(each.get("mountPath")).rstrip("/") == SHM]
        if not at_shm:
            if container.gpus > 1 and not template.pod.get("hostIPC"):
                message = f"nothing is mounted at {SHM} of {{role}}, which has {container.gpus} GPUs"
                yield Diagnostic(place, message)
            continue
        mounted = [each for _, each in template.volumes if each.get("name") == at_shm[0].get("name")]
        volume: Json = next(iter(mounted), {})
        if "emptyDir" in volume and not dig(volume, "emptyDir").get("medium"):
            yield Diagnostic(place, f"{SHM} of {{role}} is on disk: its emptyDir lacks medium: Memory")
        size = quantity(dig(volume, "emptyDir").get("sizeLimit"))
        memory = container.amounts("limits").get("memory")
        if size is not None and memory is not None and size > memory >= MIB:
            message = f"sizeLimit of {SHM} of {{role}} is above the memory limit that it counts into"
            yield Diagnostic(place, message, fix="a smaller sizeLimit")


@rule("PT302", "error", by="hang", fix="accessModes: [ReadWriteMany]", kinds=JOBS)
def volume_for_one_node(job: Job) -> Iterator[Diagnostic]:
    """A job of several pods hangs on a ReadWriteOncePod claim, which is for one of them.

    A ReadWriteOnce claim is attached to one node, and pods that land on another stay in ContainerCreating (a
    warning).
    """
    pods: dict[str, int] = {}
    places: dict[str, Place] = {}
    for template in job.templates:
        for place, volume in template.volumes:
            if claim := dig(volume, "persistentVolumeClaim").get("claimName"):
                pods[claim] = pods.get(claim, 0) + template.replicas
                places.setdefault(claim, place)
    for claim, place in places.items():
        for namespace, modes in job.context.claims.get(claim, []):
            elsewhere = namespace and job.metadata.get("namespace", namespace) != namespace
            if pods[claim] < 2 or elsewhere or {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
                continue
            is_a = ", ".join(modes) or "without accessModes"
            message = f"the claim {claim!r} is {is_a} and {pods[claim]} pods mount it"
            yield Diagnostic(place, message, "error" if modes == ["ReadWriteOncePod"] else "warning")


@rule("PT303", "error", by="operator", fix="make the limit at least the request, of devices equal", kinds=ALL)
def request_differs_from_limit(job: Job) -> Iterator[Diagnostic]:
    """The API server refuses a pod that requests more cpu, memory or storage than its limit.

    Or that requests a device or huge pages without the same limit: neither can be overcommitted.
    """
    for container in job.containers:
        limits = container.amounts("limits")
        for name, wanted in container.amounts("requests").items():
            limit, place = limits.get(name), (*container.resources_path, "requests", name)
            whole = name.startswith("hugepages-") or ("/" in name and "kubernetes.io/" not in name)
            if (whole and limit != wanted) or (limit is not None and wanted > limit):
                says = "has no limit" if limit is None else f"is limited to {limit}"
                message = f"{container.name} of {{role}} requests {wanted} {name} and {says}"
                yield Diagnostic(place, message)


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
            for index, mount in enumerate(container.mounts):
                name = mount.get("name")
                if name not in volumes and not VARIABLE.search(str(name)):
                    message = f"{container.name} of {{role}} mounts {name!r}, which is not among its volumes"
                    yield Diagnostic((*container.path, "volumeMounts", index), message)


@rule("PT307", "error", by="hang", fix="memory: 16Gi, cpu: 8 or 500m", kinds=ALL)
def amount_of_another_unit(job: Job) -> Iterator[Diagnostic]:
    """The kubelet cannot start a container in less than a MiB, and no node has thousands of cores.

    Memory without a unit is bytes, with an m thousandths of them. Cores with a unit are thousands of them,
    so the pod stays Pending.
    """
    for container in job.containers:
        for key in ("limits", "requests"):
            for name, number in container.amounts(key).items():
                written = dig(container.spec, "resources", key)[name]
                place = (*container.resources_path, key, name)
                if name in ("memory", "ephemeral-storage") and key == "limits" and 0 < number < MIB:
                    yield Diagnostic(place, f"{name} is {written}, which is {number:f} bytes")
                elif name == "cpu" and number > MOST_CORES:
                    yield Diagnostic(place, f"{name} is {written}, which is {int(number)} cores")


@rule("PT308", "error", by="hang", fix="nvidia.com/gpu, or as the nodes offer it", kinds=ALL)
def no_such_device(job: Job) -> Iterator[Diagnostic]:
    """A pod that asks for nvidia.com/gpus or the like stays Pending for ever: no device plugin offers it.

    A GPU whose number is empty is none at all (a warning).
    """
    for container in job.containers:
        for key in ("limits", "requests"):
            for name in dig(container.spec, "resources", key):
                if NOT_A_GPU.fullmatch(name):
                    yield Diagnostic((*container.resources_path, key, name), f"no node offers {name}")
