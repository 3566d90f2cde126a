"""PT3 and PT4: what a pod asks of the cluster, and what it gives away."""

from __future__ import annotations

import re
from collections.abc import Iterator

from podtune.cluster.job.pytorchjob import CONTAINER, LABEL, PORT, PORT_NAME
from podtune.cluster.lint.job import GPU, Container, Job, Template, count_gpus
from podtune.cluster.lint.rules import BOTH, Found, Severity, rule

SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|PASSWORD|PASSWD|SECRET|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS)$", re.IGNORECASE
)
NOT_SECRET = re.compile(r"^(EOS|BOS|PAD|UNK|SEP|CLS|MASK|STOP|IMAGE)_TOKEN$", re.IGNORECASE)
SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|ghp_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|sk-[A-Za-z0-9_-]{20,}|xox[abp]-[A-Za-z0-9-]{10,}|glpat-[\w-]{20,})"
)
ISTIO = "sidecar.istio.io/inject"
OLD_LABELS = ("pytorch-job-name", "pytorch-replica-type", "pytorch-replica-index", "group-name")


@rule(
    "PT301",
    "error",
    fix=("mount an emptyDir with medium: Memory at /dev/shm"),
    values="shm.sizeLimit",
    kinds=BOTH,
)
def no_shared_memory(job: Job) -> Iterator[Found]:
    """/dev/shm is 64 MiB unless a memory volume is mounted there: NCCL between GPUs and DataLoader workers
    die with a bus error.
    """
    for template, container in job.mains():
        volumes = {volume.get("name"): volume for volume in template.pod.get("volumes") or []}
        mount = next(
            (
                m
                for m in container.spec.get("volumeMounts") or []
                if str(m.get("mountPath")).rstrip("/") == "/dev/shm"
            ),
            None,
        )
        if job.kind == "TrainJob" and not volumes:
            continue  # the runtime is in the cluster
        severity: Severity | None = None if job.processes > 1 or job.gpus else "warning"
        if mount is None:
            yield Found(
                (*container.path, "volumeMounts"),
                (f"nothing is mounted at /dev/shm of {template.role}"),
                severity,
            )
        elif (volumes.get(mount.get("name"), {}).get("emptyDir") or {"medium": "Memory"}).get(
            "medium"
        ) != "Memory":
            yield Found(
                (*container.path, "volumeMounts"),
                (f"/dev/shm of {template.role} is on disk: its emptyDir lacks medium: Memory"),
                severity,
            )


@rule(
    "PT302",
    "error",
    fix=("accessModes: [ReadWriteMany], of a storage class that can"),
    values="persistence.*.accessModes",
    kinds=BOTH,
)
def volume_for_one_node(job: Job) -> Iterator[Found]:
    """A ReadWriteOnce claim is attached to one node: pods of one job that land on another stay in
    ContainerCreating.
    """
    if job.pods < 2:
        return
    modes = {
        other.name: (other.content.get("spec") or {}).get("accessModes") or []
        for other in job.others
        if other.kind == "PersistentVolumeClaim" and isinstance(other.content.get("spec"), dict)
    }
    for claim, places in _claims(job).items():
        if claim in modes and not {"ReadWriteMany", "ReadOnlyMany"} & set(modes[claim]):
            yield Found(
                places[0],
                (
                    f"the claim {claim!r} is {', '.join(modes[claim]) or 'without accessModes'} and "
                    f"the job has {job.pods} pods"
                ),
            )


def _claims(job: Job) -> dict[str, list[tuple[str | int, ...]]]:
    """The claims that pods of the job share, with where they are used."""
    found: dict[str, list[tuple[str | int, ...]]] = {}
    for template in job.templates:
        for index, volume in enumerate(template.pod.get("volumes") or []):
            claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            if claim:
                found.setdefault(claim, []).append((*template.pod_path, "volumes", index))
    return found


