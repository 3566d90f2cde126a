"""PT105, PT112: torchrun's own flags, which beat what the operator sets."""

from __future__ import annotations

import re
from collections.abc import Iterator

from podtune.cluster.lint.diagnostic import Diagnostic
from podtune.cluster.lint.documents import JOBS
from podtune.cluster.lint.job import Job
from podtune.cluster.lint.rules import rule
from podtune.cluster.lint.templates import JobContainer, PodTemplate

#: a variable in a word of a command: ``$(RANK)`` of Kubernetes, ``$RANK`` and ``${RANK}`` of a shell
REFERENCE = re.compile(r"\$[({]?([A-Za-z_]\w*)[)}]?")
#: in a script of a shell, on a line of its own
ASSIGNED = re.compile(r"^\s*(?:export\s+)?(\w+)=[\"']?([\w.:-]+)[\"']?\s*$", re.MULTILINE)
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
#: torchrun's options for the rendezvous; it reads the static ones with --rdzv-backend=static alone
STATIC = ("node-rank", "master-addr", "master-port")
SETS_RANK = (*STATIC, "rdzv-endpoint")
OWN_ADDRESS = ("localhost", "127.0.0.1", "::1", "[::1]", "0.0.0.0")


@rule("PT105", "error", by="hang", fix="call torchrun bare: it reads PET_*", kinds=JOBS)
def launcher_overrides_operator(job: Job) -> Iterator[Diagnostic]:
    """The rendezvous hangs where torchrun's own flags beat PET_* on every pod.

    The same literal rank, or localhost as the address, or a variable that nothing sets. --standalone and
    --nnodes=1 make every pod train alone (a warning). Flags made of the operator's own variables are fine.
    """
    for template, container in job.mains():
        launch, place = container.launch, container.command_path
        if launch.kind != "torchrun":
            continue
        options = dict(launch.options)
        if "elasticPolicy" in job.spec and options.get("rdzv-backend") != "static":
            for name in STATIC:  # torchrun ignores them beside the operator's PET_RDZV_BACKEND
                options.pop(name, None)
        for name in (*SETS_RANK, "nnodes", "nproc-per-node"):
            value = options.get(name, "")
            shell = re.search(r"\$\{?(RANK|WORLD_SIZE|MASTER_\w+|PET_\w+)\}?", value)
            # Kubernetes itself expands $(NAME) alone
            if shell and not launch.script:
                message = f"{{role}} passes --{name}={value}, and no shell expands {shell[0]}"
                yield Diagnostic(place, message, fix=f"as Kubernetes expands it: $({shell[1]})")
            if name in SETS_RANK and (unset := _unset(job, container, value)):
                yield Diagnostic(place, f"{{role}} passes --{name}={value}, and nothing sets {unset}")
        if job.pods > 1:
            for message, sure in _same_on_every_pod(job, template, options):
                yield Diagnostic(place, message, "error" if sure else "warning")


def _same_on_every_pod(
    job: Job, template: PodTemplate, options: dict[str, str]
) -> Iterator[tuple[str, bool]]:
    """Sentences on flags that are wrong as every pod has them; True where the job surely hangs."""
    rank, alone = options.get("node-rank", ""), trains_alone(options)
    # Master 0 and one Worker 1 may each have a command of their own
    own = job.kind == "PyTorchJob" and template.replicas == 1 and rank == str(int(template.role != "Master"))
    if rank.isdigit() and not own:
        yield f"{{role}} passes --node-rank={rank} on every pod", True
    endpoint = options.get("rdzv-endpoint") or options.get("master-addr") or ""
    host = endpoint.rpartition(":")[0] or endpoint
    if host in OWN_ADDRESS and not alone:
        sure = template.replicas > 1 or template.role != "Master"
        yield f"{{role}} passes {host} as the address to meet at, which is each pod's own", sure
    elif re.fullmatch(r"\d+\.\d+\.\d+\.\d+", host):
        yield f"{{role}} passes the address {host}, which no pod keeps", False
    if alone and job.kind != "Job":  # whose pods may be many trainings
        flag = "--standalone" if "standalone" in options else f"--nnodes={options['nnodes']}"
        yield f"{{role}} passes {flag} in a job of {job.pods} pods: each would train alone", False
    count = options.get("nproc-per-node", "")
    if count.isdigit() and job.processes_per_pod not in (None, int(count)):
        says = f"and nprocPerNode says {job.processes_per_pod}"
        yield f"{{role}} passes --nproc-per-node={count}, {says}", False


def trains_alone(options: dict[str, str]) -> bool:
    """True if torchrun's options make a group of the pod's own processes."""
    return "standalone" in options or options.get("nnodes", "").strip() in ("1", "1:1")


@rule("PT112", "error", by="hang", fix="leave --nnodes out: torchrun reads PET_NNODES", kinds=JOBS)
def nodes_differ_from_pods(job: Job) -> Iterator[Diagnostic]:
    """Torchrun --nnodes above the number of pods waits for pods that do not exist, for ever.

    WORLD_SIZE counts processes, not pods. Below it, the pods that are too many find no place (a warning).
    """
    if not job.pods or job.torch_environment is None:
        return
    for _, container in job.mains():
        launch, place = container.launch, container.command_path
        text = launch.options.get("nnodes", "") if launch.kind == "torchrun" else ""
        fix = ""
        if job.kind == "Job":  # torchrun and podtune launch read PET_NNODES
            text, fix = text or container.literals.get("PET_NNODES", ""), "make it spec.completions"
        if unset := _unset(job, container, text):
            yield Diagnostic(place, f"{{role}} passes --nnodes={text}, and nothing sets {unset}")
            continue
        known = {**dict(ASSIGNED.findall(launch.script)), **container.literals, **job.torch_environment}
        value = _filled_in(text, known)
        low, _, high = value.partition(":")
        if not low.isdigit():
            continue
        name = "--nnodes" if "nnodes" in launch.options else "PET_NNODES"
        meaning = f"{name}={text}" + (f", which is {value}," if value != text else "")
        message = f"{{role}} passes {meaning} and the job has {job.pods} pod{'s' * (job.pods > 1)}"
        if int(low) > job.pods:
            yield Diagnostic(place, message, fix=fix)
        elif 1 < int(low) < job.pods and not high:
            yield Diagnostic(place, message, "warning", fix)


def _filled_in(text: str, variables: dict[str, str]) -> str:
    return REFERENCE.sub(lambda match: variables.get(match[1], "?"), text)


def _unset(job: Job, container: JobContainer, text: str) -> str:
    """A variable of the rendezvous that ``text`` names and nothing sets, or ""."""
    if job.torch_environment is None or container.spec.get("envFrom"):
        return ""
    own = {*container.literals, *job.torch_environment}
    own |= set(re.findall(r"\w+(?==)|(?<=\bread )\w+", container.launch.script))
    return next((name for name in REFERENCE.findall(text) if name in RENDEZVOUS and name not in own), "")
