"""PT1, PT304: replicas that have to agree with one another, and the rendezvous that they make."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import zip_longest

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


def _apart(job: Job, what: str, field: str, shown: Callable[[JobContainer], str]) -> Iterator[Diagnostic]:
    """Find replicas whose training containers differ in what ``shown`` makes of them."""
    values = {template.role: shown(container) for template, container in job.mains()}
    if len(set(values.values())) > 1:
        *_, (_, last) = job.mains()
        sides = ", ".join(f"{role}: {value}" for role, value in values.items())
        yield Diagnostic((*last.path, field), f"{what} ({sides})")


@rule("PT108", "warning", fix="set the same value on Master and Worker, or on neither")
def interface_on_one_replica(job: Job) -> Iterator[Diagnostic]:
    """The rendezvous may hang where a network interface is fixed for one replica type only.

    The others choose by themselves, and may choose another.
    """

    def shown(container: JobContainer) -> str:
        given = container.literals
        return " ".join(f"{name}={given[name]}" for name in INTERFACES if name in given) or "not set"

    yield from _apart(job, "the network interfaces differ between replicas", "env", shown)


@rule("PT111", "warning", fix="use the same image on Master and Worker")
def images_differ(job: Job) -> Iterator[Diagnostic]:
    """Master and Worker of different images fail at the first collective, or drift.

    They run different versions of the libraries.
    """
    yield from _apart(job, "the images differ", "image", lambda each: each.image or "none")


@rule("PT304", "warning", fix="ask for the same GPUs on Master and Worker")
def gpus_differ_between_replicas(job: Job) -> Iterator[Diagnostic]:
    """A replica with fewer GPUs than another (or another kind) fails or idles.

    nprocPerNode is one number for all pods.
    """

    def shown(container: JobContainer) -> str:
        resources = dig(container.spec, "resources")
        amounts = {**dig(resources, "requests"), **dig(resources, "limits")}
        devices = sorted(name for name in amounts if DEVICE.fullmatch(name))
        return " ".join(f"{amounts[name]} {name}" for name in devices) or "none"

    yield from _apart(job, "GPUs differ between replicas", "resources", shown)


@rule("PT115", "warning", fix="give Master and Worker the same command")
def commands_differ(job: Job) -> Iterator[Diagnostic]:
    """Processes of different programs hang: the collectives of the two do not fit each other."""
    started = [(template.role, container, _started(container)) for template, container in job.mains()]
    if not started:
        return
    (one, _, ours), (other, last, theirs) = started[0], started[-1]
    for left, right in zip_longest(ours, theirs, fillvalue="nothing there"):
        if left != right:
            sides = f"{one} has {left[:60]!r}, {other} {right[:60]!r}"
            yield Diagnostic(last.command_path, f"the replicas start different programs: {sides}")
            return


def _started(container: JobContainer) -> list[str]:
    """The launcher and the lines of the program but for what it prints.

    Else the words without options, whose values may differ by replica.
    """
    settled = [word for word in container.words if not word.startswith("-")][:2]
    lines = (container.launch.program or " ".join(settled)).splitlines() or ["the image's own"]
    silent = [line.strip() for line in lines if not re.match(r"\s*(print\(|echo\b|$)", line)]
    return [container.launch.kind or "no launcher", *silent]


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


@rule(
    "PT110", "error", by="hang", fix="minReplicas <= Worker.replicas <= maxReplicas, all pods being Workers"
)
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
