"""PT1: how the processes start and find each other."""

from __future__ import annotations

import re
from collections.abc import Iterator

from podtune.cluster.lint.command import cannot_start, expanded, variables, without_a_shell
from podtune.cluster.lint.job import Job, JobContainer, PodTemplate
from podtune.cluster.lint.rules import ALL, BOTH, Hit, Severity, rule

#: what Trainer's webhook reserves in spec.trainer.env
RESERVED = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
INTERFACES = (
    *("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA"),
    *("UCX_NET_DEVICES", "TP_SOCKET_IFNAME"),
)
#: torchrun's option -> the variable that it stands for
SETS_RANK = ("node-rank", "master-addr", "master-port", "rdzv-endpoint")
BY_FLAGS = re.compile(
    r"--(num[_-]machines|machine[_-]rank|main[_-]process[_-]ip|hostfile|config[_-]file|node[_-]rank"
    r"|master[_-]addr|no[_-]ssh|include|launcher)"
)


@rule("PT101", "error", by="webhook", fix="remove it; the operator sets it", values="env", kinds=BOTH)
def rendezvous_by_hand(job: Job) -> Iterator[Hit]:
    """RANK, WORLD_SIZE, MASTER_* and PET_* are the operator's.

    In a PyTorchJob what a manifest sets is overridden (a warning); Trainer's webhook refuses PET_* in a
    TrainJob of a torch runtime.
    """
    injected = job.torch_environment or {}
    for template, container in job.mains():
        for index, entry in container.env:
            name, path = entry["name"], (*container.path, "env", index, "name")
            if job.kind == "TrainJob":
                if name in RESERVED and job.by_torch is not False:
                    sure = job.by_torch and (job.trainer > "2.1" or job.spec["trainer"].get("numProcPerNode"))
                    yield Hit(path, f"{name} is reserved for Trainer", None if sure else "warning")
            elif name in injected and name != "PYTHONUNBUFFERED":
                message = f"{name} is set by hand, and the operator overrides it"
                yield Hit(path, message, "warning", role=template.role)


@rule("PT102", "warning", fix='set the number, quoted: nprocPerNode: "2"', values="distributed.nprocPerNode")
def processes_not_fixed(job: Job) -> Iterator[Hit]:
    """On a pod without devices torchrun starts a process for each CPU of the node unless nprocPerNode or its
    own flag says how many."""
    elastic = job.spec.get("elasticPolicy") or {}
    value = job.spec.get("nprocPerNode")
    if value not in (None, "auto", "cpu", "gpu") or elastic.get("nProcPerNode") is not None:
        return
    for template, container in job.mains():
        launch = container.launch
        bare = launch.kind == "torchrun" and "nproc-per-node" not in launch.options
        if bare and not container.gpus and not _asks_for_devices(container):
            says = "is absent, which means auto" if value is None else f"is {value!r}"
            message = f"nprocPerNode {says}, and {{role}} has no devices"
            yield Hit(("spec", "nprocPerNode"), message, role=template.role)


def _asks_for_devices(container: JobContainer) -> bool:
    amounts = container.spec.get("resources") or {}
    names = {name for key in ("limits", "requests") for name in amounts.get(key) or {}}
    return any("/" in name for name in names) or bool(amounts.get("claims"))


@rule(
    "PT103",
    "warning",
    fix="make the processes of a pod its GPUs",
    values="distributed.nprocPerNode, resources",
    kinds=BOTH,
)
def processes_differ_from_gpus(job: Job) -> Iterator[Hit]:
    """More processes than GPUs in a pod share them, which NCCL refuses; fewer leave GPUs that are paid for
    idle."""
    field = ("spec", "trainer", "numProcPerNode") if job.kind == "TrainJob" else ("spec", "nprocPerNode")
    number = job.processes_per_pod
    for template, container in job.mains():
        gpus, launch = container.gpus, container.launch
        if number is None or not gpus or "nproc-per-node" in launch.options:
            continue
        if number > gpus or (number < gpus and launch.kind == "torchrun"):
            yield Hit(field, f"{field[-1]} is {number} but {{role}} has {gpus} GPUs", role=template.role)


