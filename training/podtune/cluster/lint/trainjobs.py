"""PT5: TrainJobs and their runtimes: Trainer's webhooks, what JobSet refuses later, and where the job would
wait for ever."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from podtune.cluster.job.trainjob import MAX_NAME, TORCH_DISTRIBUTED
from podtune.cluster.lint.documents import RUNTIMES
from podtune.cluster.lint.job import GPU_BY_TRAINER, NODE, Job, ancestor, replicated_jobs
from podtune.cluster.lint.rules import Hit, Severity, rule
from podtune.cluster.lint.targets import TRAINERS

ONLY = ("TrainJob",)
GROUP = "trainer.kubeflow.org"
MANAGERS = (f"{GROUP}/trainjob-controller", "kueue.x-k8s.io/multikueue")
STEPS = {
    "trainer": NODE,
    "model-initializer": "model-initializer",
    "dataset-initializer": "dataset-initializer",
}
JOBSET_SUFFIX = len("-0-") + len("-xxxxx")  # of a pod: NAME-STEP-0-INDEX-xxxxx


@rule("PT501", "warning", fix="add spec.trainer, with numNodes and numProcPerNode", kinds=ONLY)
def no_trainer(job: Job) -> Iterator[Hit]:
    """Without spec.trainer no PET_* reaches the pods, so torchrun starts a job of its own in each of several
    nodes."""
    if job.spec.get("trainer") is None and job.by_torch and job.pods > 1:
        yield Hit(("spec",), f"the TrainJob has no spec.trainer, and its runtime {job.pods} nodes")


@rule(
    "PT502",
    "error",
    by="webhook",
    fix="numProcPerNode: the processes (GPUs) of one pod, a number without quotes",
    values="distributed.nprocPerNode",
    kinds=ONLY,
)
def trainer_processes(job: Job) -> Iterator[Hit]:
    """The webhook of Trainer 2.0 and 2.1 takes a number or auto, cpu, gpu for numProcPerNode, and refuses any
    other text, a number in quotes too; later the API server takes numbers only."""
    trainer = job.spec.get("trainer") or {}
    value = trainer.get("numProcPerNode")
    path = ("spec", "trainer", "numProcPerNode")
    if isinstance(value, str) and value not in ("auto", "cpu", "gpu") and job.by_torch is not False:
        yield Hit(path, f"numProcPerNode is {value!r}")
    elif isinstance(value, int) and value < 1:
        yield Hit(path, f"numProcPerNode is {value}, below 1", by="hang")
    nodes = trainer.get("numNodes")
    if isinstance(nodes, int) and nodes < 1:
        message, fix = f"numNodes is {nodes}: no pod trains", "numNodes: 1 or more"
        severity: Severity | None = "warning" if nodes == 0 else None
        yield Hit(("spec", "trainer", "numNodes"), message, severity, fix, by="operator")


@rule(
    "PT503",
    "error",
    by="operator",
    fix="a shorter name",
    values="fullnameOverride (or the release name)",
    kinds=ONLY,
)
def trainjob_name_too_long(job: Job) -> Iterator[Hit]:
    """JobSet refuses names of which a pod's would pass 63 characters (48 with the step node) after Trainer's
    webhook took them: the TrainJob waits for ever without a status.
    """
    steps = [str(step.get("name") or "") for step in replicated_jobs(job.runtime or TORCH_DISTRIBUTED)]
    longest = max(steps, key=len, default=NODE)
    index = len(str(max(0, job.pods - 1))) if longest == NODE else 1
    most = min(MAX_NAME, 63 - 1 - len(longest) - JOBSET_SUFFIX - index)
    if most < len(job.name) <= 63:
        yield Hit(("metadata", "name"), f"the name has {len(job.name)} of at most {most} characters")


@rule(
    "PT504",
    "warning",
    fix="install the runtime first, or as a pre-install hook, or refer to an installed one",
    kinds=ONLY,
)
def runtime_beside_trainjob(job: Job) -> Iterator[Hit]:
    """A TrainingRuntime in the same chart is created after the TrainJob (Helm goes by kind's name), whose
    webhook then refuses it."""
    runtime = job.runtime
    if runtime is None or runtime.get("kind") != "TrainingRuntime":
        return
    metadata = runtime.get("metadata") or {}
    by_helm = (metadata.get("labels") or {}).get("app.kubernetes.io/managed-by") == "Helm"
    if by_helm and not (metadata.get("annotations") or {}).get("helm.sh/hook"):
        message = f"the TrainingRuntime {metadata.get('name')} comes with the chart of its TrainJob"
        yield Hit(("spec", "runtimeRef"), message)


@rule("PT505", "warning", fix="write the same GPUs under requests and limits", values="resources", kinds=ONLY)
def gpu_limit_without_request(job: Job) -> Iterator[Hit]:
    """With numProcPerNode auto, Trainer 2.0 counts GPUs in requests only: limits alone start one process a
    pod.

    Later versions read limits, too (a note where none is named).
    """
    trainer = job.spec.get("trainer") or {}
    resources = trainer.get("resourcesPerNode") or {}
    gpus = next((template.main.gpus for template in job.templates if template.main), 0)
    if str(trainer.get("numProcPerNode") or "auto") != "auto" or gpus < 2 or job.target.trainer > "2.0":
        return
    if not any(GPU_BY_TRAINER.search(name) for name in resources.get("requests") or {}):
        sure = job.target.trainer == "2.0" or job.trainer == "2.0" or trainer.get("numProcPerNode") == "auto"
        message = f"{gpus} GPUs are in limits only, where Trainer 2.0 does not see them"
        yield Hit(("spec", "trainer", "resourcesPerNode"), message, None if sure else "note")


@rule(
    "PT506",
    "note",
    fix="restartPolicy: Never in the runtime's template, with backoffLimit: 0",
    values="restartPolicy",
    kinds=ONLY,
)
def trainjob_logs_lost(job: Job) -> Iterator[Hit]:
    """Unless the template's restartPolicy is Never, a failed job's pods are deleted with their logs."""
    runtime = job.runtime
    if runtime is not None and runtime.get("kind") == "TrainingRuntime":
        for template in job.templates:
            if template.restart_policy != "Never":
                message = f"the runtime's restartPolicy is {template.restart_policy}"
                yield Hit(("spec", "runtimeRef"), message)


@rule("PT507", "error", by="webhook", fix="TrainingRuntime or ClusterTrainingRuntime", kinds=ONLY)
def unknown_runtime_kind(job: Job) -> Iterator[Hit]:
    """The webhook refuses a runtimeRef of another kind or group, and the API server a managedBy other than
    Trainer's own or MultiKueue's."""
    reference = job.spec.get("runtimeRef") or {}
    kind, group = reference.get("kind"), reference.get("apiGroup")
    if kind not in (None, *RUNTIMES):
        yield Hit(("spec", "runtimeRef", "kind"), f"{kind!r} is not a kind of runtime")
    if group not in (None, GROUP):
        message = f"{group!r} has no runtimes"
        yield Hit(("spec", "runtimeRef", "apiGroup"), message, fix=f"apiGroup: {GROUP}")
    manager = job.spec.get("managedBy")
    if manager not in (None, *MANAGERS):
        message = f"{manager!r} is not a controller that is allowed here"
        yield Hit(("spec", "managedBy"), message, fix=f"remove it, or use {' or '.join(MANAGERS)}", by="api")


@rule(
    "PT508",
    "warning",
    fix="label the replicated job's template trainer.kubeflow.org/trainjob-ancestor-step: trainer, and name"
    f" its container {NODE}",
    kinds=(*ONLY, *RUNTIMES),
)
def trainer_is_ignored(job: Job) -> Iterator[Hit]:
    """spec.trainer goes to the container node of the replicated job with the label of the step trainer: where
    the runtime has none, image, command and numNodes are dropped without a word."""
    runtime = job.runtime if job.kind == "TrainJob" else job.content
    if runtime is None or (job.kind == "TrainJob" and job.spec.get("trainer") is None):
        return
    place = ("spec", "runtimeRef") if job.kind == "TrainJob" else ("spec", "template")
    steps = [step for step in replicated_jobs(runtime) if ancestor(step) == "trainer"]
    name = (runtime.get("metadata") or {}).get("name")
    if not steps:
        message = f"no replicated job of the runtime {name} has the label of the step trainer"
        yield Hit(place, message)
    elif job.kind == "TrainJob" and not any(NODE in _container_names(step) for step in steps):
        yield Hit(("spec", "runtimeRef"), f"the step trainer of the runtime {name} has no container {NODE}")


def _container_names(replicated: dict[str, Any]) -> set[str]:
    template = ((replicated.get("template") or {}).get("spec") or {}).get("template") or {}
    pod = template.get("spec") or {}
    return {
        str(container.get("name"))
        for key in ("containers", "initContainers")
        for container in pod.get(key) or []
    }


@rule("PT509", "error", by="webhook", fix="name a job and a container of the runtime", kinds=ONLY)
def override_without_target(job: Job) -> Iterator[Hit]:
    """The webhook refuses overrides and patches of a job or container that the runtime does not have, an
    initializer without its step, and variables of the container node outside spec.trainer.env."""
    runtime = job.runtime
    if runtime is None:
        return
    names = {str(step.get("name")): _container_names(step) for step in replicated_jobs(runtime)}
    for step in ("dataset", "model"):
        if (job.spec.get("initializer") or {}).get(step) is not None:
            wanted = f"{step}-initializer"
            if wanted not in names.get(wanted, set()):
                message = f"the runtime has no step {wanted}, and spec.initializer.{step} is given"
                yield Hit(("spec", "initializer", step), message, fix="a runtime with this step")
    for path, target, pod in _overrides(job.spec):
        if target not in names:
            yield Hit(path, f"the runtime has no replicated job {target!r}")
            continue
        for key in ("containers", "initContainers"):
            for index, container in enumerate(pod.get(key) or []):
                name = container.get("name")
                if name not in names[target]:
                    yield Hit((*path, key, index), f"the replicated job {target!r} has no container {name!r}")
                elif container.get("env") and name in STEPS.values():
                    message = f"variables of {name} are given in an override"
                    fix = "spec.trainer.env, or spec.initializer.*.env"
                    yield Hit((*path, key, index), message, fix=fix)


def _overrides(spec: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str, dict[str, Any]]]:
    """(place, replicated job, part of a pod spec) of podSpecOverrides, podTemplateOverrides,
    runtimePatches."""
    for field in ("podSpecOverrides", "podTemplateOverrides"):
        for index, override in enumerate(spec.get(field) or []):
            pod = override if field == "podSpecOverrides" else override.get("spec") or {}
            for target in override.get("targetJobs") or []:
                yield ("spec", field, index), str(target.get("name")), pod
    for index, patch in enumerate(spec.get("runtimePatches") or []):
        for replicated in replicated_jobs({"spec": patch.get("trainingRuntimeSpec") or {}}):
            template = ((replicated.get("template") or {}).get("spec") or {}).get("template") or {}
            yield ("spec", "runtimePatches", index), str(replicated.get("name")), template.get("spec") or {}


@rule("PT510", "error", by="webhook", fix="replicas: 1, and the container of the step", kinds=RUNTIMES)
def runtime_steps(job: Job) -> Iterator[Hit]:
    """The webhook refuses a runtime whose trainer or initializer has replicas other than 1, and from Trainer
    2.1 on one whose step lacks its container (node, model-initializer, dataset-initializer)."""
    policies = [name for name in ("torch", "mpi", "jax", "flux", "xgboost") if _ml_policy(job).get(name)]
    if len(policies) > 1:
        message = f"mlPolicy has {' and '.join(policies)}, it takes one"
        yield Hit(("spec", "mlPolicy"), message, fix="keep one", by="api")
    names: list[str] = []
    for index, replicated in enumerate(replicated_jobs(job.content)):
        for number, other in enumerate(replicated.get("dependsOn") or []):
            if other.get("name") not in names:
                at = ("spec", "template", "spec", "replicatedJobs", index, "dependsOn", number)
                message = f"dependsOn {other.get('name')!r}, which is no replicated job above"
                yield Hit(at, message, fix="name a job that stands before it", by="operator")
        names.append(str(replicated.get("name")))
        step, path = ancestor(replicated), ("spec", "template", "spec", "replicatedJobs", index)
        if step not in STEPS:
            continue
        if replicated.get("replicas", 1) != 1:
            yield Hit(
                (*path, "replicas"), f"replicas of the step {step} is {replicated['replicas']}, it must be 1"
            )
        if STEPS[step] not in _container_names(replicated):
            message = f"the step {step} has no container {STEPS[step]!r}"
            yield Hit(path, message, "warning" if job.target.trainer == "2.0" else None)


def _ml_policy(job: Job) -> dict[str, Any]:
    """The sources of the policy that the document gives, an empty one too."""
    policy = (job.content.get("spec") or {}).get("mlPolicy") or {}
    return {name: value is not None for name, value in policy.items()}


@rule("PT511", "error", by="operator", fix="restartPolicy: OnFailure or Never", kinds=RUNTIMES)
def runtime_restart_policy(job: Job) -> Iterator[Hit]:
    """A Job takes the restartPolicy OnFailure or Never only: the API server refuses the Jobs that JobSet
    makes of a runtime with another."""
    for template in job.templates:
        policy = template.pod.get("restartPolicy")
        if policy is not None and policy not in ("OnFailure", "Never"):
            yield Hit((*template.pod_path, "restartPolicy"), f"restartPolicy is {policy}")


@rule("PT512", "warning", fix="call torchrun bare: Trainer sets PET_*", kinds=ONLY)
def variables_of_the_operator(job: Job) -> Iterator[Hit]:
    """Trainer sets none of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: a command that passes them on gets
    the empty text, or the name itself."""
    if job.torch_environment is None:
        return
    for _, container in job.mains():
        if container.launch.kind == "torchrun" or container.spec.get("envFrom"):
            continue  # PT105 and PT112
        own = {entry["name"] for _, entry in container.env}
        for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"):
            if name not in own and re.search(rf"\$\(({name})\)", " ".join(container.words)):
                yield Hit(container.command_path, f"the command uses $({name}), which Trainer does not set")


@rule("PT513", "note", fix="say which Trainer you have: --target trainer=2.1", kinds=(*ONLY, *RUNTIMES))
def of_an_older_trainer(job: Job) -> Iterator[Hit]:
    """Fields of a TrainJob come and go between the versions of Trainer: podSpecOverrides is of 2.0,
    podTemplateOverrides of 2.1, runtimePatches of 2.2 and later, and auto for numProcPerNode ends with
    2.1."""
    if not job.target.trainer and job.trainer != TRAINERS[-1] and not job.violations:
        yield Hit(("spec",), f"it fits Trainer up to {job.trainer}; later ones refuse it")
