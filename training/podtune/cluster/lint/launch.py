"""PT1: how the processes start and find each other."""

from __future__ import annotations

import re
from collections.abc import Iterator

from podtune.cluster.job.pytorchjob import INJECTED
from podtune.cluster.lint.job import Container, Job
from podtune.cluster.lint.rules import BOTH, Found, Severity, rule

BY_HAND = {*INJECTED, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"} - {"PYTHONUNBUFFERED"}
INTERFACES = (
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "UCX_NET_DEVICES",
    "TP_SOCKET_IFNAME",
)


@rule("PT101", "error", fix="remove it; torchrun and the operator set it", values="env", kinds=BOTH)
def rendezvous_by_hand(job: Job) -> Iterator[Found]:
    """RANK, WORLD_SIZE, MASTER_* and PET_* are the operator's: what a manifest sets is overridden, or breaks
    the rendezvous.
    """
    for _, container in job.mains():
        for index, entry in container.env:
            if entry["name"] in BY_HAND:
                yield Found((*container.path, "env", index, "name"), f"{entry['name']} is set by hand")


@rule("PT102", "warning", fix='set the number, quoted: nprocPerNode: "2"', values="distributed.nprocPerNode")
def processes_not_fixed(job: Job) -> Iterator[Found]:
    """Without nprocPerNode (or with auto) torchrun starts a process per GPU, on a machine without GPUs one
    per CPU of the node, while WORLD_SIZE counts one a pod.
    """
    if any(problem.path == ("spec", "nprocPerNode") for problem in job.problems):
        return
    if (job.spec.get("elasticPolicy") or {}).get("nProcPerNode") is not None:
        return
    value = job.spec.get("nprocPerNode")
    if value is None or value in ("auto", "cpu", "gpu"):
        said = "is absent, which means auto" if value is None else f"is {value!r}"
        yield Found(("spec", "nprocPerNode"), f"nprocPerNode {said}", None if job.gpus else "error")


@rule(
    "PT103",
    "error",
    fix=("make nprocPerNode the GPUs of one pod"),
    values="distributed.nprocPerNode, resources",
)
def processes_differ_from_gpus(job: Job) -> Iterator[Found]:
    """More processes than GPUs in a pod fail at start; fewer leave GPUs that are paid for idle."""
    text = str(job.spec.get("nprocPerNode") or "")
    for template, container in job.mains():
        if text.isdigit() and container.gpus and int(text) != container.gpus:
            idle = int(text) < container.gpus
            found = f"nprocPerNode is {text} but {template.role} has {container.gpus} GPUs"
            yield Found(("spec", "nprocPerNode"), found, "warning" if idle else None)


@rule(
    "PT104",
    "error",
    fix="start it with torchrun, which reads the operator's PET_*: torchrun -m podtune.training",
    values="mode",
    kinds=BOTH,
)
def plain_python(job: Job) -> Iterator[Found]:
    """Plain python in a job of several processes starts one process a pod, and on GPUs each trains a model of
    its own.
    """
    if job.processes < 2:
        return
    for template, container in job.mains():
        launch = container.launch
        if launch.kind == "python":
            yield Found(
                _command(container),
                (
                    f"{template.role} starts {' '.join(launch.argv[:3])} for a job "
                    f"of {job.processes} processes"
                ),
            )


@rule("PT105", "error", fix="call torchrun bare: it reads PET_NNODES, PET_NODE_RANK and the rest", kinds=BOTH)
def launcher_overrides_operator(job: Job) -> Iterator[Found]:
    """torchrun's own flags beat the operator's PET_* variables: --standalone or --nnodes=1 make every pod
    train alone.
    """
    for template, container in job.mains():
        launch = container.launch
        if launch.kind != "torchrun":
            continue
        given = _torchrun_options(launch.argv)
        alone = "standalone" in given or given.get("nnodes", "").strip() in ("1", "1:1")
        ranks = [
            name for name in ("node-rank", "master-addr", "master-port", "rdzv-endpoint") if name in given
        ]
        if alone and job.pods > 1:
            said = "--standalone" if "standalone" in given else "--nnodes=1"
            yield Found(
                _command(container),
                (f"{template.role} passes {said} in a job of {job.pods} pods: each would train alone"),
            )
        elif ranks and job.pods > 1:
            yield Found(
                _command(container),
                (f"{template.role} passes --{', --'.join(ranks)}, which the operator sets for each pod"),
            )
        count = given.get("nproc-per-node", "")
        announced = str(job.spec.get("nprocPerNode") or "")
        if count.isdigit() and announced.isdigit() and count != announced:
            yield Found(
                _command(container),
                (f"{template.role} passes --nproc-per-node={count} but nprocPerNode is {announced}"),
            )


@rule(
    "PT106",
    "error",
    fix=("use torchrun; the Trainer and accelerate's API work under it unchanged"),
    kinds=BOTH,
)
def launcher_ignores_operator(job: Job) -> Iterator[Found]:
    """accelerate launch, trl and the deepspeed launcher ignore PET_*: without their own flags or hostfile
    each pod trains alone.
    """
    for template, container in job.mains():
        launch = container.launch
        told = any(
            re.match(r"--(num_machines|machine_rank|main_process_ip|hostfile|config_file)", word)
            for word in launch.argv
        )
        if job.pods > 1 and launch.kind in ("accelerate", "deepspeed", "trl") and not told:
            yield Found(
                _command(container),
                (f"{template.role} starts {launch.kind}, which does not read the operator's variables"),
            )


@rule(
    "PT107",
    "error",
    fix=('begin the command with exec, or write it as a list: command: ["torchrun", ...]'),
    kinds=BOTH,
)
def shell_as_first_process(job: Job) -> Iterator[Found]:
    """A shell as PID 1 swallows SIGTERM, so a preempted pod is killed without saving; exec hands over to the
    program.
    """
    for template, container in job.mains():
        launch = container.launch
        if launch.script and launch.kind and not launch.replaced:
            # A shell given one simple command usually replaces itself by it; not every shell does.
            severity: Severity | None = None if launch.commands > 1 else "warning"
            yield Found(
                _command(container),
                (f"a shell is PID 1 of {template.role} and starts {launch.argv[0]} without exec"),
                severity,
            )


@rule("PT108", "error", fix="set the same value on Master and Worker, or on neither", values="nccl.env")
def interface_on_one_replica(job: Job) -> Iterator[Found]:
    """A network interface fixed for one replica type only makes the others choose by themselves, and the
    rendezvous hangs.
    """
    mains = list(job.mains())
    if len(mains) < 2:
        return
    for name in INTERFACES:
        values = {
            template.role: {str(entry.get("value")) for _, entry in one.env if entry["name"] == name}
            for template, one in mains
        }
        if len({frozenset(value) for value in values.values()}) > 1:
            _, container = next((t, c) for t, c in mains if values[t.role])
            index = next(i for i, entry in container.env if entry["name"] == name)
            told = ", ".join(f"{role}: {' '.join(value) or 'not set'}" for role, value in values.items())
            yield Found((*container.path, "env", index), f"{name} differs between replicas ({told})")


@rule(
    "PT109", "error", fix=("make the first pod a Master, or add an elasticPolicy"), values="distributed.nodes"
)
def no_rendezvous(job: Job) -> Iterator[Found]:
    """Several Workers without Master or elasticPolicy get no address to meet at: torchrun waits on localhost
    until it times out.
    """
    workers = job.template("Worker")
    if (
        workers
        and workers.replicas > 1
        and job.template("Master") is None
        and job.spec.get("elasticPolicy") is None
    ):
        yield Found(
            (*workers.path,),
            (f"{workers.replicas} Workers, no Master and no elasticPolicy: nothing sets MASTER_ADDR"),
        )


@rule(
    "PT110",
    "error",
    fix=("minReplicas <= Worker.replicas <= maxReplicas, all pods being Workers"),
    values="elastic",
)
def elastic_range(job: Job) -> Iterator[Found]:
    """minReplicas and maxReplicas bound the Workers; a Master is not counted and is one pod too many in the
    rendezvous.
    """
    elastic, workers = job.spec.get("elasticPolicy"), job.template("Worker")
    if elastic is None or workers is None:
        return
    low, high = elastic.get("minReplicas"), elastic.get("maxReplicas")
    low, high = (low if low is not None else high), (high if high is not None else low)
    if low is not None and high is not None and not low <= workers.replicas <= high:
        yield Found(("spec", "elasticPolicy"), f"{workers.replicas} Workers are outside {low} to {high}")
    if job.template("Master") is not None:
        yield Found(
            ("spec", "elasticPolicy"),
            ("an elastic job with a Master: PET_NNODES counts the Workers only"),
            "warning",
        )


@rule("PT111", "error", fix="use the same image on Master and Worker", values="image")
def images_differ(job: Job) -> Iterator[Found]:
    """Master and Worker of different images run different library versions and fail at the first collective,
    or drift.
    """
    images = {template.role: container.spec.get("image") for template, container in job.mains()}
    if len(set(images.values())) > 1:
        _, container = list(job.mains())[-1]
        told = ", ".join(f"{role}: {image}" for role, image in images.items())
        yield Found((*container.path, "image"), f"the images differ ({told})")


def _command(container: Container) -> tuple[str | int, ...]:
    return (*container.path, "command" if container.spec.get("command") else "args")


def _torchrun_options(argv: tuple[str, ...]) -> dict[str, str]:
    """torchrun's own options by name with dashes, up to the script or module."""
    words = list(argv[1:])
    if "torch.distributed.run" in argv or "torch.distributed.launch" in argv:
        words = list(argv[argv.index("-m") + 2 :])
    given: dict[str, str] = {}
    flags = {"standalone", "no-python", "run-path", "use-env"}
    while words and words[0].startswith("-") and words[0] not in ("-m", "--module"):
        name, _, value = words.pop(0).lstrip("-").replace("_", "-", 4).partition("=")
        if not value and name not in flags and words and not words[0].startswith("-"):
            value = words.pop(0)
        given[name] = value
    return given
