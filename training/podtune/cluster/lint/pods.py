"""PT3 and PT4: what a pod asks of the cluster, and what it gives away."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal

from podtune.cluster.job.pytorchjob import CONTAINER, LABEL, PORT, PORT_NAME
from podtune.cluster.lint.job import DEVICE, Job, JobContainer, PodTemplate
from podtune.cluster.lint.quantity import quantity
from podtune.cluster.lint.rules import ALL, BOTH, WITH_PODS, Hit, rule
from podtune.cluster.lint.schema import VARIABLE

SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|PASSWORD|PASSWD|SECRET|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS|PAT|NOTIFY_?URL)$",
    re.IGNORECASE,
)
NOT_SECRET = re.compile(
    r"^(EOS|BOS|PAD|UNK|SEP|CLS|MASK|STOP|IMAGE|NUM|MAX|MIN|IGNORE|USE|START|END)_?.*TOKEN$", re.IGNORECASE
)
SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}|sk-[A-Za-z0-9_-]{20,}"
    r"|xox[abp]-[A-Za-z0-9-]{10,}|glpat-[\w-]{20,}|AIza[\w-]{35})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----|\w+://[^/\s:@$]+:[^/\s:@$]+@"
)
ISTIO = "sidecar.istio.io/inject"
OLD_LABELS = ("pytorch-job-name", "pytorch-replica-type", "pytorch-replica-index", "group-name")
MIB, PIB = Decimal(1024**2), Decimal(1024**5)
MOST_CORES = 4096
#: names that people write for nvidia.com/gpu, and that no device plugin offers
NOT_A_GPU = re.compile(r"(nvidia|amd)\.com/(gpus|GPUs?|Gpus?|gpu-count|vgpus|gpu_count)")


@rule(
    "PT301",
    "warning",
    fix="mount an emptyDir with medium: Memory at /dev/shm",
    values="shm.sizeLimit",
    kinds=BOTH,
)
def no_shared_memory(job: Job) -> Iterator[Hit]:
    """/dev/shm is 64 MiB unless a memory volume is mounted there: NCCL between the GPUs of a pod, and
    DataLoader workers, die with a bus error."""
    for template, container in job.mains():
        if job.kind == "TrainJob" and not container.spec.get("volumeMounts"):
            continue  # the runtime or an override may mount it
        mounts = container.spec.get("volumeMounts") or []
        mount = next((each for each in mounts if str(each.get("mountPath")).rstrip("/") == "/dev/shm"), None)
        volumes = {volume.get("name"): volume for volume in template.pod.get("volumes") or []}
        if mount is None:
            if container.gpus > 1 and not template.pod.get("hostIPC"):
                message = f"nothing is mounted at /dev/shm of {{role}}, which has {container.gpus} GPUs"
                yield Hit((*container.path, "volumeMounts"), message, role=template.role)
            continue
        volume = volumes.get(mount.get("name")) or {}
        empty = volume.get("emptyDir")
        if empty is not None and empty.get("medium") in (None, ""):
            message = "/dev/shm of {role} is on disk: its emptyDir lacks medium: Memory"
            yield Hit((*container.path, "volumeMounts"), message, role=template.role)
        size = quantity((empty or {}).get("sizeLimit"))
        memory = quantity(((container.spec.get("resources") or {}).get("limits") or {}).get("memory"))
        if size is not None and memory is not None and size > memory >= MIB:
            message = "sizeLimit of /dev/shm of {role} is above the memory limit that it counts into"
            yield Hit(
                (*container.path, "volumeMounts"), message, fix="a smaller sizeLimit", role=template.role
            )


@rule(
    "PT302",
    "error",
    by="hang",
    fix="accessModes: [ReadWriteMany], of a storage class that can",
    values="persistence.*.accessModes",
    kinds=BOTH,
)
def volume_for_one_node(job: Job) -> Iterator[Hit]:
    """A ReadWriteOncePod claim is for one pod, so the others of the job never start and it hangs; a
    ReadWriteOnce claim is attached to one node, and pods that land on another stay in ContainerCreating (a
    warning)."""
    for claim, uses in _claims(job).items():
        pods = sum(template.replicas for template, _ in uses)
        own = str(job.metadata.get("namespace") or "")
        for namespace, modes in job.around.claims.get(claim, []):
            if pods < 2 or (own and namespace and own != namespace):
                continue
            if {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
                continue
            single = modes == ["ReadWriteOncePod"]
            message = (
                f"the claim {claim!r} is {', '.join(modes) or 'without accessModes'} and {pods} pods mount it"
            )
            yield Hit(uses[0][1], message, None if single else "warning")


def _claims(job: Job) -> dict[str, list[tuple[PodTemplate, tuple[str | int, ...]]]]:
    """The claims that pods of the job share, with the templates that mount them and where."""
    uses: dict[str, list[tuple[PodTemplate, tuple[str | int, ...]]]] = {}
    for template in job.templates:
        for index, volume in enumerate(template.pod.get("volumes") or []):
            claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            if claim:
                uses.setdefault(claim, []).append((template, (*template.pod_path, "volumes", index)))
    return uses


@rule(
    "PT303",
    "error",
    by="operator",
    fix="give limits and requests of a device the same number",
    values="resources",
    kinds=ALL,
)
def gpu_request_differs_from_limit(job: Job) -> Iterator[Hit]:
    """The API server refuses a pod that requests a device without the same limit, as devices cannot be
    overcommitted; limits alone are enough."""
    for template, container in job.all_containers:
        requests, limits = _amounts(container, "requests"), _amounts(container, "limits")
        for name, wanted in requests.items():
            if "/" not in name or "kubernetes.io/" in name:
                continue
            limit = limits.get(name)
            if limit is None or limit != wanted:
                says = f"limited to {limit}" if limit is not None else "has no limit"
                message = f"{container.name} of {{role}} requests {wanted} {name} and {says}"
                yield Hit(container.resources_path, message, role=template.role)


def _amounts(container: JobContainer, key: str) -> dict[str, Decimal]:
    amounts = (container.spec.get("resources") or {}).get(key) or {}
    numbers = {name: quantity(value) for name, value in amounts.items()}
    return {name: number for name, number in numbers.items() if number is not None}


@rule("PT304", "warning", fix="ask for the same GPUs on Master and Worker", values="resources")
def gpus_differ_between_replicas(job: Job) -> Iterator[Hit]:
    """NprocPerNode is one number for all pods, so a replica with fewer GPUs (or another kind) fails or
    idles."""
    asked = {template.role: _devices(container) for template, container in job.mains()}
    if len({tuple(sorted(value.items())) for value in asked.values()}) > 1:
        _, container = list(job.mains())[-1]
        sides = ", ".join(
            f"{role}: {' '.join(f'{n} {kind}' for kind, n in value.items()) or 'none'}"
            for role, value in asked.items()
        )
        yield Hit(container.resources_path, f"GPUs differ between replicas ({sides})")


def _devices(container: JobContainer) -> dict[str, str]:
    resources = container.spec.get("resources") or {}
    return {
        name: str(value)
        for key in ("requests", "limits")
        for name, value in (resources.get(key) or {}).items()
        if DEVICE.fullmatch(name)
    }


@rule("PT305", "error", by="operator", fix="declare the volume, or correct the name", kinds=WITH_PODS)
def mount_without_volume(job: Job) -> Iterator[Hit]:
    """A volumeMount of a volume that the pod does not have: the webhook takes it, and then the API server
    refuses every pod that the operator tries to create."""
    for template in job.templates:
        volumes = {volume.get("name") for volume in template.pod.get("volumes") or []}
        if job.kind != "PyTorchJob":
            claims = (job.spec.get("template") or {}).get("spec") or {}
            if claims.get("volumeClaimPolicies"):
                continue  # JobSet makes volumes of these
        for container in (*template.init_containers, *template.containers):
            for index, mount in enumerate(container.spec.get("volumeMounts") or []):
                name = mount.get("name")
                if name not in volumes and not VARIABLE.search(str(name)):
                    message = f"{container.name} of {{role}} mounts {name!r}, which is not among its volumes"
                    yield Hit((*container.path, "volumeMounts", index), message, role=template.role)


@rule(
    "PT306", "error", by="operator", fix="make the limit at least the request", values="resources", kinds=ALL
)
def request_above_limit(job: Job) -> Iterator[Hit]:
    """The API server refuses a pod that requests more cpu, memory or storage than its limit."""
    for template, container in job.all_containers:
        limits = _amounts(container, "limits")
        for name, wanted in _amounts(container, "requests").items():
            limit = limits.get(name)
            if limit is not None and wanted > limit and ("/" not in name):
                message = f"{container.name} of {{role}} requests more {name} than its limit"
                yield Hit((*container.resources_path, "requests", name), message, role=template.role)


@rule("PT307", "error", by="hang", fix="memory: 16Gi, cpu: 8 or 500m", values="resources", kinds=ALL)
def amount_of_another_unit(job: Job) -> Iterator[Hit]:
    """Memory without a unit is bytes, with an m thousandths of them: the kubelet cannot start a container in
    less than a MiB.

    Cores with a unit are thousands of them, which no node has, so the pod stays Pending.
    """
    for template, container in job.all_containers:
        for key in ("limits", "requests"):
            for name, number in _amounts(container, key).items():
                text = ((container.spec.get("resources") or {}).get(key) or {}).get(name)
                path, message = (*container.resources_path, key, name), ""
                small = number > 0 and number < MIB
                if name == "memory" and small and (key == "limits" or number < 4096):
                    message = f"memory is {text}, which is {_bytes(number)}"
                elif name == "memory" and number > PIB:
                    message = f"memory is {text}, which no node has"
                elif name == "cpu" and number > MOST_CORES:
                    message = f"cpu is {text}, which is {int(number)} cores"
                elif name == "ephemeral-storage" and small and key == "limits":
                    message = f"ephemeral-storage is {text}, which is {_bytes(number)}"
                if message:
                    sure = key == "limits" or number > MOST_CORES
                    yield Hit(path, message, None if sure else "warning", role=template.role)
    for template in job.templates if job.kind != "TrainJob" else ():
        for index, volume in enumerate(template.pod.get("volumes") or []):
            size = quantity((volume.get("emptyDir") or {}).get("sizeLimit"))
            if size is not None and 0 < size < MIB:
                path = (*template.pod_path, "volumes", index, "emptyDir", "sizeLimit")
                message = f"sizeLimit of {volume.get('name')} is {_bytes(size)}"
                yield Hit(path, message, "warning", "sizeLimit: 8Gi", role=template.role)


def _bytes(number: Decimal) -> str:
    return f"{number.normalize():f} bytes" if number >= 1 else "less than a byte"


@rule(
    "PT308", "error", by="hang", fix="nvidia.com/gpu, or the name under which the nodes offer it", kinds=ALL
)
def no_such_device(job: Job) -> Iterator[Hit]:
    """No device plugin offers nvidia.com/gpus or the like: the pod waits for such a node and stays Pending
    for ever.

    A GPU whose number is empty is none at all (a warning).
    """
    for template, container in job.all_containers:
        for key in ("limits", "requests"):
            for name in (container.spec.get("resources") or {}).get(key) or {}:
                if NOT_A_GPU.fullmatch(name):
                    path = (*container.resources_path, key, name)
                    yield Hit(path, f"no node offers {name}", role=template.role)
    for template, container, key, name in _empty_devices(job):
        path = (*container.resources_path, key, name)
        yield Hit(path, f"{name} has no number", "warning", "write how many", role=template.role)


def _empty_devices(job: Job) -> Iterator[tuple[PodTemplate, JobContainer, str, str]]:
    """Devices without an amount; the cleaned content has no empty values, so these are in the document
    only."""
    for template, container in job.all_containers:
        raw: object = job.document.content
        for step in container.resources_path:
            if isinstance(raw, dict):
                raw = raw.get(step)
            elif isinstance(raw, list) and isinstance(step, int) and step < len(raw):
                raw = raw[step]
            else:
                raw = None
        if not isinstance(raw, dict):
            continue
        for key in ("limits", "requests"):
            amounts = raw.get(key)
            for name, value in amounts.items() if isinstance(amounts, dict) else ():
                if value is None and isinstance(name, str) and "/" in name:
                    yield template, container, key, name


@rule("PT401", "error", by="hang", fix="give each job a port of its own", values="port, hostNetwork")
def host_network_port(job: Job) -> Iterator[Hit]:
    """With hostNetwork and without dnsPolicy ClusterFirstWithHostNet the master's name does not resolve, and
    the workers hang waiting for it.

    On the default port 23456 two jobs on one node clash (a warning).
    """
    for template in job.templates:
        if not template.pod.get("hostNetwork"):
            continue
        path = (*template.pod_path, "hostNetwork")
        if template.pod.get("dnsPolicy") not in ("ClusterFirstWithHostNet", "None") and job.pods > 1:
            message = (
                "hostNetwork of {role} without dnsPolicy: ClusterFirstWithHostNet: Services do not resolve"
            )
            sure = template.role == "Worker" and job.template("Master") is not None
            severity = None if sure else "warning"
            yield Hit(path, message, severity, "dnsPolicy: ClusterFirstWithHostNet", template.role)  # type: ignore[arg-type]
        if _port(template) == PORT and job.pods > 1:
            message = f"hostNetwork of {{role}} with the default port {PORT}"
            yield Hit(path, message, "warning", role=template.role)


def _port(template: PodTemplate) -> int:
    ports = next(
        (
            container.spec.get("ports") or []
            for container in template.containers
            if container.name == CONTAINER
        ),
        [],
    )
    number = next((port.get("containerPort") for port in ports if port.get("name") == PORT_NAME), PORT)
    return int(number or PORT)


@rule("PT402", "warning", fix="name a version or a digest", values="image.tag, image.digest", kinds=ALL)
def image_not_pinned(job: Job) -> Iterator[Hit]:
    """An image without a tag, or of the tag latest, is another one at each restart, and pods of one job may
    differ.
    """
    loose: dict[str, tuple[str | int, ...]] = {}
    for _, container in job.all_containers:
        image = str(container.spec.get("image") or "")
        fixed = "@" in image or "$" in image or "{" in image
        if image and not fixed and (":" not in image.rsplit("/", 1)[-1] or image.endswith(":latest")):
            loose.setdefault(image, (*container.path, "image"))
    if loose:
        names = (
            f"the image {next(iter(loose))} is" if len(loose) == 1 else f"the images {', '.join(loose)} are"
        )
        yield Hit(next(iter(loose.values())), f"{names} not pinned")


@rule(
    "PT403",
    "warning",
    fix="put it into a Secret and refer to it: valueFrom.secretKeyRef",
    values="envFrom",
    kinds=ALL,
)
def secret_in_plain_text(job: Job) -> Iterator[Hit]:
    """A token or password as a literal is readable by everybody who may read the job, its pods, or the
    repository."""
    for template, container in job.all_containers:
        for index, entry in container.env:
            name, value = str(entry["name"]), str(entry.get("value") or "")
            if secret(name, value):
                path = (*container.path, "env", index)
                yield Hit(path, f"{name} holds a secret in plain text", role=template.role)
        for key in ("command", "args"):
            for index, word in enumerate(container.spec.get(key) or []):
                if SECRET_VALUE.search(str(word)):
                    path = (*container.path, key, index)
                    yield Hit(path, f"{key} holds a secret in plain text", role=template.role)
    templates = [] if job.kind == "TrainJob" else job.templates
    places = [(("metadata",), job.metadata), *((each.metadata_path, each.metadata) for each in templates)]
    for path, metadata in places:
        for name, value in (metadata.get("annotations") or {}).items():
            if SECRET_VALUE.search(str(value)):
                yield Hit((*path, "annotations", name), f"the annotation {name} holds a secret in plain text")


def secret(name: str, value: str) -> bool:
    """Whether a variable of this name and value is a secret written down."""
    if SECRET_VALUE.search(value):
        return True
    named = SECRET_NAME.search(name) and not NOT_SECRET.match(name)
    if not named or len(value) < 6 or VARIABLE.search(value) or value.startswith(("/", "$", "<")):
        return False
    if re.fullmatch(r"[\d.]+|true|false|none|null|changeme", value, re.IGNORECASE):
        return False
    # a name of an object, as in HF_SECRET: my-secret-name, rather than what is in it
    return not (
        re.fullmatch(r"[a-z]+([-.][a-z0-9]+)+", value) and name.upper().endswith(("SECRET", "CREDENTIALS"))
    )


@rule(
    "PT404",
    "note",
    fix=f'{ISTIO}: "false" as a label or annotation of the template',
    values="podLabels, podAnnotations",
)
def istio_sidecar(job: Job) -> Iterator[Hit]:
    """Where Istio injects its proxy, that may never end, so neither does the job; and it cuts the collectives
    off.

    Harmless without Istio.
    """
    for template in job.templates:
        values = {
            str((template.metadata.get(key) or {}).get(ISTIO, "")).lower()
            for key in ("labels", "annotations")
        }
        path = (*template.path, "template", "metadata")
        if "true" in values:
            yield Hit(path, "{role} asks for Istio's sidecar", "warning", role=template.role)
        elif "false" not in values:
            yield Hit(path, "{role} does not turn Istio's sidecar off", role=template.role)


@rule("PT405", "warning", fix=f"select by {LABEL}job-name, replica-type and replica-index", kinds=BOTH)
def old_labels(job: Job) -> Iterator[Hit]:
    """The labels pytorch-job-name and the like are gone since operator 1.5: a selector with them finds no
    pod."""
    for template in job.templates:
        own = template.metadata.get("labels") or {}
        text = str({key: template.pod.get(key) for key in ("affinity", "topologySpreadConstraints")})
        for label in OLD_LABELS:
            if f"'{label}'" in text and label not in own:
                path = (*template.pod_path, "affinity")
                yield Hit(path, f"{{role}} selects pods by {label}", role=template.role)
    labels = [template.metadata.get("labels") or {} for template in job.templates]
    if job.around.selectors and not any("pytorch-job-name" in keys for keys in labels):
        for other in job.around.selectors:
            if f"'{job.name}'" in str(other.content):
                yield Hit((), f"{other.kind} {other.name} selects pods by pytorch-job-name")


@rule(
    "PT406",
    "warning",
    fix="drop it; training needs none of this",
    values="securityContext, podSecurityContext",
    kinds=ALL,
)
def privileged(job: Job) -> Iterator[Hit]:
    """A privileged container, or one that shares the host's processes or its root folder, is root on the
    node."""
    for template in job.templates if job.kind != "TrainJob" else ():
        if template.pod.get("hostPID"):
            yield Hit((*template.pod_path, "hostPID"), "{role} sets hostPID", role=template.role)
        if template.pod.get("hostIPC"):
            yield Hit((*template.pod_path, "hostIPC"), "{role} sets hostIPC", "note", role=template.role)
        for index, volume in enumerate(template.pod.get("volumes") or []):
            if str((volume.get("hostPath") or {}).get("path")) == "/":
                path = (*template.pod_path, "volumes", index)
                yield Hit(path, "{role} mounts the node's root folder", role=template.role)
    for template, container in job.all_containers:
        if (container.spec.get("securityContext") or {}).get("privileged"):
            path = (*container.path, "securityContext")
            yield Hit(path, f"{container.name} is privileged", role=template.role)
