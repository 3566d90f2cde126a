"""Kinds of Kubernetes objects that podtune makes or reads, and their names in paths of the API."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from podtune.cluster.job import indexed_job, pytorchjob, trainjob
from podtune.cluster.job.manifest import Json, dig, name_of
from podtune.cluster.job.pytorchjob import CONTAINER
from podtune.cluster.job.trainjob import NODE
from podtune.run.errors import UsageError


class JobKind(NamedTuple):
    """A kind of training job: where the API has it, and how its pods are found."""

    version: str  # API group and version
    plural: str
    pods_label: str  # its value in a pod is the job's name
    container: str  # the container that trains


JOB_KINDS = {
    "PyTorchJob": JobKind("kubeflow.org/v1", "pytorchjobs", f"{pytorchjob.LABEL}job-name", CONTAINER),
    "TrainJob": JobKind("trainer.kubeflow.org/v1alpha1", "trainjobs", f"{trainjob.LABEL}jobset-name", NODE),
    "Job": JobKind("batch/v1", "jobs", f"{indexed_job.LABEL}job-name", CONTAINER),
}


def trains(job: Json) -> bool:
    """False for a Job without an index, without the container that trains, or that is another object's."""
    if job["kind"] != "Job":
        return True
    containers = dig(job, "spec", "template", "spec").get("containers") or []
    named = any(container.get("name") == CONTAINER for container in containers)
    # the Job of a JobSet is its TrainJob's, which is looked at itself
    return indexed_job.is_indexed(job) and named and not job["metadata"].get("ownerReferences")


def newest_by_rank(pods: Iterable[Json]) -> list[Json]:
    """The pods in the order of ranks, of each index the newest: a Job keeps those that failed before."""

    def index(pod: Json) -> str:
        return str(dig(pod, "metadata", "labels").get(indexed_job.INDEX, ""))

    newest: dict[str, Json] = {}
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp"))):
        # RUN-INDEX-SUFFIX, where the others are called by their rank alone
        newest[name_of(pod).rpartition("-")[0] if index(pod) else name_of(pod)] = pod
    return sorted(
        newest.values(),
        key=lambda pod: ("-master-" not in name_of(pod), int(index(pod) or 0), name_of(pod)),
    )


def plural_of(kind: str) -> str:
    """The kind's name in paths of the API: pods, networkpolicies."""
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"


def checked_name(name: str, where: str) -> str:
    """``name``, if Kubernetes could have such an object (RFC 1123): it becomes a part of paths of the API.

    Raises:
        UsageError: it could not.
    """
    if len(name) > 253 or not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name) or ".." in name:
        what = f"{name!r} is not a name of Kubernetes (lower-case letters, digits, dashes, dots)"
        fix = "podtune status lists the jobs, kubectl get namespaces the namespaces"
        raise UsageError(what, where=where, fix=fix)
    return name
