"""PT0: refusals of a job by the API server and the webhooks, and of its pods (core.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from podtune.cluster.job.manifest import dig
from podtune.cluster.job.pytorchjob import CONTAINER, REPLICA_TYPES, replica_name
from podtune.cluster.job.trainjob import NODE
from podtune.cluster.lint.diagnostic import By, Diagnostic
from podtune.cluster.lint.documents import RUNTIMES
from podtune.cluster.lint.job import Job
from podtune.cluster.lint.names import IMAGE, LABEL, SUBDOMAIN, metadata
from podtune.cluster.lint.rules import ALL, WITH_PODS, collected, rule
from podtune.cluster.lint.templates import replicated_jobs
from podtune.run.errors import near

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
REPLICAS = ("spec", "pytorchReplicaSpecs")
RUN_POLICY = ("spec", "runPolicy")
MANAGERS = ("kubeflow.org/training-operator", "kueue.x-k8s.io/multikueue")
VERSION, TRAINER_VERSION = "kubeflow.org/v1", "trainer.kubeflow.org/v1alpha1"
API_VERSIONS = f"apiVersion: {VERSION} of a PyTorchJob, {TRAINER_VERSION} of a TrainJob or runtime"


collected("PT001", "not-yaml", "api", "correct it", "is not YAML, or gives a key twice")
collected(
    "PT002", "unknown-field", "api", "remove it, or correct the spelling", "has a field that the CRD lacks"
)
collected("PT003", "wrong-type", "api", "correct the type", "has a value of the wrong type")
collected("PT004", "missing-field", "api", "add it", "lacks a field that the schema requires")
collected(
    "PT007", "given-twice", "api", "keep one of them", "has two variables, containers or mounts of one key"
)
collected("PT008", "variable-left", "", "fill it in before kubectl", "has a variable where it wants a number")
collected("PT020", "pod-value", "operator", "correct it", "makes pods with a value that core/v1 lacks")
collected("PT022", "pod-conflict", "operator", "keep one", "makes pods with fields that exclude one another")
collected("PT023", "pod-number", "operator", "correct it", "makes pods with a number out of its bounds")


@rule("PT005", "error", by="api", fix="use one of the values named", kinds=ALL)
def unknown_value(job: Job) -> Iterator[Diagnostic]:
    """The API server refuses what is not a quantity or out of bounds.

    Other values outside their list (restartPolicy, nprocPerNode) it takes, and the operator then creates no
    pod that runs. An unknown cleanPodPolicy counts as All (a warning).
    """
    if job.kind != "PyTorchJob":
        return
    # the CRD lists no values for these fields, so the API server takes any text
    policy = dig(job.spec, "runPolicy").get("cleanPodPolicy", "None")
    if policy not in ("None", "Running", "All"):
        message = f"{policy!r} is none of None, Running, All"
        yield Diagnostic((*RUN_POLICY, "cleanPodPolicy"), message, "warning")
    for template in job.templates:
        if template.restart_policy not in ("Always", "OnFailure", "Never", "ExitCode"):
            message = f"{template.restart_policy!r} is none of OnFailure, Never, ExitCode, Always"
            yield Diagnostic((*template.path, "restartPolicy"), message, by="operator")
    processes = str(job.spec.get("nprocPerNode", "auto"))
    if processes not in ("auto", "cpu", "gpu", "xpu") and not re.fullmatch(r"0*[1-9]\d*", processes):
        message = f"{processes!r} is none of auto, cpu, gpu or a number of 1 and above"
        yield Diagnostic(("spec", "nprocPerNode"), message, by="hang")


@rule("PT006", "error", by="api", fix=API_VERSIONS, kinds=ALL)
def wrong_api_version(job: Job) -> Iterator[Diagnostic]:
    """The API server knows each kind in one API version only, and refuses any other."""
    wanted = {"PyTorchJob": VERSION, "Job": "batch/v1"}.get(job.kind, TRAINER_VERSION)
    version = job.document.content.get("apiVersion") or wanted
    if version != wanted:
        yield Diagnostic(("apiVersion",), f"{job.kind} is of {wanted}, not of {version}")


@rule("PT010", "error", by="webhook", fix="a-z, 0-9 and '-', beginning with a letter", kinds=ALL)
def bad_name(job: Job) -> Iterator[Diagnostic]:
    """The webhook refuses a name that is not a DNS-1035 label, as Services are named after it.

    Of a runtime the API server refuses a name that is not a DNS-1123 subdomain, and JobSet's webhook those of
    its jobs.
    """
    for index, step in enumerate(replicated_jobs(job.content)):
        if not re.fullmatch(r"[-a-z0-9]+", name := str(step.get("name", NODE))):
            at = ("spec", "template", "spec", "replicatedJobs", index, "name")
            yield Diagnostic(at, f"the replicated job {name!r} has other characters than a-z, 0-9 and '-'")
    name = job.name
    place = ("metadata", "name" if "name" in job.metadata else "generateName")
    if not name and not job.document.holder:
        message, fix = f"the {job.kind} has no name", "give it metadata.name"
        yield Diagnostic(("metadata", "name"), message, fix=fix, by="api")
    elif name and job.kind in RUNTIMES:
        if not SUBDOMAIN.fullmatch(name):
            fix = "lower-case letters, digits, '-' and '.'"
            yield Diagnostic(place, f"the name {name!r} is not a DNS-1123 subdomain", fix=fix, by="api")
    elif name and job.kind == "Job":
        longest = f"{name}-{max(0, job.pods - 1)}"
        if not LABEL.fullmatch(longest):
            message = f"{longest}, a pod's host name after the Job's name, is not a DNS-1123 label"
            yield Diagnostic(place, message, fix="a-z, 0-9 and '-', and at most 63 characters with the index")
    elif name and (not DNS_1035.fullmatch(name) or len(name) > 63):
        yield Diagnostic(place, f"the name {job.document.name!r} is not a DNS-1035 label")


@rule("PT011", "error", by="operator", fix="a shorter name")
def name_too_long(job: Job) -> Iterator[Diagnostic]:
    """The operator cannot create Services whose names pass 63 characters.

    Pods and Services add -master-0 or -worker-N to the job's name; the webhook lets it through.
    """
    names = (
        replica_name(job.name, template.role, max(0, template.replicas - 1)) for template in job.templates
    )
    longest = max(names, key=len, default="")
    # a name that is too long by itself is PT010's
    if len(longest) > 63 and len(job.name) <= 63:
        message = f"the name has {len(job.name)} characters, so {longest} has {len(longest)} of at most 63"
        yield Diagnostic(("metadata", "name"), message)


@rule("PT012", "error", by="webhook", fix="use Master and Worker, spelt so")
def unknown_replica_type(job: Job) -> Iterator[Diagnostic]:
    """The webhook refuses replica types other than Master and Worker, and a job without any."""
    for template in job.templates:
        if template.role not in REPLICA_TYPES:
            meant = near(template.role.capitalize(), REPLICA_TYPES)
            yield Diagnostic(template.path, f"{template.role!r} is not a replica type{meant}")
    if job.spec and not job.templates:
        yield Diagnostic(REPLICAS, "the job has no replicas")


@rule("PT013", "error", by="webhook", fix="replicas: 1 under Master, all others under Worker")
def replica_counts(job: Job) -> Iterator[Diagnostic]:
    """The webhook wants Master.replicas written, and to be 1, and Worker.replicas to be 1 or more.

    A job of one pod has no Worker.
    """
    replicas = dig(job.spec, "pytorchReplicaSpecs").get("Master", {"replicas": 1}).get("replicas", "absent")
    if replicas != 1:
        yield Diagnostic((*REPLICAS, "Master", "replicas"), f"Master.replicas is {replicas}, it must be 1")
    for template in job.templates:
        if template.role != "Master" and template.replicas < 1:
            message = f"{template.role}.replicas is {template.replicas}, it must be at least 1"
            fix = "leave Worker out for a job of one pod"
            yield Diagnostic((*template.path, "replicas"), message, fix=fix)


@rule("PT015", "error", by="webhook", fix="name the image, with a tag or digest", kinds=WITH_PODS)
def container_without_image(job: Job) -> Iterator[Diagnostic]:
    """The webhook refuses a PyTorchJob's container without an image.

    The API server refuses every other pod with one; the CRD does not demand it.
    """
    for template in job.templates:
        # the webhook looks at containers alone, so init containers are refused later, with the pod
        others = template.init_containers if job.kind == "PyTorchJob" else []
        for container in (*template.containers, *others):
            filled_in = job.kind in RUNTIMES and container.name == template.main_name
            if not container.image and not filled_in:
                message = f"container {container.name!r} of {{role}} has no image"
                by: By = "operator" if container in others or job.kind in RUNTIMES else ""
                yield Diagnostic((*container.path, "image"), message, by=by)


@rule("PT016", "error", by="webhook", fix=f"name the training container {CONTAINER!r}")
def no_pytorch_container(job: Job) -> Iterator[Diagnostic]:
    """The webhook refuses a replica without a container named pytorch.

    The operator takes its port and its exit code from that one.
    """
    for template in job.templates:
        if template.main is None:
            names = ", ".join(container.name for container in template.containers) or "none"
            message = f"{{role}} has no container named {CONTAINER!r} (containers: {names})"
            yield Diagnostic((*template.pod_path, "containers"), message)


@rule("PT017", "error", by="webhook", fix="add Worker, or remove elasticPolicy")
def elastic_policy(job: Job) -> Iterator[Diagnostic]:
    """The webhook refuses an elasticPolicy without Worker: it scales workers, so there have to be some.

    It forbids elasticPolicy.nProcPerNode, the deprecated form of nprocPerNode, beside it.
    """
    if "elasticPolicy" in job.spec and job.template("Worker") is None:
        yield Diagnostic(("spec", "elasticPolicy"), "elasticPolicy without Worker")
    if "nProcPerNode" in dig(job.spec, "elasticPolicy") and "nprocPerNode" in job.spec:
        place = ("spec", "elasticPolicy", "nProcPerNode")
        yield Diagnostic(place, "it and spec.nprocPerNode are both set", fix="keep spec.nprocPerNode only")


@rule("PT019", "error", by="webhook", fix=f"remove it, or use {MANAGERS[0]} or {MANAGERS[1]}")
def unknown_manager(job: Job) -> Iterator[Diagnostic]:
    """The webhook allows two controllers in runPolicy.managedBy only."""
    manager = dig(job.spec, "runPolicy").get("managedBy", MANAGERS[0])
    if manager not in MANAGERS:
        message = f"{manager!r} is not a controller that is allowed here"
        yield Diagnostic((*RUN_POLICY, "managedBy"), message)


@rule("PT021", "error", by="operator", fix="correct the name", kinds=ALL)
def pod_name(job: Job) -> Iterator[Diagnostic]:
    """The API server refuses a pod with a name that breaks the rules, and a job with such labels.

    The name of a container, volume, port, variable, label, resource or of an object that it refers to.
    """
    namespace = str(job.metadata.get("namespace") or "")
    if namespace and not LABEL.fullmatch(namespace):
        message = f"{namespace!r} cannot be the name of a namespace"
        fix = "lower-case letters, digits and '-'"
        yield Diagnostic(("metadata", "namespace"), message, fix=fix, by="api")
    if job.kind == "TrainJob":  # Trainer hands spec.labels on to the JobSet, which is refused
        yield from metadata(job.spec, ("spec",))
    yield from (replace(found, by="api") for found in metadata(job.metadata, ("metadata",)))
    for template in job.own_templates:
        yield from metadata(template.metadata, template.metadata_path)


@rule("PT025", "error", by="hang", fix="registry/path/name:tag, the path in lower case", kinds=ALL)
def image_name(job: Job) -> Iterator[Diagnostic]:
    """The kubelet cannot pull an image whose name no registry can have.

    The pod stays in InvalidImageName for ever.
    """
    for container in job.containers:
        image = container.image
        if image and not re.search(r"\$|\{\{", image) and not IMAGE.fullmatch(image):
            message = f"the image {image!r} is not a name that a registry can have"
            yield Diagnostic((*container.path, "image"), message)
