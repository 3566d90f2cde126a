"""PT1: how the processes of a pod start and find the others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from podtune.cluster.job.manifest import dig
from podtune.cluster.lint.command import word_faults
from podtune.cluster.lint.diagnostic import Diagnostic
from podtune.cluster.lint.documents import JOBS, OPERATED
from podtune.cluster.lint.job import Job
from podtune.cluster.lint.rules import ALL, rule
from podtune.cluster.lint.schema import VARIABLE
from podtune.run.errors import UserError

#: what Trainer's webhook reserves in spec.trainer.env
RESERVED = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
#: flags by which a launcher that does not read PET_* finds the other pods all the same
BY_FLAGS = re.compile(
    r"--(machine[_-]rank|main[_-]process[_-]ip|hostfile|config[_-]file|node[_-]rank|master[_-]addr|no[_-]ssh"
    r"|include|launcher|host|machinefile)\b|-H$"
)
#: accelerate's own: several machines, and what tells them apart
MACHINES = re.compile(r"--num[_-]machines[= ](?!1\b)")
RANKED = re.compile(
    r"--(machine[_-]rank|config[_-]file|deepspeed[_-]hostfile|rdzv[_-]conf|rdzv[_-]backend[= ]c10d)\b"
    r"|\$\w+(\s|$)"
)
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@rule("PT101", "error", by="webhook", fix="remove it; the operator sets it", kinds=OPERATED)
def rendezvous_by_hand(job: Job) -> Iterator[Diagnostic]:
    """RANK, WORLD_SIZE, MASTER_* and PET_* are the operator's.

    In a PyTorchJob what a manifest sets is overridden (a warning); Trainer's webhook refuses PET_* in a
    TrainJob of a torch runtime.
    """
    injected = set(job.torch_environment or {}) - {"PYTHONUNBUFFERED"}
    for _, container in job.mains():
        for index, entry in container.env:
            name, place = entry["name"], (*container.path, "env", index, "name")
            if job.kind == "TrainJob" and name in RESERVED and job.by_torch is not False:
                # before Trainer 2.2 the webhook looks at them beside numProcPerNode only
                sure = job.by_torch and (job.trainer > "2.1" or job.spec["trainer"].get("numProcPerNode"))
                yield Diagnostic(place, f"{name} is reserved for Trainer", "error" if sure else "warning")
            elif job.kind == "PyTorchJob" and name in injected:
                yield Diagnostic(place, f"{name} is set by hand, and the operator overrides it", "warning")


@rule("PT103", "warning", fix="make the processes of a pod its GPUs", kinds=JOBS)
def processes_differ_from_gpus(job: Job) -> Iterator[Diagnostic]:
    """More processes than GPUs in a pod share them, which NCCL refuses; fewer leave GPUs idle.

    CUDA_VISIBLE_DEVICES hides GPUs from them.
    """
    field, number = "numProcPerNode" if job.kind == "TrainJob" else "nprocPerNode", job.processes_per_pod
    for _, container in job.mains():
        gpus, launch, place = container.gpus, container.launch, container.resources_path
        if number is None or "nproc-per-node" in launch.options:
            continue
        visible = container.literals.get("CUDA_VISIBLE_DEVICES", "").strip(" ,")
        if visible and not visible.startswith("$") and number > len(visible.split(",")):
            message = f"{field} is {number} and CUDA_VISIBLE_DEVICES of {{role}} is {visible}"
            yield Diagnostic((*container.path, "env"), message)
        none = container.amounts("limits").get("nvidia.com/gpu") == 0 and number > 1
        if (gpus or none) and (number > gpus or (number < gpus and launch.kind == "torchrun")):
            yield Diagnostic(place, f"{field} is {number} but {{role}} has {gpus} GPUs")


@rule("PT104", "error", by="hang", fix="start it with torchrun, which reads PET_*", kinds=OPERATED)
def plain_python(job: Job) -> Iterator[Diagnostic]:
    """The process group waits for ever where python starts one process and WORLD_SIZE counts more.

    WORLD_SIZE counts nprocPerNode processes a pod. With one process a pod python is fine (but the Hugging
    Face Trainer wants LOCAL_RANK: a note). Trainer sets neither RANK nor WORLD_SIZE, so in a TrainJob of
    several nodes each would train alone: a warning.
    """
    for template, container in job.mains():
        if container.launch.kind != "python":
            continue
        starts = " ".join(container.launch.argv[:3]).splitlines()[0][:80]
        if job.kind == "TrainJob":
            # a program may take PET_* itself, or its variables are set by hand
            reads = "PET_" in " ".join(container.words) or {"RANK", "WORLD_SIZE"} <= set(container.literals)
            if job.pods > 1 and job.by_torch and not reads:
                message = f"{template.replicas} nodes start {starts}, and nothing sets RANK or WORLD_SIZE"
                yield Diagnostic(container.command_path, message, "warning")
        elif (job.processes_per_pod or 1) > 1 and job.template("Master") is not None:
            message = f"{{role}} starts {starts}: one process, and nprocPerNode is {job.processes_per_pod}"
            yield Diagnostic(container.command_path, message)
        elif job.pods > 1 and container.gpus:
            message = f"{{role}} starts {starts} without LOCAL_RANK, which the Hugging Face Trainer needs"
            yield Diagnostic(container.command_path, message, "note")


@rule("PT106", "error", by="hang", fix="use torchrun; the program runs under it unchanged", kinds=OPERATED)
def launcher_ignores_operator(job: Job) -> Iterator[Diagnostic]:
    """Accelerate launch of several machines hangs without --machine_rank: every pod takes itself for rank 0.

    It, trl, mpirun and the deepspeed launcher ignore PET_*, so without flags of their own or a hostfile each
    pod trains alone (a warning).
    """
    for _, container in job.mains() if job.pods > 1 else ():
        launch, words = container.launch, " ".join(container.launch.argv)
        launchers = ("accelerate", "deepspeed", "trl", *(["mpirun"] if job.kind == "PyTorchJob" else []))
        if launch.kind == "accelerate" and MACHINES.search(words) and not RANKED.search(words):
            message = "{role} starts accelerate for several machines, and nothing gives each its rank"
            yield Diagnostic(container.command_path, message, fix="--machine_rank=$(RANK), or torchrun")
        elif launch.kind in launchers and not any(BY_FLAGS.match(word) for word in launch.argv):
            message = f"{{role}} starts {launch.kind}, which does not read the operator's variables"
            yield Diagnostic(container.command_path, message, "warning")


@rule("PT107", "warning", fix="begin with exec, or write the command as a list", kinds=JOBS)
def shell_as_first_process(job: Job) -> Iterator[Diagnostic]:
    """A shell as the first process passes no SIGTERM on, so a preempted pod is killed without saving.

    exec hands over to the program. A shell that starts it in the background and ends, ends the pod.
    """
    for _, container in job.mains():
        launch = container.launch
        background = re.search(r"[^&]&\s*$", launch.script) and not re.search(r"\bwait\b", launch.script)
        if launch.kind and background:
            message = f"the shell of {{role}} starts {launch.argv[0]} in the background and ends"
            yield Diagnostic(container.command_path, message, fix="leave the & out, and begin with exec")
        elif launch.swallows and launch.kind != "python":
            message = f"a shell is the first process of {{role}} and starts {launch.argv[0]} without exec"
            yield Diagnostic(container.command_path, message)


@rule("PT113", "error", by="hang", fix="remove it, or name the pods' interface, as eth0", kinds=JOBS)
def loopback_between_pods(job: Job) -> Iterator[Diagnostic]:
    """The collectives of a job of several pods hang or fail over the loopback interface.

    It reaches no other pod. An error for the library that the pods use: NCCL with devices, gloo without.
    ConfigMaps of envFrom are looked up in the files.
    """
    for template, container in job.mains() if job.pods > 1 else ():
        given = [(entry["name"], entry.get("value"), ("env", index)) for index, entry in container.env]
        for index, source in enumerate(container.spec.get("envFrom") or []):
            data = job.context.configmaps.get(dig(source, "configMapRef").get("name", ""), {})
            given += [(f"{source.get('prefix', '')}{key}", data[key], ("envFrom", index)) for key in data]
        for name, text, place in given:
            value = str(text or "").strip()
            if name in INTERFACES and value.lstrip("=").split(",")[0] in ("lo", "lo0"):
                used = bool(container.gpus) == (name == "NCCL_SOCKET_IFNAME") and name != "TP_SOCKET_IFNAME"
                # pods in the network of one node reach each other by its loopback
                sure = used and not template.pod.get("hostNetwork")
                message = f"{name} is {value}, which reaches no other pod"
                yield Diagnostic((*container.path, *place), message, "error" if sure else "warning")


@rule("PT114", "error", by="hang", fix="write each word by itself", kinds=ALL)
def command_cannot_start(job: Job) -> Iterator[Diagnostic]:
    """A container whose command is not the name of a program never starts.

    The kubelet executes the first word, with no shell in between: a whole sentence in it, or one handed to a
    shell without -c, is a program that does not exist.
    """
    for container in job.containers:
        command = [str(word) for word in container.spec.get("command") or []]
        args = container.words[len(command) :]
        for fault in word_faults(command, args):
            index = fault.index - len(command)
            place = ("args", index) if index >= 0 else ("command", fault.index)
            yield Diagnostic((*container.path, *place), fault.problem, fault.severity, fault.fix)


@rule("PT115", "error", by="hang", fix="correct it in the ConfigMap", kinds=ALL)
def training_keys(job: Job) -> Iterator[Diagnostic]:
    """A training of podtune never begins with an unknown key or a value of another type: it ends with 78.

    The ConfigMap that ``podtune.training --config`` reads is looked up in the files.
    """
    from podtune.sft.config.settings import check_yaml

    for template, container in job.mains():
        found = re.search(r"\bpodtune[. ]train.* --config[ =](\S+)", " ".join(container.launch.argv))
        file = PurePosixPath(container.spec.get("workingDir") or "/", found[1]) if found else None
        for mount in container.mounts if file else ():
            folder = str(mount.get("mountPath"))
            if not file or not file.is_relative_to(folder):
                continue
            name = str(mount.get("subPath") or file.relative_to(folder))
            for _, volume in template.volumes:
                source = dig(volume, "configMap") if volume.get("name") == mount.get("name") else {}
                keys = {item.get("path"): item.get("key") for item in source.get("items") or []}
                text = job.context.configmaps.get(source.get("name", ""), {}).get(keys.get(name, name))
                try:
                    check_yaml(str(text or ""), f"{name} of the ConfigMap {source.get('name')!r}")
                except UserError as error:
                    if not VARIABLE.search(error.what):
                        what = f"{error.where}: {' '.join(error.what.split())}"
                        yield Diagnostic(container.command_path, what)
