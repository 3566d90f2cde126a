"""PT0: what the API server or a webhook refuses, or takes and then never creates a pod for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from podtune.cluster.job.pytorchjob import CONTAINER, REPLICA_TYPES, replica_name
from podtune.cluster.lint import core
from podtune.cluster.lint.documents import RUNTIMES
from podtune.cluster.lint.job import Job
from podtune.cluster.lint.rules import ALL, WITH_PODS, By, Hit, rule
from podtune.cluster.lint.schema import VARIABLE, Violation, type_name
from podtune.run.errors import near

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
REPLICAS = ("spec", "pytorchReplicaSpecs")
MANAGERS = ("kubeflow.org/training-operator", "kueue.x-k8s.io/multikueue")
VERSIONS = {"PyTorchJob": "kubeflow.org/v1"}
TRAINER_VERSION = "trainer.kubeflow.org/v1alpha1"


def _of_kind(job: Job, kind: str) -> Iterator[Violation]:
    return (violation for violation in job.violations if violation.kind == kind)


@rule("PT002", "error", by="api", fix="remove it, or correct the spelling", kinds=ALL)
def unknown_field(job: Job) -> Iterator[Hit]:
    """Kubectl and the API server refuse a field that the CRD does not have (strict validation), or drop it
    silently, so a typo means the default."""
    for violation in _of_kind(job, "unknown"):
        field = str(violation.path[-1])
        message = f"{field!r} is not a field here{near(field, violation.expected)}"
        place = _place_of(field, violation.path)
        yield Hit(violation.path, message, fix=place)


def _place_of(field: str, path: tuple[Any, ...]) -> str:
    """Where a field that people put into the wrong place belongs."""
    if path[:2] == ("spec", "trainer") and field in (
        "volumeMounts",
        "volumes",
        "nodeSelector",
        "tolerations",
    ):
        return (
            "a TrainJob sets it in podTemplateOverrides (Trainer 2.1), runtimePatches (2.2), or the runtime"
        )
    return ""


@rule("PT003", "error", by="api", fix="correct the type", kinds=ALL)
def wrong_type(job: Job) -> Iterator[Hit]:
    """The API server refuses a value of the wrong type; nprocPerNode, for one, is a string and has to be
    quoted."""
    for violation in _of_kind(job, "type"):
        wanted = violation.expected
        words = " or ".join(wanted) if isinstance(wanted, list) else wanted
        name, value = violation.path[-1] if violation.path else "the document", violation.value
        message = f"{name} is {type_name(value)}, the schema wants {words}"
        yield Hit(violation.path, message, fix=_correction(job, violation, words))


def _correction(job: Job, violation: Violation, wanted: str) -> str:
    value, name = violation.value, violation.path[-1] if violation.path else ""
    text = job.document.text(violation.path)
    if text is None:
        if isinstance(value, str) and wanted == "array":
            return "write it as a list: [...]"
        return ""
    if wanted == "integer or string" and isinstance(value, float):
        if "/" in str(name):
            return "a whole number; shares of a GPU are MIG slices or time slicing"
        return f'quote it: {name}: "{text}"'
    if "string" in wanted and isinstance(value, int | float | bool):
        return f'quote it: {name}: "{text}"'
    if wanted == "integer" and re.fullmatch(r"\d+", text):
        return f"without quotes: {name}: {text}"
    if wanted == "boolean" and text.lower() in ("true", "false"):
        return f"without quotes: {name}: {text.lower()}"
    return "write it as a list: [...]" if wanted == "array" else ""


@rule("PT004", "error", by="api", fix="add it", kinds=ALL)
def missing_field(job: Job) -> Iterator[Hit]:
    """The API server refuses a job in which a field that the schema requires is absent or empty."""
    for violation in _of_kind(job, "missing"):
        named = job.document.holder and violation.path == ("metadata",)  # whoever wraps it, names it
        if violation.path != ("metadata", "name") and not named:
            yield Hit(violation.path, f"{violation.path[-1]!r} is required here")


@rule("PT005", "error", by="api", fix="use one of the values named", kinds=ALL)
def unknown_value(job: Job) -> Iterator[Hit]:
    """The API server refuses what is no quantity or out of bounds; other values outside their list
    (restartPolicy, cleanPodPolicy, nprocPerNode) it takes, and the operator then creates no pod that runs."""
    for violation in _of_kind(job, "pattern"):
        if "numkMGTPE" in str(violation.expected):
            message, fix = (
                f"{violation.value!r} is not a quantity",
                "write it as Kubernetes does: 2, 500m, 16Gi",
            )
        else:
            message, fix = f"{violation.value!r} does not fit {violation.expected}", "correct it"
        yield Hit(violation.path, message, fix=fix)
    for violation in _of_kind(job, "bound"):
        message = f"{violation.path[-1]} has to be {violation.expected}"
        yield Hit(violation.path, message, fix="correct it")
    if job.kind != "PyTorchJob":
        return
    policy = (job.spec.get("runPolicy") or {}).get("cleanPodPolicy")
    if policy is not None and policy not in ("None", "Running", "All"):
        message = f"{policy!r} is none of None, Running, All"
        yield Hit(("spec", "runPolicy", "cleanPodPolicy"), message, by="operator")
    for template in job.templates:
        if template.restart_policy not in ("Always", "OnFailure", "Never", "ExitCode"):
            message = f"{template.restart_policy!r} is none of OnFailure, Never, ExitCode, Always"
            yield Hit((*template.path, "restartPolicy"), message, role=template.role, by="operator")
    processes = str(job.spec.get("nprocPerNode", "auto"))
    if processes not in ("auto", "cpu", "gpu", "xpu") and not re.fullmatch(r"0*[1-9]\d*", processes):
        message = f"{processes!r} is none of auto, cpu, gpu or a number of 1 and above"
        yield Hit(("spec", "nprocPerNode"), message, by="hang")


@rule(
    "PT006",
    "error",
    by="api",
    fix=f"apiVersion: {VERSIONS['PyTorchJob']} of a PyTorchJob, {TRAINER_VERSION} of a TrainJob or runtime",
    kinds=ALL,
)
def wrong_api_version(job: Job) -> Iterator[Hit]:
    """The API server knows each kind in one API version only, and refuses any other."""
    wanted = VERSIONS.get(job.kind, TRAINER_VERSION)
    version = job.document.content.get("apiVersion")
    if version not in (wanted, None):
        yield Hit(("apiVersion",), f"{job.kind} is of {wanted}, not of {version}")


@rule("PT007", "error", by="api", fix="keep one of them", kinds=ALL)
def given_twice(job: Job) -> Iterator[Hit]:
    """The API server refuses two items with one key: two variables or containers of one name, two mounts at
    one path."""
    for violation in _of_kind(job, "duplicate"):
        holder, key = violation.path[-2], violation.expected
        yield Hit(violation.path, f"{holder} has {key} {violation.value.get(key)!r} twice")


@rule("PT008", "warning", fix="replace it before kubectl sees it, or write the value", kinds=ALL)
def variable_left(job: Job) -> Iterator[Hit]:
    """A variable of envsubst or a template stands where the API server wants a number: it refuses the file as
    it is.

    Inside a Katib trial it is filled in.
    """
    if job.document.holder:
        return
    for violation in _of_kind(job, "variable"):
        yield Hit(violation.path, f"{violation.path[-1]} is the variable {violation.value}")


@rule(
    "PT010",
    "error",
    by="webhook",
    fix="lower-case letters, digits and '-', beginning with a letter",
    values="fullnameOverride (or the release name)",
    kinds=ALL,
)
def bad_name(job: Job) -> Iterator[Hit]:
    """The webhook (of a runtime the API server) refuses a name that is not a DNS-1035 label, as Services are
    named after it."""
    name = job.name
    place = ("metadata", "name" if "name" in job.metadata else "generateName")
    if not name and job.document.holder:
        return
    if not name:
        yield Hit(("metadata", "name"), f"the {job.kind} has no name", fix="give it metadata.name", by="api")
    elif job.kind in RUNTIMES:
        if not core.SUBDOMAIN.fullmatch(name):
            fix = "lower-case letters, digits, '-' and '.'"
            yield Hit(place, f"the name {name!r} is not a DNS-1123 subdomain", fix=fix, by="api")
    elif not DNS_1035.fullmatch(name) or len(name) > 63:
        yield Hit(place, f"the name {job.document.name!r} is not a DNS-1035 label")


@rule("PT011", "error", by="operator", fix="a shorter name", values="fullnameOverride (or the release name)")
def name_too_long(job: Job) -> Iterator[Hit]:
    """Pods and Services add -master-0 or -worker-N to the job's name and may not pass 63 characters: the
    webhook lets it through, and the operator cannot create the Services."""
    names = (
        replica_name(job.name, template.role, max(0, template.replicas - 1)) for template in job.templates
    )
    longest = max(names, key=len, default="")
    if len(longest) > 63 and len(job.name) <= 63:
        message = f"the name has {len(job.name)} characters, so {longest} has {len(longest)} of at most 63"
        yield Hit(("metadata", "name"), message)


@rule("PT012", "error", by="webhook", fix="use Master and Worker, spelt so")
def unknown_replica_type(job: Job) -> Iterator[Hit]:
    """The webhook refuses replica types other than Master and Worker, and a job without any."""
    for template in job.templates:
        if template.role not in REPLICA_TYPES:
            message = (
                f"{template.role!r} is not a replica type{near(template.role.capitalize(), REPLICA_TYPES)}"
            )
            yield Hit(template.path, message)
    if job.spec and not job.templates:
        yield Hit(REPLICAS, "the job has no replicas")


@rule(
    "PT013",
    "error",
    by="webhook",
    fix="replicas: 1 under Master, all others under Worker",
    values="distributed.nodes",
)
def master_replicas(job: Job) -> Iterator[Hit]:
    """The webhook wants Master.replicas written, and to be 1."""
    replicas = (job.spec.get("pytorchReplicaSpecs") or {}).get("Master", {"replicas": 1}).get("replicas")
    if replicas != 1:
        message = f"Master.replicas is {'absent' if replicas is None else replicas}, it must be 1"
        yield Hit((*REPLICAS, "Master", "replicas"), message)


@rule("PT014", "error", by="webhook", fix="leave Worker out for a job of one pod", values="distributed.nodes")
def worker_replicas(job: Job) -> Iterator[Hit]:
    """The webhook wants Worker.replicas to be 1 or more; a job of one pod has no Worker."""
    for template in job.templates:
        if template.role != "Master" and template.replicas < 1:
            message = f"{template.role}.replicas is {template.replicas}, it must be at least 1"
            yield Hit((*template.path, "replicas"), message)


@rule(
    "PT015",
    "error",
    by="webhook",
    fix="name the image, with a tag or digest",
    values="image.repository, image.tag",
    kinds=WITH_PODS,
)
def container_without_image(job: Job) -> Iterator[Hit]:
    """The webhook refuses a PyTorchJob's container without an image, the API server every other pod's; the
    CRD does not demand one."""
    for template in job.templates:
        beside = template.init_containers if job.kind == "PyTorchJob" else ()
        for container in (*template.containers, *beside):
            runs = not (job.kind in RUNTIMES and container.name == template.main_name)
            if not container.spec.get("image") and runs:
                message = f"container {container.name!r} of {{role}} has no image"
                by = "operator" if container.init else None
                yield Hit((*container.path, "image"), message, role=template.role, by=by)  # type: ignore[arg-type]


@rule("PT016", "error", by="webhook", fix=f"name the training container {CONTAINER!r}")
def no_pytorch_container(job: Job) -> Iterator[Hit]:
    """The webhook refuses a replica without a container named pytorch: the operator takes its port and its
    exit code from that one."""
    for template in job.templates:
        if template.main is None:
            names = ", ".join(container.name for container in template.containers) or "none"
            message = f"{{role}} has no container named {CONTAINER!r} (containers: {names})"
            yield Hit((*template.pod_path, "containers"), message, role=template.role)


@rule("PT017", "error", by="webhook", fix="add Worker, or remove elasticPolicy", values="elastic")
def elastic_without_worker(job: Job) -> Iterator[Hit]:
    """The webhook refuses an elasticPolicy without Worker: it scales workers, so there have to be some."""
    if job.spec.get("elasticPolicy") is not None and job.template("Worker") is None:
        yield Hit(("spec", "elasticPolicy"), "elasticPolicy without Worker")


@rule("PT018", "error", by="webhook", fix="keep spec.nprocPerNode only", values="distributed.nprocPerNode")
def processes_given_twice(job: Job) -> Iterator[Hit]:
    """The webhook forbids elasticPolicy.nProcPerNode, the deprecated form of nprocPerNode, beside it."""
    elastic = job.spec.get("elasticPolicy") or {}
    if elastic.get("nProcPerNode") is not None and job.spec.get("nprocPerNode") is not None:
        yield Hit(
            ("spec", "elasticPolicy", "nProcPerNode"), "nProcPerNode and spec.nprocPerNode are both set"
        )


@rule(
    "PT019",
    "error",
    by="webhook",
    fix=f"remove it, or use {MANAGERS[0]} or {MANAGERS[1]}",
    values="runPolicy.managedBy",
)
def unknown_manager(job: Job) -> Iterator[Hit]:
    """The webhook allows two controllers in runPolicy.managedBy only."""
    manager = (job.spec.get("runPolicy") or {}).get("managedBy")
    if manager is not None and manager not in MANAGERS:
        message = f"{manager!r} is not a controller that is allowed here"
        yield Hit(("spec", "runPolicy", "managedBy"), message)


def _refused(job: Job, kind: str) -> Iterator[Hit]:
    for refusal in job.refusals:
        if refusal.kind == kind:
            # the API server takes any name of a claim; the pod then waits for one that cannot exist
            by: By = "hang" if refusal.path[-1] == "claimName" else "operator"
            yield Hit(refusal.path, refusal.message, fix=refusal.fix, by=by)
    if job.kind == "TrainJob":
        trainer = job.spec.get("trainer") or {}
        for refusal in core.environment(trainer, ("spec", "trainer"), job.target.kubernetes):
            if refusal.kind == kind:
                yield Hit(refusal.path, refusal.message, fix=refusal.fix)


@rule("PT020", "error", by="operator", fix="use one of the values named", kinds=WITH_PODS)
def pod_value(job: Job) -> Iterator[Hit]:
    """A value that core/v1 does not know (imagePullPolicy, dnsPolicy, a toleration's operator): the job is
    taken, and the API server refuses every pod that the operator tries to create."""
    yield from _refused(job, "value")


@rule("PT021", "error", by="operator", fix="correct the name", kinds=ALL)
def pod_name(job: Job) -> Iterator[Hit]:
    """The API server refuses a pod with a name that breaks the rules: of a container, volume, port, variable,
    label, resource or of an object that it refers to; and a job with such labels."""
    namespace = str(job.metadata.get("namespace") or "")
    if namespace and not core.LABEL.fullmatch(namespace):
        message = f"{namespace!r} cannot be the name of a namespace"
        yield Hit(("metadata", "namespace"), message, fix="lower-case letters, digits and '-'", by="api")
    for key in ("labels", "annotations"):
        mapping, at = job.metadata.get(key) or {}, ("metadata", key)
        names = core.labels(mapping, at) if key == "labels" else _annotations(mapping, at)
        yield from (Hit(hit.path, hit.message, fix=hit.fix, by="api") for hit in names)
    for template in job.templates if job.kind != "TrainJob" else ():
        path = template.metadata_path
        for refusal in (
            *core.labels(template.metadata.get("labels") or {}, (*path, "labels")),
            *_annotations(template.metadata.get("annotations") or {}, (*path, "annotations")),
        ):
            yield Hit(refusal.path, refusal.message, fix=refusal.fix)
    yield from _refused(job, "name")
    yield from _of_resources(job, "name")


def _annotations(mapping: dict[str, Any], path: tuple[str | int, ...]) -> Iterator[core.Refusal]:
    for key in mapping:
        yield from core.qualified(key, (*path, key), "annotation")


@rule("PT022", "error", by="operator", fix="keep one of them", kinds=ALL)
def pod_conflict(job: Job) -> Iterator[Hit]:
    """The API server refuses a pod with fields that exclude each other or need one another: two sources of a
    volume, value and valueFrom, a probe of two kinds, a toleration without key, two containers of one
    name."""
    yield from _refused(job, "conflict")
    for template in job.templates:
        if job.kind == "PyTorchJob" and template.role == "Worker" and job.template("Master") is not None:
            for container in (*template.init_containers, *template.containers):
                if container.name == "init-pytorch":
                    message = "a container of Worker is named 'init-pytorch', as the operator names its own"
                    yield Hit((*container.path, "name"), message, fix="rename it")


@rule("PT023", "error", by="operator", fix="correct the number", kinds=ALL)
def pod_number(job: Job) -> Iterator[Hit]:
    """The API server refuses a pod with a number out of its bounds: a port of 99999, a negative
    amount, a part of a GPU."""
    yield from _refused(job, "number")
    yield from _of_resources(job, "number")


def _of_resources(job: Job, kind: str) -> Iterator[Hit]:
    for template, container in job.all_containers:
        for key in ("limits", "requests"):
            amounts = (container.spec.get("resources") or {}).get(key) or {}
            for refusal in core.resources(amounts, key, container.resources_path):
                if refusal.kind == kind:
                    yield Hit(refusal.path, refusal.message, fix=refusal.fix, role=template.role)


@rule(
    "PT025",
    "error",
    by="hang",
    fix="registry/path/name:tag, the path in lower case",
    values="image.repository, image.tag",
    kinds=ALL,
)
def image_name(job: Job) -> Iterator[Hit]:
    """The kubelet cannot pull an image whose name no registry can have: the pod stays in InvalidImageName for
    ever."""
    for template, container in job.all_containers:
        image = str(container.spec.get("image") or "")
        problem = (
            core.image_problem(image) if image and not VARIABLE.search(image) and "$" not in image else ""
        )
        if problem:
            yield Hit((*container.path, "image"), f"the image {image!r} {problem}", role=template.role)