@rule(
    "PT104",
    "error",
    by="hang",
    fix="start it with torchrun, which reads PET_*: torchrun -m podtune.training",
    values="mode",
    kinds=BOTH,
)
def plain_python(job: Job) -> Iterator[Hit]:
    """WORLD_SIZE counts nprocPerNode processes a pod and python starts one, so the process group waits for
    ever.

    With one process a pod python is fine (but the Hugging Face Trainer wants LOCAL_RANK: a note). Trainer
    sets neither RANK nor WORLD_SIZE, so in a TrainJob of several nodes each would train alone: a warning.
    """
    for template, container in job.mains():
        launch = container.launch
        if launch.kind != "python":
            continue
        starts = " ".join(launch.argv[:3]).splitlines()[0][:80]
        if job.kind == "TrainJob":
            if job.pods > 1 and job.by_torch and not _reads_torchrun(container):
                message = f"{template.replicas} nodes start {starts}, and nothing sets RANK or WORLD_SIZE"
                yield Hit(container.command_path, message, "warning")
        elif (job.processes_per_pod or 1) > 1 and job.template("Master") is not None:
            message = f"{{role}} starts {starts}: one process, and nprocPerNode is {job.processes_per_pod}"
            yield Hit(container.command_path, message, role=template.role)
        elif job.pods > 1 and container.gpus:
            message = f"{{role}} starts {starts} without LOCAL_RANK, which the Hugging Face Trainer needs"
            yield Hit(container.command_path, message, "note", role=template.role)


def _reads_torchrun(container: JobContainer) -> bool:
    """Whether the program takes PET_* itself, or its variables are set by hand."""
    return "PET_" in " ".join(container.words) or {"RANK", "WORLD_SIZE"} <= set(container.literals)


def _known_variables(job: Job, container: JobContainer) -> dict[str, str]:
    return {**container.literals, **(job.torch_environment or {})}


def _unknown(job: Job, container: JobContainer, text: str) -> str:
    """A variable of the rendezvous that ``text`` names and nothing sets, or ""."""
    if job.torch_environment is None or container.spec.get("envFrom"):
        return ""
    script = container.launch.script
    own = {entry["name"] for _, entry in container.env} | set(job.torch_environment)
    own |= set(re.findall(r"(\w+)=", script)) | set(re.findall(r"\bread (\w+)", script))
    return next((name for name in variables(text) if name in RENDEZVOUS and name not in own), "")


@rule(
    "PT105",
    "error",
    by="hang",
    fix="call torchrun bare: it reads PET_NNODES, PET_NODE_RANK and the rest",
    kinds=BOTH,
)
def launcher_overrides_operator(job: Job) -> Iterator[Hit]:
    """Torchrun's own flags beat PET_*: the same literal rank, or localhost as the address, on every pod, or a
    variable that nothing sets, and the rendezvous hangs.

    --standalone and --nnodes=1 make every pod train alone
    (a warning). Flags made of the operator's own variables are fine.
    """
    for template, container in job.mains():
        launch = container.launch
        if launch.kind != "torchrun":
            continue
        options = launch.options
        for name in (*SETS_RANK, "nnodes", "nproc-per-node"):
            literal = re.search(r"\$\{?(RANK|WORLD_SIZE|MASTER_\w+|PET_\w+)\}?", options.get(name, ""))
            if literal and not launch.script:
                message = f"{{role}} passes --{name}={options[name]}, and no shell expands {literal[0]}"
                fix = f"as Kubernetes expands it: $({literal[1]})"
                yield Hit(container.command_path, message, fix=fix, role=template.role)
        for name in SETS_RANK:
            value = options.get(name, "")
            if unset := _unknown(job, container, value):
                message = f"{{role}} passes --{name}={value}, and nothing sets {unset}"
                yield Hit(container.command_path, message, role=template.role)
        if job.pods < 2:
            continue
        rank = options.get("node-rank", "")
        if rank.isdigit() and (template.replicas > 1 or not _own_rank(job, template, rank)):
            message = f"{{role}} passes --node-rank={rank} on every pod"
            yield Hit(container.command_path, message, role=template.role)
        endpoint = options.get("rdzv-endpoint") or options.get("master-addr") or ""
        host = endpoint.rpartition(":")[0] or endpoint
        if host in ("localhost", "127.0.0.1", "::1", "[::1]", "0.0.0.0") and not _alone(options):
            message = f"{{role}} passes {host} as the address to meet at, which is each pod's own"
            severity: Severity | None = (
                None if template.replicas > 1 or template.role != "Master" else "warning"
            )
            yield Hit(container.command_path, message, severity, role=template.role)
        elif re.fullmatch(r"\d+\.\d+\.\d+\.\d+", host):
            message = f"{{role}} passes the address {host}, which no pod keeps"
            yield Hit(container.command_path, message, "warning", role=template.role)
        if _alone(options):
            flag = "--standalone" if "standalone" in options else f"--nnodes={options['nnodes']}"
            message = f"{{role}} passes {flag} in a job of {job.pods} pods: each would train alone"
            yield Hit(container.command_path, message, "warning", role=template.role)
        count = options.get("nproc-per-node", "")
        if count.isdigit() and job.processes_per_pod not in (None, int(count)):
            message = (
                f"{{role}} passes --nproc-per-node={count}, and nprocPerNode says {job.processes_per_pod}"
            )
            yield Hit(container.command_path, message, "warning", role=template.role)


