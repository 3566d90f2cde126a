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


@rule("PT108", "warning", fix="set the same value on Master and Worker, or on neither")
def interface_on_one_replica(job: Job) -> Iterator[Diagnostic]:
    """The rendezvous may hang where a network interface is fixed for one replica type only.

    The others choose by themselves, and may choose another.
    """
    for name in INTERFACES:
        given = {
            template.role: {
                index: str(entry.get("value")) for index, entry in container.env if entry["name"] == name
            }
            for template, container in job.mains()
        }
        if len({frozenset(values.values()) for values in given.values()}) > 1:
            role, container = next((t.role, c) for t, c in job.mains() if given[t.role])
            sides = ", ".join(
                f"{each}: {' '.join(values.values()) or 'not set'}" for each, values in given.items()
            )
            place = (*container.path, "env", next(iter(given[role])))
            yield Diagnostic(place, f"{name} differs between replicas ({sides})")


@rule("PT109", "error", by="hang", fix="make the first pod a Master, or add an elasticPolicy")
def no_rendezvous(job: Job) -> Iterator[Diagnostic]:
    """Several Workers without Master or elasticPolicy get no address to meet at.

    torchrun waits on each pod's own localhost for the others and hangs until it times out.
    """
    workers = job.template("Worker")
    if workers is None or workers.replicas < 2 or workers.main is None:
        return
    if job.template("Master") is not None or job.spec.get("elasticPolicy") is not None:
        return
    container, launch = workers.main, workers.main.launch
    by_hand = ADDRESSES & {entry["name"] for _, entry in container.env}
    by_flags = {"master-addr", "rdzv-endpoint", "rdzv-id"} & set(launch.options)
    if by_hand or by_flags or container.spec.get("envFrom"):
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
    if job.spec.get("elasticPolicy") is None or workers is None:
        return
    low, high = elastic.get("minReplicas"), elastic.get("maxReplicas")
    low, high = (low if low is not None else high), (high if high is not None else low)
    places = ((*ELASTIC, "minReplicas"), (*ELASTIC, "maxReplicas"), (*workers.path, "replicas"))
    variable = any(VARIABLE.search(job.document.text(place) or "") for place in places)
    if low is None or high is None or variable:
        pass  # the operator fills in what is absent, the template engine the variable
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
    backend = elastic.get("rdzvBackend")
    if backend is not None and backend not in ("c10d", "etcd", "etcd-v2", "static"):
        message = f"rdzvBackend is {backend!r}; torchrun has c10d, etcd, etcd-v2 and static"
        yield Diagnostic((*ELASTIC, "rdzvBackend"), message, "warning", "rdzvBackend: c10d")
    endpoint = workers.main is not None and "rdzv-endpoint" in workers.main.launch.options
    if backend == "static" and job.template("Master") is None:
        message = "rdzvBackend is static, and nothing gives the Workers their ranks"
        yield Diagnostic((*ELASTIC, "rdzvBackend"), message, "warning", "rdzvBackend: c10d")
    elif str(backend).startswith("etcd") and not elastic.get("rdzvHost") and not endpoint:
        message = f"rdzvBackend is {backend} without rdzvHost, and on Worker 0 no etcd listens"
        yield Diagnostic((*ELASTIC, "rdzvBackend"), message, "warning", "name the host of etcd: rdzvHost")


@rule("PT111", "warning", fix="use the same image on Master and Worker")
def images_differ(job: Job) -> Iterator[Diagnostic]:
    """Master and Worker of different images fail at the first collective, or drift.

    They run different versions of the libraries.
    """
    yield from _apart(job, "the images differ", "image", lambda each: str(each.spec.get("image")))


def _apart(job: Job, what: str, field: str, shown: Callable[[JobContainer], str]) -> Iterator[Diagnostic]:
    """Find replicas whose training containers differ in what ``shown`` makes of them."""
    values = {template.role: shown(container) for template, container in job.mains()}
    if len(set(values.values())) > 1:
        *_, (_, last) = job.mains()
        sides = ", ".join(f"{role}: {value}" for role, value in values.items())
        yield Diagnostic((*last.path, field), f"{what} ({sides})")


@rule("PT115", "warning", fix="give Master and Worker the same command")
def commands_differ(job: Job) -> Iterator[Diagnostic]:
    """Processes of different programs hang: the collectives of the two do not fit each other."""
    mains = list(job.mains())
    if len(mains) < 2:
        return
    (one, first), (other, last) = mains[0], mains[-1]
    ours, theirs = _started(first), _started(last)
    if ours != theirs:
        apart = next((pair for pair in zip_longest(ours, theirs) if pair[0] != pair[1]), ("", ""))
        left, right = (repr(line[:60]) if line else "nothing there" for line in apart)
        message = f"the replicas start different programs: {one.role} has {left}, {other.role} {right}"
        yield Diagnostic(last.command_path, message)


def _started(container: JobContainer) -> list[str]:
    """The launcher and the lines of the program but for what it prints.

    Else the words without options, whose values may differ by replica.
    """
    settled = [word for word in container.words if not word.startswith("-")][:2]
    lines = (container.launch.program or " ".join(settled)).splitlines() or ["the image's own"]
    silent = [line.strip() for line in lines if not re.match(r"\s*(print\(|echo\b|$)", line)]
    return [container.launch.kind, *silent]


@rule("PT304", "warning", fix="ask for the same GPUs on Master and Worker")
def gpus_differ_between_replicas(job: Job) -> Iterator[Diagnostic]:
    """A replica with fewer GPUs than another (or another kind) fails or idles.

    nprocPerNode is one number for all pods.
    """
    yield from _apart(job, "GPUs differ between replicas", "resources", _devices)


def _devices(container: JobContainer) -> str:
    amounts = {**container.amounts("requests"), **container.amounts("limits")}
    devices = sorted(f"{value} {name}" for name, value in amounts.items() if DEVICE.fullmatch(name))
    return " ".join(devices) or "none"
