"""PT5: TrainJobs and their runtimes: Trainer's webhooks, and what JobSet refuses later."""

from __future__ import annotations

from collections.abc import Iterator

from podtune.cluster.job.manifest import Json, dig
from podtune.cluster.job.trainjob import ANCESTOR, MAX_NAME, NODE, TORCH_DISTRIBUTED
from podtune.cluster.lint.diagnostic import Diagnostic, Place, Severity
from podtune.cluster.lint.documents import RUNTIMES
from podtune.cluster.lint.job import Job
from podtune.cluster.lint.rules import rule
from podtune.cluster.lint.targets import MAX_STEP_NAME, TRAINERS
from podtune.cluster.lint.templates import ancestor, container_names, pod_of, replicated_jobs

ONLY = ("TrainJob",)
GROUP = "trainer.kubeflow.org"
MANAGERS = (f"{GROUP}/trainjob-controller", "kueue.x-k8s.io/multikueue")
TRAINER: Place = ("spec", "trainer")
STEP_PLACE: Place = ("spec", "template", "spec", "replicatedJobs")
RUNTIME: Place = ("spec", "runtimeRef")
#: the label of a step -> the container that it needs
STEPS = {"trainer": NODE} | {name: name for name in ("model-initializer", "dataset-initializer")}
#: the policies of a runtime, of which it has one
POLICIES = ("torch", "mpi", "jax", "flux", "xgboost")
JOBSET_SUFFIX = len("-0-") + len("-xxxxx")  # of a pod: NAME-STEP-0-INDEX-xxxxx


@rule("PT501", "warning", fix="add spec.trainer, with numNodes and numProcPerNode", kinds=ONLY)
def no_trainer(job: Job) -> Iterator[Diagnostic]:
    """Without spec.trainer no PET_* reaches the pods, so torchrun starts a job of its own in each node."""
    if "trainer" not in job.spec and job.by_torch and job.pods > 1:
        yield Diagnostic(("spec",), f"the TrainJob has no spec.trainer, and its runtime {job.pods} nodes")


@rule("PT502", "error", by="webhook", fix="the processes (GPUs) of one pod, without quotes", kinds=ONLY)
def trainer_processes(job: Job) -> Iterator[Diagnostic]:
    """The webhook takes a number or auto, cpu, gpu for numProcPerNode, and refuses any other text.

    A number in quotes too. So does Trainer 2.0 and 2.1; later the API server takes numbers only.
    """
    trainer, place = dig(job.spec, "trainer"), (*TRAINER, "numProcPerNode")
    value, nodes = trainer.get("numProcPerNode", 1), trainer.get("numNodes", 1)
    if isinstance(value, str) and value not in ("auto", "cpu", "gpu") and job.by_torch is not False:
        yield Diagnostic(place, f"numProcPerNode is {value!r}")
    elif isinstance(value, int) and value < 1:
        yield Diagnostic(place, f"numProcPerNode is {value}, below 1", by="hang")
    if nodes < 1:
        severity: Severity = "warning" if nodes == 0 else "error"
        message, fix = f"numNodes is {nodes}: no pod trains", "numNodes: 1 or more"
        yield Diagnostic((*TRAINER, "numNodes"), message, severity, fix, "operator")


@rule("PT503", "error", by="operator", fix="a shorter name", kinds=ONLY)
def trainjob_name_too_long(job: Job) -> Iterator[Diagnostic]:
    """JobSet refuses names of which a pod's would pass 63 characters (48 with the step node).

    Trainer's webhook takes them: the TrainJob waits for ever without a status.
    """
    # a runtime that only the cluster knows is taken for the usual one
    steps = [str(step.get("name") or "") for step in replicated_jobs(job.runtime or TORCH_DISTRIBUTED)]
    longest = max(steps, key=len, default=NODE)
    index = len(str(max(0, job.pods - 1))) if longest == NODE else 1
    most = min(MAX_NAME, 63 - 1 - len(longest) - JOBSET_SUFFIX - index)
    if most < len(job.name) <= 63:
        message = f"the name has {len(job.name)} of at most {most} characters"
        yield Diagnostic(("metadata", "name"), message)


