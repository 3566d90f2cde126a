"""PT020 to PT025: refusals of the pods, after the job was taken; see core.py."""

from __future__ import annotations

from collections.abc import Iterator

from podtune.cluster.job.pytorchjob import INIT_CONTAINER
from podtune.cluster.lint.diagnostic import Diagnostic
from podtune.cluster.lint.job import Job
from podtune.cluster.lint.names import LABEL, image_problem, metadata
from podtune.cluster.lint.rules import ALL, rule


@rule("PT021", "error", by="operator", fix="correct the name", kinds=ALL)
def pod_name(job: Job) -> Iterator[Diagnostic]:
    """The API server refuses a pod with a name that breaks the rules, and a job with such labels.

    The name of a container, volume, port, variable, label, resource or of an object that it refers to.
    """
    namespace = str(job.metadata.get("namespace") or "")
    if namespace and not LABEL.fullmatch(namespace):
        message, fix = (
            f"{namespace!r} cannot be the name of a namespace",
            "lower-case letters, digits and '-'",
        )
        yield Diagnostic(("metadata", "namespace"), message, fix=fix, by="api")
    if job.kind == "TrainJob":  # Trainer hands spec.labels on to the JobSet, which is refused
        yield from metadata(job.spec, ("spec",))
    for found in metadata(job.metadata, ("metadata",)):
        yield Diagnostic(found.place, found.message, fix=found.fix, by="api")
    for template in job.own_templates:
        yield from metadata(template.metadata, template.metadata_path)


@rule("PT022", "error", by="operator", fix="keep one of them", kinds=ALL)
def pod_conflict(job: Job) -> Iterator[Diagnostic]:
    """The API server refuses a pod with fields that exclude each other or need one another.

    Two sources of a volume, value and valueFrom, a probe of two kinds, a toleration without key, two
    containers of one name.
    """
    worker = job.template("Worker")
    if job.kind != "PyTorchJob" or worker is None or job.template("Master") is None:
        return
    for container in (*worker.init_containers, *worker.containers):
        if container.name == INIT_CONTAINER:
            message = f"a container of Worker is named {INIT_CONTAINER!r}, as the operator names its own"
            yield Diagnostic((*container.path, "name"), message, fix="rename it")


@rule("PT025", "error", by="hang", fix="registry/path/name:tag, the path in lower case", kinds=ALL)
def image_name(job: Job) -> Iterator[Diagnostic]:
    """The kubelet cannot pull an image whose name no registry can have.

    The pod stays in InvalidImageName for ever.
    """
    for container in job.containers:
        image = str(container.spec.get("image") or "")
        problem = image_problem(image) if image and "$" not in image and "{{" not in image else ""
        if problem:
            yield Diagnostic((*container.path, "image"), f"the image {image!r} {problem}")