def _own_rank(job: Job, template: PodTemplate, rank: str) -> bool:
    """Master 0 and one Worker 1, each with its own command."""
    return job.kind == "PyTorchJob" and int(rank) == (0 if template.role == "Master" else 1)


def _alone(options: dict[str, str]) -> bool:
    return "standalone" in options or options.get("nnodes", "").strip() in ("1", "1:1")


@rule(
    "PT106",
    "warning",
    fix="use torchrun; the Trainer and accelerate's API work under it unchanged",
    kinds=BOTH,
)
def launcher_ignores_operator(job: Job) -> Iterator[Hit]:
    """Accelerate launch, trl and the deepspeed launcher ignore PET_*: without their own flags or hostfile
    each pod trains alone."""
    for template, container in job.mains():
        launch = container.launch
        by_flags = any(BY_FLAGS.match(word) for word in launch.argv)
        if job.pods > 1 and launch.kind in ("accelerate", "deepspeed", "trl") and not by_flags:
            message = f"{{role}} starts {launch.kind}, which does not read the operator's variables"
            yield Hit(container.command_path, message, role=template.role)


@rule(
    "PT107",
    "warning",
    fix='begin the command with exec, or write it as a list: command: ["torchrun", ...]',
    kinds=BOTH,
)
def shell_as_first_process(job: Job) -> Iterator[Hit]:
    """A shell as the first process passes no SIGTERM on, so a preempted pod is killed without saving; exec
    hands over to the program."""
    for template, container in job.mains():
        launch = container.launch
        if launch.kind and launch.swallows and launch.kind != "python":
            message = f"a shell is the first process of {{role}} and starts {launch.argv[0]} without exec"
            yield Hit(container.command_path, message, role=template.role)


@rule("PT108", "warning", fix="set the same value on Master and Worker, or on neither", values="nccl.env")
def interface_on_one_replica(job: Job) -> Iterator[Hit]:
    """A network interface fixed for one replica type only makes the others choose by themselves, and where
    they choose another the rendezvous hangs."""
    mains = list(job.mains())
    if len(mains) < 2:
        return
    for name in INTERFACES:
        values = {
            template.role: {str(entry.get("value")) for _, entry in container.env if entry["name"] == name}
            for template, container in mains
        }
        if len({frozenset(value) for value in values.values()}) > 1:
            _, container = next((t, c) for t, c in mains if values[t.role])
            index = next(i for i, entry in container.env if entry["name"] == name)
            sides = ", ".join(f"{role}: {' '.join(value) or 'not set'}" for role, value in values.items())
            yield Hit((*container.path, "env", index), f"{name} differs between replicas ({sides})")


