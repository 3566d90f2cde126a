"""Submitting and deleting: asked before anything is created, and taken back where something fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from podtune.cluster.job.manifest import Json, dig, name_of
from podtune.cluster.job.pytorchjob import QUEUE
from podtune.cluster.live.client import MANAGER, Cluster
from podtune.cluster.live.errors import Refused
from podtune.cluster.live.kinds import JOB_KINDS
from podtune.run.errors import ConfigError, NoPermission, NotFound, Unavailable, UserError

INSTANCE, APPLICATION = "app.kubernetes.io/instance", "app.kubernetes.io/name"
#: kinds besides the job that a release of the chart holds
PARTS = (
    ("v1", "ConfigMap"),
    ("v1", "ServiceAccount"),
    ("v1", "Service"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("apps/v1", "Deployment"),
    ("rbac.authorization.k8s.io/v1", "Role"),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"),
)
INSTALL = {
    "PyTorchJob": "install the Kubeflow training operator (v1.9): kubectl apply --server-side -k "
    '"github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.3"',
    "TrainJob": "install Kubeflow Trainer 2.2 or later, or use api: job, which needs no operator",
}


#: versions of Trainer by the field of a TrainJob that changes the runtime's pods, the newest first
TRAINERS = {"runtimePatches": "2.2 or later", "podTemplateOverrides": "2.1", "podSpecOverrides": "2.0"}
TOO_OLD = ("2.1", "2.0")


def trainer_version(cluster: Cluster) -> str:
    """Kubeflow Trainer's version by the fields of its TrainJobs; empty where the API does not say."""
    # the API version says nothing: it is v1alpha1 in all of them
    document = cluster.get("/openapi/v3/apis/trainer.kubeflow.org/v1alpha1") or {}
    for name, schema in dig(document, "components", "schemas").items():
        if name.endswith(".TrainJob"):
            fields = dig(schema, "properties", "spec", "properties")
            return next((version for field, version in TRAINERS.items() if field in fields), "")
    return ""


def installable(documents: list[Json]) -> list[Json]:
    """The documents without Helm's test hooks and namespaces, which the connection decides; the job last."""
    kept = [each for each in documents if "helm.sh/hook" not in dig(each, "metadata", "annotations")]
    for document in kept:
        dig(document, "metadata").pop("namespace", None)
    return sorted(kept, key=lambda document: document["kind"] in JOB_KINDS)


def check(cluster: Cluster, documents: list[Json]) -> list[str]:
    """Ask everything before creating: operator, references, and a server-side dry run, which asks for rights.

    Returns notes about what could not be looked at.

    Raises:
        UserError: the first thing that is missing, with what to do.
    """
    job = documents[-1]
    if not cluster.serves(job["kind"]):
        what = f"the cluster does not know the kind {job['kind']}: the operator (its CRD) is not installed"
        raise Unavailable(what, where=cluster.server, fix=INSTALL[job["kind"]])
    version = trainer_version(cluster) if dig(job, "spec").get("runtimePatches") else ""
    if version in TOO_OLD:
        what = (
            f"the cluster's Kubeflow Trainer is {version}; this TrainJob's runtimePatches need 2.2 or later"
        )
        raise Unavailable(what, where=cluster.server, fix=INSTALL["TrainJob"])
    notes = list(_check_references(cluster, documents))
    for document in documents:
        # says which right is missing, too, and that the job exists
        made = cluster.put(document, dry_run=True)
    if (queue := dig(job, "metadata", "labels").get(QUEUE)) and not is_suspended(made):
        why = f"Kueue is not there, or its `integrations.frameworks` have no {job['kind']}"
        notes.append(f"nothing holds the job back: it starts at once, beside the queue {queue}; {why}")
    return notes


def is_suspended(job: Json) -> bool:
    """True for a job that waits, as Kueue's webhook makes a new one of a kind that it admits."""
    return bool(dig(job, "spec").get("suspend") or dig(job, "spec", "runPolicy").get("suspend"))