@rule(
    "PT303", "error", fix=("give limits and requests of GPUs the same number"), values="resources", kinds=BOTH
)
def gpu_request_differs_from_limit(job: Job) -> Iterator[Found]:
    """GPUs cannot be overcommitted: requests without the same limits are refused when the pod is created;
    limits alone are enough for a PyTorchJob.
    """
    for template in job.templates:
        for container in template.containers:
            requests, limits = count_gpus(container.spec, "requests"), count_gpus(container.spec, "limits")
            if requests and requests != limits:
                found = (
                    f"{container.spec.get('name')} of {template.role} requests {requests} GPUs and is "
                    f"limited to {limits}"
                )
                yield Found((*container.path, "resources"), found)


@rule("PT304", "error", fix="ask for the same GPUs on Master and Worker", values="resources")
def gpus_differ_between_replicas(job: Job) -> Iterator[Found]:
    """nprocPerNode is one number for all pods, so a replica with fewer GPUs (or another kind) fails or
    idles.
    """
    asked = {template.role: _gpu_resources(container) for template, container in job.mains()}
    if len({tuple(sorted(value.items())) for value in asked.values()}) > 1:
        _, container = list(job.mains())[-1]
        told = ", ".join(
            (f"{role}: {' '.join(f'{n} {kind}' for kind, n in value.items()) or 'none'}")
            for role, value in asked.items()
        )
        yield Found((*container.path, "resources"), f"GPUs differ between replicas ({told})")


def _gpu_resources(container: Container) -> dict[str, str]:
    resources = container.spec.get("resources") or {}
    return {
        name: str(value)
        for key in ("requests", "limits")
        for name, value in (resources.get(key) or {}).items()
        if GPU.match(name)
    }


@rule("PT305", "error", fix="declare the volume, or correct the name", kinds=("PyTorchJob",))
def mount_without_volume(job: Job) -> Iterator[Found]:
    """A volumeMount of a volume that the pod does not have: the webhook takes it, and then no pod can be
    created.
    """
    for template in job.templates:
        volumes = {volume.get("name") for volume in template.pod.get("volumes") or []}
        for container in (
            one for one in job.all_containers() if one.path[: len(template.path)] == template.path
        ):
            for index, mount in enumerate(container.spec.get("volumeMounts") or []):
                if mount.get("name") not in volumes:
                    found = (
                        f"{container.spec.get('name')} of {template.role} mounts {mount.get('name')!r}, "
                        "which is not among its volumes"
                    )
                    yield Found((*container.path, "volumeMounts", index), found)


@rule("PT401", "warning", fix="give each job a port of its own", values="port, hostNetwork")
def host_network_port(job: Job) -> Iterator[Found]:
    """With hostNetwork two jobs on one node clash on port 23456, and without dnsPolicy
    ClusterFirstWithHostNet the master's name does not resolve.
    """
    for template in job.templates:
        if not template.pod.get("hostNetwork"):
            continue
        if template.pod.get("dnsPolicy") != "ClusterFirstWithHostNet" and job.pods > 1:
            found = (
                f"hostNetwork of {template.role} without dnsPolicy: ClusterFirstWithHostNet: Services do "
                "not resolve"
            )
            yield Found(
                (*template.pod_path, "hostNetwork"), found, "error", ("dnsPolicy: ClusterFirstWithHostNet")
            )
        if _port(template) == PORT:
            yield Found(
                (*template.pod_path, "hostNetwork"),
                (f"hostNetwork of {template.role} with the default port {PORT}"),
            )


def _port(template: Template) -> int:
    ports = next(
        (one.spec.get("ports") or [] for one in template.containers if one.spec.get("name") == CONTAINER), []
    )
    return int(next((port.get("containerPort") for port in ports if port.get("name") == PORT_NAME), PORT))


