"""PT1: replicas that have to agree with one another, and the rendezvous that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from podtune.cluster.job.manifest import dig
from podtune.cluster.lint.diagnostic import Diagnostic
from podtune.cluster.lint.job import Job
from podtune.cluster.lint.rules import rule
from podtune.cluster.lint.schema import VARIABLE
from podtune.cluster.lint.templates import DEVICE, JobContainer
from podtune.cluster.lint.torchrun import trains_alone

INTERFACES = (
    *("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA"),
    *("UCX_NET_DEVICES", "TP_SOCKET_IFNAME"),
)
ADDRESSES = {"MASTER_ADDR", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT"}
ELASTIC = ("spec", "elasticPolicy")
BACKEND = (*ELASTIC, "rdzvBackend")


def _interfaces(container: JobContainer) -> str:
    given = container.literals
    return " ".join(f"{name}={given[name]}" for name in INTERFACES if name in given) or "not set"


def _devices(container: JobContainer) -> str:
    resources = dig(container.spec, "resources")
    amounts = {**dig(resources, "requests"), **dig(resources, "limits")}
    devices = sorted(name for name in amounts if DEVICE.fullmatch(name))
    return " ".join(f"{amounts[name]} {name}" for name in devices) or "none"


def _program(container: JobContainer) -> str:
    """The launcher and its program, else the words without options, whose values may differ by replica."""
    settled = [word for word in container.words if not word.startswith("-")][:2]
    program = container.launch.program or " ".join(settled) or "the image's own"
    return f"{container.launch.kind} {program.splitlines()[0][:60]}".strip()


#: what is compared, the field of the container that it is in, and its words
COMPARED: tuple[tuple[str, str, Callable[[JobContainer], str]], ...] = (
    ("network interfaces", "env", _interfaces),
    ("images", "image", lambda container: container.image or "none"),
    ("programs", "command", _program),
    ("GPUs", "resources", _devices),
)


@rule("PT111", "warning", fix="give Master and Worker the same")
def replicas_differ(job: Job) -> Iterator[Diagnostic]:
    """Master and Worker of different images, programs, GPUs or network interfaces fail, hang or drift.

    The collectives of two programs do not fit each other, nprocPerNode is one number for all pods, and where
    an interface is fixed for one replica the others may choose another.
    """
    for what, field, shown in COMPARED:
        values = {template.role: shown(container) for template, container in job.mains()}
        if len(set(values.values())) > 1:
            *_, (_, last) = job.mains()
            sides = ", ".join(f"{role}: {value}" for role, value in values.items())
            yield Diagnostic((*last.path, field), f"the {what} of the replicas differ ({sides})")


@rule("PT109", "error", by="hang", fix="make the first pod a Master, or add an elasticPolicy")
def no_rendezvous(job: Job) -> Iterator[Diagnostic]:
    """Several Workers without Master or elasticPolicy get no address to meet at.

    torchrun waits on each pod's own localhost for the others and hangs until it times out.
    """
    workers = job.template("Worker")
    if workers is None or workers.replicas < 2 or workers.main is None:
        return
    if job.template("Master") is not None or "elasticPolicy" in job.spec:
        return
    container, launch = workers.main, workers.main.launch
    by_flags = {"master-addr", "rdzv-endpoint", "rdzv-id"} & set(launch.options)
    if by_flags or ADDRESSES & set(container.literals) or container.spec.get("envFrom"):
        return
    sure = launch.kind == "torchrun" and not trains_alone(launch.options) and "nnodes" not in launch.options
    message = f"{workers.replicas} Workers, no Master and no elasticPolicy: nothing sets MASTER_ADDR"
    yield Diagnostic(workers.path, message, "error" if sure else "warning")


@rule("PT110", "error", by="hang", fix="minReplicas <= Worker.replicas <= maxReplicas")
def elastic_range(job: Job) -> Iterator[Diagnostic]:
    """The rendezvous waits for ever with fewer Workers than minReplicas.

    minReplicas and maxReplicas bound the Workers, and torchrun refuses a minimum above the maximum. A Master
    is not counted and is one pod too many.
    """
    elastic, workers = dig(job.spec, "elasticPolicy"), job.template("Worker")
    if "elasticPolicy" not in job.spec or workers is None:
        return
    # the operator fills in the one that is absent
    given = [elastic[key] for key in ("minReplicas", "maxReplicas") if key in elastic] or [workers.replicas]
    low, high = given[0], given[-1]
    places = ((*ELASTIC, "minReplicas"), (*ELASTIC, "maxReplicas"), (*workers.path, "replicas"))
    if any(VARIABLE.search(job.document.text(place) or "") for place in places):
        pass  # it is not known what the template engine fills in
    elif low > high or low < 1:
        message = f"minReplicas {low} is above maxReplicas {high}" if low > high else f"minReplicas is {low}"
        yield Diagnostic(ELASTIC, message)
    elif not low <= workers.replicas <= high:
        # an autoscaler brings the number into its range
        scaled = workers.replicas > high or elastic.get("metrics")
        message = f"{workers.replicas} Workers are outside {low} to {high}"
        yield Diagnostic(ELASTIC, message, "warning" if scaled else "error")
    if job.template("Master") is not None:
        message = "an elastic job with a Master: PET_NNODES counts the Workers only"
        yield Diagnostic(ELASTIC, message, "warning")
    if elastic.get("standalone") and workers.replicas > 1:
        message = f"standalone with {workers.replicas} Workers: each would train alone"
        yield Diagnostic((*ELASTIC, "standalone"), message, "warning", "remove it")
    backend = elastic.get("rdzvBackend", "c10d")
    listens = elastic.get("rdzvHost") or (workers.main and "rdzv-endpoint" in workers.main.launch.options)
    if backend not in ("c10d", "etcd", "etcd-v2", "static"):
        message = f"rdzvBackend is {backend!r}; torchrun has c10d, etcd, etcd-v2 and static"
        yield Diagnostic(BACKEND, message, "warning", "rdzvBackend: c10d")
    elif backend == "static" and job.template("Master") is None:
        message = "rdzvBackend is static, and nothing gives the Workers their ranks"
        yield Diagnostic(BACKEND, message, "warning", "rdzvBackend: c10d")
    elif backend.startswith("etcd") and not listens:
        message = f"rdzvBackend is {backend} without rdzvHost, and on Worker 0 no etcd listens"
        yield Diagnostic(BACKEND, message, "warning", "name the host of etcd: rdzvHost")
