"""PT0: what the API server or the operator's webhook refuses, or takes and then never starts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from podtune.cluster.job.pytorchjob import CONTAINER, REPLICA_TYPES, replica_name
from podtune.cluster.lint.job import Job
from podtune.cluster.lint.rules import BOTH, Found, rule
from podtune.cluster.lint.schema import type_name
from podtune.run.errors import near

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
REPLICAS = ("spec", "pytorchReplicaSpecs")
MANAGERS = ("kubeflow.org/training-operator", "kueue.x-k8s.io/multikueue")


@rule("PT002", "error", fix="remove it, or correct the spelling", kinds=BOTH)
def unknown_field(job: Job) -> Iterator[Found]:
    """A field that the PyTorchJob CRD does not have is dropped silently by the API server, so a typo means
    the default.
    """
    for problem in job.problems:
        if problem.kind == "unknown":
            yield Found(
                problem.path,
                (f"{problem.path[-1]!r} is not a field here{near(str(problem.path[-1]), problem.expected)}"),
            )


@rule("PT003", "error", fix="correct the type", values="distributed.nprocPerNode", kinds=BOTH)
def wrong_type(job: Job) -> Iterator[Found]:
    """A value of the wrong type is refused; nprocPerNode, for one, is a string and has to be quoted."""
    for problem in job.problems:
        if problem.kind == "type":
            wanted = " or ".join(problem.expected) if isinstance(problem.expected, list) else problem.expected
            quoted = str(problem.value).lower() if isinstance(problem.value, bool) else str(problem.value)
            quotable = "string" in wanted and isinstance(problem.value, int | float | bool)
            yield Found(
                problem.path,
                f"{problem.path[-1]} is {type_name(problem.value)}, the schema wants {wanted}",
                fix=f'quote it: {problem.path[-1]}: "{quoted}"' if quotable else "",
            )


@rule("PT004", "error", fix="add it", kinds=BOTH)
def missing_field(job: Job) -> Iterator[Found]:
    """A field that the schema requires is absent or empty."""
    for problem in job.problems:
        if problem.kind == "missing" and problem.path != ("metadata", "name"):
            yield Found(problem.path, f"{problem.path[-1]!r} is required here")


@rule("PT005", "error", fix="use one of the values named")
def unknown_value(job: Job) -> Iterator[Found]:
    """A value outside its list (restartPolicy, cleanPodPolicy, nprocPerNode, a quantity): the API server
    takes most of them and the operator then never creates a pod.
    """
    for problem in job.problems:
        if problem.kind == "pattern":
            yield Found(
                problem.path,
                f"{problem.value!r} is not a quantity",
                fix="write it as Kubernetes does: 2, 500m, 16Gi",
            )
    policy = (job.spec.get("runPolicy") or {}).get("cleanPodPolicy")
    if policy is not None and policy not in ("None", "Running", "All"):
        yield Found(("spec", "runPolicy", "cleanPodPolicy"), f"{policy!r} is none of None, Running, All")
    for template in job.templates:
        if template.restart_policy not in ("Always", "OnFailure", "Never", "ExitCode"):
            found = f"{template.restart_policy!r} is none of OnFailure, Never, ExitCode, Always"
            yield Found((*template.path, "restartPolicy"), found)
    processes = str(job.spec.get("nprocPerNode", "auto"))
    if processes not in ("auto", "cpu", "gpu") and not re.fullmatch(r"[1-9]\d*", processes):
        yield Found(
            ("spec", "nprocPerNode"), (f"{processes!r} is none of auto, cpu, gpu or a number of 1 and above")
        )


@rule(
    "PT006",
    "error",
    fix=(
        "apiVersion: kubeflow.org/v1 and kind: PyTorchJob; apiVersion: trainer.kubeflow.org/v1alpha1 and "
        "kind: TrainJob"
    ),
    kinds=BOTH,
)
def wrong_api_version(job: Job) -> Iterator[Found]:
    """The kind exists in one API version only."""
    wanted = "kubeflow.org/v1" if job.kind == "PyTorchJob" else "trainer.kubeflow.org/v1alpha1"
    if job.document.content.get("apiVersion") not in (wanted, None):
        yield Found(
            ("apiVersion",), (f"{job.kind} is of {wanted}, not of {job.document.content['apiVersion']}")
        )


@rule("PT007", "error", fix="keep one of them")
def given_twice(job: Job) -> Iterator[Found]:
    """Two items with one key, as two variables or containers of one name or two mounts at one path, are
    refused.
    """
    for problem in job.problems:
        if problem.kind == "duplicate":
            yield Found(
                problem.path,
                (f"{problem.path[-2]} has {problem.expected} {problem.value.get(problem.expected)!r} twice"),
            )


@rule(
    "PT010",
    "error",
    fix=("lower-case letters, digits and '-', beginning with a letter"),
    values="fullnameOverride (or the release name)",
)
def bad_name(job: Job) -> Iterator[Found]:
    """The job's name has to be a DNS-1035 label, as its pods' Services are named after it."""
    name = job.name
    if not name and (job.content.get("metadata") or {}).get("generateName"):
        return
    if not DNS_1035.fullmatch(name) or len(name) > 63:
        yield Found(
            ("metadata", "name"),
            (f"the name {name!r} is not a DNS-1035 label") if name else "the job has no name",
        )


@rule(
    "PT011",
    "error",
    fix="keep the name within 50 characters",
    values=("fullnameOverride (or the release name)"),
)
def name_too_long(job: Job) -> Iterator[Found]:
    """Pods and Services add -master-0 or -worker-N to the job's name and may not pass 63 characters; the
    webhook lets it through and no pod ever starts.
    """
    longest = max(
        (replica_name(job.name, one.role, max(0, one.replicas - 1)) for one in job.templates),
        key=len,
        default="",
    )
    if len(longest) > 63:
        yield Found(
            ("metadata", "name"),
            (f"the name has {len(job.name)} characters, so {longest} has {len(longest)} of at most 63"),
        )
    elif len(job.name) > 50:
        yield Found(
            ("metadata", "name"),
            (f"the name has {len(job.name)} characters; room for suffixes ends near 50"),
            "warning",
        )


@rule("PT012", "error", fix="use Master and Worker, spelt so")
def unknown_replica_type(job: Job) -> Iterator[Found]:
    """A PyTorchJob has the replica types Master and Worker only."""
    for template in job.templates:
        if template.role not in REPLICA_TYPES:
            yield Found(
                template.path,
                (f"{template.role!r} is not a replica type{near(template.role.capitalize(), REPLICA_TYPES)}"),
            )
    if job.spec and not job.templates:
        yield Found(REPLICAS, "the job has no replicas")


@rule("PT013", "error", fix="replicas: 1 under Master, all others under Worker", values="distributed.nodes")
def master_replicas(job: Job) -> Iterator[Found]:
    """Master.replicas has to be written and has to be 1."""
    replicas = (job.spec.get("pytorchReplicaSpecs") or {}).get("Master", {"replicas": 1}).get("replicas")
    if replicas != 1:
        yield Found(
            (*REPLICAS, "Master", "replicas"),
            (f"Master.replicas is {'absent' if replicas is None else replicas}, it must be 1"),
        )


@rule("PT014", "error", fix="leave Worker out for a job of one pod", values="distributed.nodes")
def worker_replicas(job: Job) -> Iterator[Found]:
    """Worker.replicas has to be 1 or more; a job of one pod has no Worker."""
    for template in job.templates:
        if template.role != "Master" and template.replicas < 1:
            yield Found(
                (*template.path, "replicas"),
                (f"{template.role}.replicas is {template.replicas}, it must be at least 1"),
            )


@rule("PT015", "error", fix="name the image, with a tag or digest", values="image.repository, image.tag")
def container_without_image(job: Job) -> Iterator[Found]:
    """Every container needs an image; the CRD does not demand one, the webhook does."""
    for template in job.templates:
        for container in template.containers:
            if not container.spec.get("image"):
                yield Found(
                    (*container.path, "image"),
                    (f"container {container.spec.get('name')!r} of {template.role} has no image"),
                )


@rule("PT016", "error", fix=f"name the training container {CONTAINER!r}")
def no_pytorch_container(job: Job) -> Iterator[Found]:
    """Each replica needs a container named pytorch: the operator takes its port and its exit code from that
    one.
    """
    for template in job.templates:
        if template.main is None:
            names = ", ".join(str(one.spec.get("name")) for one in template.containers) or "none"
            yield Found(
                (*template.pod_path, "containers"),
                (f"{template.role} has no container named {CONTAINER!r} (found: {names})"),
            )


@rule("PT017", "error", fix="add Worker, or remove elasticPolicy", values="elastic")
def elastic_without_worker(job: Job) -> Iterator[Found]:
    """elasticPolicy scales workers, so there have to be some."""
    if job.spec.get("elasticPolicy") is not None and job.template("Worker") is None:
        yield Found(("spec", "elasticPolicy"), "elasticPolicy without Worker")


@rule("PT018", "error", fix="keep spec.nprocPerNode only", values="distributed.nprocPerNode")
def processes_given_twice(job: Job) -> Iterator[Found]:
    """elasticPolicy.nProcPerNode is the deprecated form of nprocPerNode and forbidden beside it."""
    if (job.spec.get("elasticPolicy") or {}).get("nProcPerNode") is not None and job.spec.get(
        "nprocPerNode"
    ) is not None:
        yield Found(
            ("spec", "elasticPolicy", "nProcPerNode"), ("nProcPerNode and spec.nprocPerNode are both set")
        )


@rule("PT019", "error", fix=f"remove it, or use {MANAGERS[0]} or {MANAGERS[1]}", values="runPolicy.managedBy")
def unknown_manager(job: Job) -> Iterator[Found]:
    """runPolicy.managedBy names the controller that runs the job; only two are allowed."""
    manager = (job.spec.get("runPolicy") or {}).get("managedBy")
    if manager is not None and manager not in MANAGERS:
        yield Found(
            ("spec", "runPolicy", "managedBy"), (f"{manager!r} is not a controller that is allowed here")
        )