@rule("PT507", "error", by="webhook", fix="TrainingRuntime or ClusterTrainingRuntime", kinds=ONLY)
def unknown_runtime_kind(job: Job) -> Iterator[Diagnostic]:
    """The webhook refuses a runtimeRef of another kind or group.

    The API server refuses a managedBy other than Trainer's own or MultiKueue's.
    """
    reference = dig(job.spec, "runtimeRef")
    kind, group, manager = reference.get("kind"), reference.get("apiGroup", GROUP), job.spec.get("managedBy")
    own = job.context.runtimes.get(("TrainingRuntime", str(reference.get("name"))))
    namespace = dig(own, "metadata").get("namespace")
    if own is not None and kind is None and job.runtime is None:
        message = "runtimeRef has no kind, which means ClusterTrainingRuntime, and this one is not"
        yield Diagnostic(RUNTIME, message, "warning", "kind: TrainingRuntime")
    if kind == "TrainingRuntime" and namespace and job.metadata.get("namespace", namespace) != namespace:
        message = f"the TrainingRuntime {reference['name']} is of the namespace {namespace}"
        yield Diagnostic(RUNTIME, message, "warning", "put both into one namespace")
    if kind not in (None, *RUNTIMES):
        yield Diagnostic((*RUNTIME, "kind"), f"{kind!r} is not a kind of runtime")
    if group != GROUP:
        yield Diagnostic((*RUNTIME, "apiGroup"), f"{group!r} has no runtimes", fix=f"apiGroup: {GROUP}")
    if manager not in (None, *MANAGERS):
        message, fix = f"{manager!r} is not a controller that is allowed here", " or ".join(MANAGERS)
        yield Diagnostic(("spec", "managedBy"), message, fix=f"remove it, or use {fix}", by="api")


@rule("PT508", "warning", fix=f"label it {ANCESTOR}: trainer, its container {NODE}", kinds=(*ONLY, *RUNTIMES))
def trainer_is_ignored(job: Job) -> Iterator[Diagnostic]:
    """Image, command and numNodes of spec.trainer are dropped where the runtime has no step trainer.

    spec.trainer goes to the container node of the replicated job with that label.
    """
    runtime = job.runtime if job.kind == "TrainJob" else job.content
    if runtime is None or (job.kind == "TrainJob" and "trainer" not in job.spec):
        return
    place = RUNTIME if job.kind == "TrainJob" else ("spec", "template")
    steps = [step for step in replicated_jobs(runtime) if ancestor(step) == "trainer"]
    name = dig(runtime, "metadata").get("name")
    if not steps:
        yield Diagnostic(place, f"no replicated job of the runtime {name} has the label of the step trainer")
    elif job.kind == "TrainJob" and not any(NODE in container_names(step) for step in steps):
        yield Diagnostic(place, f"the step trainer of the runtime {name} has no container {NODE}")


@rule("PT509", "error", by="webhook", fix="name a job and a container of the runtime", kinds=ONLY)
def override_without_target(job: Job) -> Iterator[Diagnostic]:
    """The webhook refuses overrides and patches of a job or container that the runtime does not have.

    An initializer without its step, too, and variables of the container node outside spec.trainer.env.
    """
    if job.runtime is None:
        return
    names = {str(step.get("name")): container_names(step) for step in replicated_jobs(job.runtime)}
    for step in dig(job.spec, "initializer"):
        wanted = f"{step}-initializer"
        if wanted not in names.get(wanted, set()):
            message = f"the runtime has no step {wanted}, and spec.initializer.{step} is given"
            yield Diagnostic(("spec", "initializer", step), message, fix="a runtime with this step")
    for path, target, pod in _overrides(job.spec):
        if target not in names:
            yield Diagnostic(path, f"the runtime has no replicated job {target!r}")
            continue
        for key in ("containers", "initContainers"):
            for index, container in enumerate(pod.get(key) or []):
                name, place = container.get("name"), (*path, key, index)
                if name not in names[target]:
                    yield Diagnostic(place, f"the replicated job {target!r} has no container {name!r}")
                elif container.get("env") and name in STEPS.values():
                    fix = "spec.trainer.env, or spec.initializer.*.env"
                    yield Diagnostic(place, f"variables of {name} are given in an override", fix=fix)