@rule(
    "PT109",
    "error",
    by="hang",
    fix="make the first pod a Master, or add an elasticPolicy",
    values="distributed.nodes",
)
def no_rendezvous(job: Job) -> Iterator[Hit]:
    """Several Workers without Master or elasticPolicy get no address to meet at: torchrun waits on each pod's
    own localhost for the others and hangs until it times out."""
    workers = job.template("Worker")
    if workers is None or workers.replicas < 2 or workers.main is None:
        return
    if job.template("Master") is not None or job.spec.get("elasticPolicy") is not None:
        return
    container, launch = workers.main, workers.main.launch
    by_hand = {"MASTER_ADDR", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT"} & {e["name"] for _, e in container.env}
    if by_hand or container.spec.get("envFrom") or "master-addr" in launch.options:
        return
    if "rdzv-endpoint" in launch.options or "rdzv-id" in launch.options:
        return
    sure = launch.kind == "torchrun" and not _alone(launch.options) and "nnodes" not in launch.options
    message = f"{workers.replicas} Workers, no Master and no elasticPolicy: nothing sets MASTER_ADDR"
    yield Hit((*workers.path,), message, None if sure else "warning")


@rule(
    "PT110",
    "error",
    by="hang",
    fix="minReplicas <= Worker.replicas <= maxReplicas, all pods being Workers",
    values="elastic",
)
def elastic_range(job: Job) -> Iterator[Hit]:
    """MinReplicas and maxReplicas bound the Workers: with fewer the rendezvous waits for ever, and torchrun
    refuses a minimum above the maximum.

    A Master is not counted and is one pod too many.
    """
    elastic, workers = job.spec.get("elasticPolicy"), job.template("Worker")
    if elastic is None or workers is None:
        return
    low, high = elastic.get("minReplicas"), elastic.get("maxReplicas")
    low, high = (low if low is not None else high), (high if high is not None else low)
    path = ("spec", "elasticPolicy")
    if low is not None and high is not None and (low > high or low < 1):
        message = f"minReplicas {low} is above maxReplicas {high}" if low > high else f"minReplicas is {low}"
        yield Hit(path, message)
    elif low is not None and high is not None and not low <= workers.replicas <= high:
        scaled = workers.replicas > high or elastic.get("metrics")
        message = f"{workers.replicas} Workers are outside {low} to {high}"
        yield Hit(path, message, "warning" if scaled else None)
    if job.template("Master") is not None:
        yield Hit(path, "an elastic job with a Master: PET_NNODES counts the Workers only", "warning")
    if elastic.get("standalone") and workers.replicas > 1:
        message = f"standalone with {workers.replicas} Workers: each would train alone"
        yield Hit((*path, "standalone"), message, "warning", "remove it")
    backend = elastic.get("rdzvBackend")
    if backend is not None and backend not in ("c10d", "etcd", "etcd-v2", "static"):
        message = f"rdzvBackend is {backend!r}; torchrun has c10d, etcd, etcd-v2 and static"
        yield Hit((*path, "rdzvBackend"), message, "warning", "rdzvBackend: c10d")


@rule("PT111", "warning", fix="use the same image on Master and Worker", values="image")
def images_differ(job: Job) -> Iterator[Hit]:
    """Master and Worker of different images run different library versions and fail at the first collective,
    or drift."""
    images = {template.role: container.spec.get("image") for template, container in job.mains()}
    if len(set(images.values())) > 1:
        _, container = list(job.mains())[-1]
        sides = ", ".join(f"{role}: {image}" for role, image in images.items())
        yield Hit((*container.path, "image"), f"the images differ ({sides})")


@rule("PT112", "error", by="hang", fix="leave --nnodes out: torchrun reads PET_NNODES", kinds=BOTH)
def nodes_differ_from_pods(job: Job) -> Iterator[Hit]:
    """Torchrun --nnodes above the number of pods waits for pods that do not exist, for ever; WORLD_SIZE
    counts processes, not pods.

    Below it, the pods that are too many find no place (a warning).
    """
    if not job.pods or job.torch_environment is None:
        return
    env = {name: value for name, value in job.torch_environment.items() if value != "?"}
    for template, container in job.mains():
        text = container.launch.options.get("nnodes", "") if container.launch.kind == "torchrun" else ""
        if not text:
            continue
        if unset := _unknown(job, container, text):
            message = f"{{role}} passes --nnodes={text}, and nothing sets {unset}"
            yield Hit(container.command_path, message, role=template.role)
            continue
        shell = bool(container.launch.script)
        variables = {**_assigned(container.launch.script), **container.literals, **env}
        value = expanded(text, variables, shell=shell)
        low, _, high = (value or "").partition(":")
        if not low.isdigit():
            continue
        meaning = f"--nnodes={text}" + (f", which is {value}," if value != text else "")
        if int(low) > job.pods:
            message = f"{{role}} passes {meaning} and the job has {job.pods} pod{'s' * (job.pods > 1)}"
            yield Hit(container.command_path, message, role=template.role)
        elif 1 < int(low) < job.pods and not high:
            message = f"{{role}} passes {meaning} and the job has {job.pods} pods"
            yield Hit(container.command_path, message, "warning", role=template.role)


def _assigned(script: str) -> dict[str, str]:
    return dict(re.findall(r"^\s*(?:export\s+)?(\w+)=[\"']?([\w.:-]+)[\"']?\s*$", script, re.MULTILINE))


@rule(
    "PT113",
    "error",
    by="hang",
    fix="remove it, or name the interface that reaches the other pods, as eth0",
    values="nccl.env",
    kinds=BOTH,
)
def loopback_between_pods(job: Job) -> Iterator[Hit]:
    """The loopback interface reaches no other pod: the collectives of a job of several pods hang or fail.

    An
    error for the library that the pods use: NCCL with devices, gloo without.
    """
    if job.pods < 2:
        return
    for template, container in job.mains():
        for index, entry in container.env:
            name, value = entry["name"], str(entry.get("value") or "").strip()
            if name not in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
                continue
            if value.lstrip("=").split(",")[0] in ("lo", "lo0"):
                used = bool(container.gpus) == (name == "NCCL_SOCKET_IFNAME")
                sure = used and name != "TP_SOCKET_IFNAME" and not template.pod.get("hostNetwork")
                message = f"{name} is {value}, which reaches no other pod"
                yield Hit(
                    (*container.path, "env", index), message, None if sure else "warning", role=template.role
                )


@rule("PT114", "error", by="hang", fix="write each word by itself", kinds=ALL)
def command_cannot_start(job: Job) -> Iterator[Hit]:
    """The kubelet executes the first word of the command, with no shell in between: a whole sentence in it,
    or one handed to a shell without -c, is a program that does not exist, so the container never starts."""
    for template, container in job.all_containers:
        command = [str(word) for word in container.spec.get("command") or []]
        args = [str(word) for word in container.spec.get("args") or []]
        for key, index, message, fix in cannot_start(command, args):
            yield Hit((*container.path, key, index), message, fix=fix, role=template.role)
        for key, index, message in without_a_shell(command, args):
            place, fix = (*container.path, key, index), 'command: ["sh", "-c", "..."]'
            yield Hit(place, message, "warning", fix, template.role)


@rule("PT115", "warning", fix="give Master and Worker the same command")
def commands_differ(job: Job) -> Iterator[Hit]:
    """Every process of a job has to run the same program: with another one the collectives of the two do not
    fit each other, and they hang."""
    mains = list(job.mains())
    if len(mains) < 2:
        return
    (_, first), (template, last) = mains[0], mains[-1]
    sides = [
        (container.launch.kind, container.launch.program or " ".join(_settled(container)))
        for container in (first, last)
    ]
    if sides[0] != sides[1]:
        shown = [
            " ".join(container.words[:4]).splitlines()[0][:60] if container.words else "the image's own"
            for container in (first, last)
        ]
        message = f"{mains[0][0].role} starts {shown[0]!r}, {template.role} {shown[1]!r}"
        yield Hit(last.command_path, message)


def _settled(container: JobContainer) -> list[str]:
    """The words without options, whose values may differ by replica."""
    return [word for word in container.words if not word.startswith("-")][:2]