#: where a pod names an object: key, kind, and the key of the name
REFERENCES = (
    ("secretKeyRef", "Secret", "name"),
    ("secretRef", "Secret", "name"),
    ("secret", "Secret", "secretName"),
    ("configMapKeyRef", "ConfigMap", "name"),
    ("configMapRef", "ConfigMap", "name"),
    ("configMap", "ConfigMap", "name"),
    ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
)


def _check_references(cluster: Cluster, documents: list[Json]) -> Iterator[str]:
    """Look for Secrets, ConfigMaps and claims that the pods name and that are not among the documents.

    Yields those that may not be read.
    """
    own = {(document["kind"], name_of(document)) for document in documents}
    for kind, name in sorted({*_references(documents)} - own):
        try:
            found = cluster.get(cluster.path("v1", kind, name))
        except NoPermission:
            yield f"the {kind} {name} may not be read by you; it has to exist"
            continue
        if found is None:
            what = f"the {kind} {name!r} does not exist in the namespace {cluster.namespace}"
            raise NotFound(what, where="pods", fix="create it, or take its name out of the values")


def _references(node: Any) -> Iterator[tuple[str, str]]:
    """(kind, name) of every Secret, ConfigMap and claim that a pod template names and needs."""
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from _references(value)
    if isinstance(node, dict) and not node.get("optional"):
        for key, kind, field in REFERENCES:
            target = node.get(key)
            if isinstance(target, dict) and isinstance(target.get(field), str) and not target.get("optional"):
                yield kind, target[field]
        yield from (("Secret", secret["name"]) for secret in node.get("imagePullSecrets") or [])


def create(cluster: Cluster, documents: list[Json]) -> list[str]:
    """Create everything, the job last; ``Kind/name`` of each. If one fails, the new ones are deleted."""
    new: list[Json] = []
    try:
        for document in documents:
            existed = cluster.exists(document)
            cluster.put(document)
            new += [] if existed else [document]
    except UserError as error:
        left = []
        for document in reversed(new):
            try:
                cluster.delete(document)
            except UserError:
                left.append(f"{document['kind'].lower()}/{name_of(document)}")
        rest = f"left behind: kubectl -n {cluster.namespace} delete {' '.join(left)}"
        rest = rest if left else "what had been created is removed again"
        raise UserError(f"{error.what}; {rest}", where=error.where, fix=error.fix, code=error.code) from error
    return [f"{document['kind']}/{name_of(document)}" for document in documents]


def parts_of(cluster: Cluster, job: Json, *, volumes: bool) -> list[Json]:
    """Find what was submitted with the job, the claims only if ``volumes``.

    Labels are what the author of a job wrote, so they are not enough: an object is podtune's if it has the
    job's name too, or one that begins with it, and podtune among the managers of its fields.

    Raises:
        ConfigError: the job is Helm's.
    """
    name = name_of(job)
    if release := dig(job, "metadata", "annotations").get("meta.helm.sh/release-name"):
        what = f"the job {name!r} belongs to the Helm release {release!r}"
        raise ConfigError(what, where="delete", fix=f"helm uninstall {release}")
    selector = f"{INSTANCE}={name}"
    if application := dig(job, "metadata", "labels").get(APPLICATION):
        selector += f",{APPLICATION}={application}"
    parts = []
    for version, kind in (*PARTS, *([("v1", "PersistentVolumeClaim")] if volumes else [])):
        items: list[Json] = []
        with contextlib.suppress(Refused):  # a kind that this user has nothing to do with
            items = cluster.items(cluster.path(version, kind), selector)
        for part in map(name_of, filter(_is_ours, items)):
            if part == name or part.startswith(f"{name}-"):
                parts.append({"apiVersion": version, "kind": kind, "metadata": {"name": part}})
    return parts


def _is_ours(document: Json) -> bool:
    fields = dig(document, "metadata").get("managedFields") or []
    return any(entry.get("manager") == MANAGER for entry in fields)


def delete(cluster: Cluster, job: Json, parts: list[Json]) -> list[str]:
    """Delete the job, then what was submitted with it. Returns ``Kind/name`` of each that was there."""
    return [
        f"{document['kind']}/{name_of(document)}" for document in (job, *parts) if cluster.delete(document)
    ]