@rule("PT402", "warning", fix="name a version or a digest", values="image.tag, image.digest", kinds=BOTH)
def image_not_pinned(job: Job) -> Iterator[Found]:
    """An image without a tag, or of the tag latest, is another one at each restart, and pods of one job may
    differ.
    """
    for container in job.all_containers():
        image = str(container.spec.get("image") or "")
        if image and "@" not in image and (":" not in image.rsplit("/", 1)[-1] or image.endswith(":latest")):
            yield Found((*container.path, "image"), f"the image {image} is not pinned")


@rule(
    "PT403",
    "error",
    fix=("put it into a Secret and refer to it: valueFrom.secretKeyRef"),
    values="envFrom",
    kinds=BOTH,
)
def secret_in_plain_text(job: Job) -> Iterator[Found]:
    """A token or password as a literal is readable by everybody who may read the job, its pods, or the
    repository.
    """
    for container in job.all_containers():
        for index, entry in container.env:
            name, value = str(entry["name"]), str(entry.get("value") or "")
            named = (
                SECRET_NAME.search(name)
                and not NOT_SECRET.match(name)
                and len(value) > 5
                and not value.startswith(("/", "$("))
            )
            if named or SECRET_VALUE.search(value):
                yield Found((*container.path, "env", index), f"{name} holds a secret in plain text")
        for key in ("command", "args"):
            for index, word in enumerate(container.spec.get(key) or []):
                if SECRET_VALUE.search(str(word)):
                    yield Found((*container.path, key, index), f"{key} holds a token in plain text")


@rule(
    "PT404",
    "note",
    fix=(f'{ISTIO}: "false" as a label and as an annotation of the template'),
    values="podLabels, podAnnotations",
)
def istio_sidecar(job: Job) -> Iterator[Found]:
    """Where Istio injects its proxy, that never ends, so neither does the job; and it cuts the collectives
    off. Harmless without Istio.
    """
    for template in job.templates:
        said = {
            key: str((template.metadata.get(key) or {}).get(ISTIO, "")).lower()
            for key in ("labels", "annotations")
        }
        if "true" in said.values():
            yield Found(
                (*template.path, "template", "metadata"),
                (f"{template.role} asks for Istio's sidecar"),
                "error",
            )
        elif set(said.values()) == {"", "false"}:
            found = (
                f"{template.role} turns Istio's sidecar off by "
                f"{'label' if said['labels'] else 'annotation'} only"
            )
            yield Found((*template.path, "template", "metadata"), found, "warning")
        elif "false" not in said.values():
            yield Found(
                (*template.path, "template", "metadata"),
                (f"{template.role} does not turn Istio's sidecar off"),
            )


@rule("PT405", "error", fix=f"select by {LABEL}job-name, replica-type and replica-index", kinds=BOTH)
def old_labels(job: Job) -> Iterator[Found]:
    """The labels pytorch-job-name and the like are gone since operator 1.5: a selector with them finds no
    pod.
    """
    for template in job.templates:
        text = str({key: template.pod.get(key) for key in ("affinity", "topologySpreadConstraints")})
        for label in OLD_LABELS:
            if f"'{label}'" in text:
                yield Found((*template.pod_path, "affinity"), f"{template.role} selects pods by {label}")
    for other in job.others:
        if other.kind in (
            "NetworkPolicy",
            "Service",
            "PodMonitor",
            "PodDisruptionBudget",
        ) and "'pytorch-job-name'" in str(other.content):
            yield Found((), f"{other.kind} {other.name} selects pods by pytorch-job-name")


@rule(
    "PT406",
    "warning",
    fix=("drop it; training needs none of this"),
    values="securityContext, podSecurityContext",
)
def privileged(job: Job) -> Iterator[Found]:
    """A privileged container, or one that shares the host's processes, is root on the node."""
    for template in job.templates:
        for key in ("hostPID", "hostIPC"):
            if template.pod.get(key):
                yield Found((*template.pod_path, key), f"{template.role} sets {key}")
    for container in job.all_containers():
        if (container.spec.get("securityContext") or {}).get("privileged"):
            yield Found((*container.path, "securityContext"), f"{container.spec.get('name')} is privileged")