def _overrides(spec: Json) -> Iterator[tuple[Place, str, Json]]:
    """Place, replicated job and part of a pod spec of each override and patch."""
    for field in ("podSpecOverrides", "podTemplateOverrides"):
        for index, override in enumerate(spec.get(field) or []):
            pod = override if field == "podSpecOverrides" else dig(override, "spec")
            for target in override.get("targetJobs") or []:
                yield ("spec", field, index), str(target.get("name")), pod
    for index, patch in enumerate(spec.get("runtimePatches") or []):
        for replicated in replicated_jobs({"spec": dig(patch, "trainingRuntimeSpec")}):
            yield ("spec", "runtimePatches", index), str(replicated.get("name")), pod_of(replicated)


def long_step_names(content: Json, version: str) -> Iterator[Diagnostic]:
    """Names of replicated jobs, of a runtime or of patches, that this version of Trainer finds too long."""
    most = MAX_STEP_NAME.get(version, 253)
    names = [(STEP_PLACE, str(step.get("name"))) for step in replicated_jobs(content)]
    for place, name in [*names, *((place, name) for place, name, _ in _overrides(dig(content, "spec")))]:
        if len(name) > most:
            message = f"the replicated job {name} has {len(name)} characters, Trainer {version} takes {most}"
            yield Diagnostic(place, message, fix="a shorter name", code="PT005")


@rule("PT510", "error", by="webhook", fix="replicas: 1, and the container of the step", kinds=RUNTIMES)
def runtime_steps(job: Job) -> Iterator[Diagnostic]:
    """The webhook refuses a runtime whose trainer or initializer has replicas other than 1.

    From Trainer 2.1 on, one whose step lacks its container too (node, model-initializer,
    dataset-initializer). The API server refuses two policies and Jobs of another restartPolicy than OnFailure
    and Never, and JobSet a dependence on no earlier job.
    """
    for template in job.templates:
        if template.restart_policy not in ("OnFailure", "Never"):
            message, fix = f"restartPolicy is {template.restart_policy}", "restartPolicy: OnFailure or Never"
            yield Diagnostic((*template.pod_path, "restartPolicy"), message, fix=fix, by="operator")
    policies = [name for name in POLICIES if name in dig(job.spec, "mlPolicy")]
    if len(policies) > 1:
        message = f"mlPolicy has {' and '.join(policies)}, it takes one"
        yield Diagnostic(("spec", "mlPolicy"), message, fix="keep one", by="api")
    names: list[str] = []
    for index, replicated in enumerate(replicated_jobs(job.content)):
        place: Place = (*STEP_PLACE, index)
        for number, other in enumerate(replicated.get("dependsOn") or []):
            if other.get("name") not in names:
                message = f"dependsOn {other.get('name')!r}, which is no replicated job above"
                fix = "name a job that stands before it"
                yield Diagnostic((*place, "dependsOn", number), message, fix=fix, by="operator")
        names.append(str(replicated.get("name")))
        step = ancestor(replicated)
        if step in STEPS and replicated.get("replicas", 1) != 1:
            message = f"replicas of the step {step} is {replicated['replicas']}, it must be 1"
            yield Diagnostic((*place, "replicas"), message)
        if step in STEPS and STEPS[step] not in container_names(replicated):
            message = f"the step {step} has no container {STEPS[step]!r}"
            yield Diagnostic(place, message, "warning" if job.target.trainer == "2.0" else "error")


@rule("PT513", "note", fix="say which Trainer you have: --target trainer=2.1", kinds=(*ONLY, *RUNTIMES))
def of_an_older_trainer(job: Job) -> Iterator[Diagnostic]:
    """Fields of a TrainJob come and go between the versions of Trainer.

    podSpecOverrides is of 2.0, podTemplateOverrides of 2.1, runtimePatches of 2.2 and later, and auto for
    numProcPerNode ends with 2.1.
    """
    if not job.target.trainer and job.trainer != TRAINERS[-1] and not job.violations:
        yield Diagnostic(("spec",), f"it fits Trainer up to {job.trainer}; later ones refuse it")
