"""Submitting and deleting: everything is asked before anything is created, and what a failure leaves is taken
back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from podtune.cluster.live.client import JOB_KINDS, MANAGER, Cluster, Refused
from podtune.run.errors import (
    NO_PERMISSION,
    ConfigError,
    NoPermission,
    NotFound,
    Unavailable,
    UserError,
)

Json = dict[str, Any]

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
    "TrainJob": "install Kubeflow Trainer v2, or use api: pytorchjob",
}


def installable(documents: list[Json]) -> list[Json]:
    """The documents without Helm's test hooks and namespaces, which the connection decides; the job last."""
    for document in documents:
        if isinstance(metadata := document.get("metadata"), dict):
            metadata.pop("namespace", None)
    kept = [
        document
        for document in documents
        if "helm.sh/hook" not in ((document.get("metadata") or {}).get("annotations") or {})
    ]
    return sorted(kept, key=lambda document: document["kind"] in JOB_KINDS)


def check(cluster: Cluster, documents: list[Json]) -> list[str]:
    """Everything that can be known before creating: operator, permissions, namespace, references, and a
    server-side dry run.

    Returns notes about what could not be looked at.

    Raises:
        UserError: the first thing that is missing, with what to do.
    """
    job = documents[-1]
    if not cluster.serves(job["kind"]):
        raise Unavailable(
            f"the cluster does not know the kind {job['kind']}: the operator (its CRD) is not installed",
            where=cluster.server,
            fix=INSTALL[job["kind"]],
        )
    _check_permissions(cluster, documents)
    notes = list(_check_references(cluster, documents))
    path = cluster.path(job, name=job["metadata"]["name"])
    if cluster.get(path) is not None:
        raise ConfigError(
            f"the job {job['metadata']['name']!r} exists already in {cluster.namespace}",
            where=job["kind"],
            fix=f"podtune delete {job['metadata']['name']}, or submit under another --name",
        )
    for document in documents:
        if document is job:
            cluster.create(document, dry_run=True)
        else:
            cluster.apply(document, dry_run=True)
    return notes


def _check_permissions(cluster: Cluster, documents: list[Json]) -> None:
    kinds = {document["kind"]: document for document in documents}
    wanted = [
        (verb, document)
        for document in kinds.values()
        for verb in ("create", "patch")
        if not (verb == "patch" and document["kind"] in JOB_KINDS)
    ]
    refused = [f"{verb} {document['kind']}" for verb, document in wanted if not cluster.may(verb, document)]
    if refused:
        raise NoPermission(
            f"you may not {', '.join(refused)} in the namespace {cluster.namespace}",
            where=cluster.server,
            fix="ask for a Role with these rights (docs/cluster.md lists them), or use --namespace",
        )


def _check_references(cluster: Cluster, documents: list[Json]) -> Iterator[str]:
    """Secrets, ConfigMaps and claims that the pods name and that are not among the documents; yields what may
    not be read.
    """
    own = {(document["kind"], document["metadata"]["name"]) for document in documents}
    for kind, name in sorted(set(references(documents)) - own):
        document = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}}
        try:
            target = cluster.get(cluster.path(document, name=name))
        except UserError as error:
            if error.code != NO_PERMISSION:
                raise
            yield f"the {kind} {name} may not be read by you; it has to exist"
            continue
        if target is None:
            raise NotFound(
                f"the {kind} {name!r} does not exist in the namespace {cluster.namespace}",
                where="pods",
                fix=HOW_TO_CREATE[kind],
            )


HOW_TO_CREATE = {
    "Secret": "kubectl create secret generic NAME --from-literal=token=...",
    "ConfigMap": "kubectl create configmap NAME --from-file=...",
    "PersistentVolumeClaim": "create it, or leave existingClaim empty so that the chart does",
}


def references(documents: list[Json]) -> Iterator[tuple[str, str]]:
    """(kind, name) of every Secret, ConfigMap and claim that a pod template names and needs."""
    for node in _mappings(documents):
        if node.get("optional"):
            continue
        for key, kind, field in REFERENCES:
            target = node.get(key)
            if isinstance(target, dict) and isinstance(target.get(field), str) and not target.get("optional"):
                yield kind, target[field]
        for secret in node.get("imagePullSecrets") or []:
            if isinstance(secret, dict) and secret.get("name"):
                yield "Secret", secret["name"]


REFERENCES = (
    ("secretKeyRef", "Secret", "name"),
    ("secretRef", "Secret", "name"),
    ("secret", "Secret", "secretName"),
    ("configMapKeyRef", "ConfigMap", "name"),
    ("configMapRef", "ConfigMap", "name"),
    ("configMap", "ConfigMap", "name"),
    ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
)


def _mappings(node: Any) -> Iterator[Json]:
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from _mappings(value)
    elif isinstance(node, list):
        for value in node:
            yield from _mappings(value)


def create(cluster: Cluster, documents: list[Json]) -> list[str]:
    """Create everything, the job last; returns ``Kind/name`` of each. If one fails, what was new is taken
    back.
    """
    made: list[Json] = []
    new: list[Json] = []
    try:
        for document in documents:
            existed = cluster.get(cluster.path(document, name=document["metadata"]["name"])) is not None
            cluster.create(document) if document["kind"] in JOB_KINDS else cluster.apply(document)
            made.append(document)
            if not existed:
                new.append(document)
    except UserError as error:
        left = _taken_back(cluster, new)
        rest = (
            f"; left behind: kubectl -n {cluster.namespace} delete {' '.join(left)}"
            if left
            else "; what had been created is removed again"
        )
        raise UserError(error.what + rest, where=error.where, fix=error.fix, code=error.code) from error
    return [f"{document['kind']}/{document['metadata']['name']}" for document in made]


def _taken_back(cluster: Cluster, documents: list[Json]) -> list[str]:
    left = []
    for document in reversed(documents):
        try:
            cluster.delete(document)
        except UserError:
            left.append(f"{document['kind'].lower()}/{document['metadata']['name']}")
    return left


def parts_of(cluster: Cluster, job: Json, *, volumes: bool) -> tuple[list[Json], list[str]]:
    """What was submitted with the job, the claims only if ``volumes``: the documents that are podtune's own,
    and ``kind/name`` of those that only carry its labels.

    Labels are what the author of a job wrote, so they are not enough: an object is podtune's if it has the
    job's name too, or one that begins with it, and podtune among the managers of its fields.

    Raises:
        UserError: the job is Helm's.
    """
    name, metadata = job["metadata"]["name"], job["metadata"]
    if release := (metadata.get("annotations") or {}).get("meta.helm.sh/release-name"):
        raise ConfigError(
            f"the job {name!r} belongs to the Helm release {release!r}",
            where="delete",
            fix=f"helm uninstall {release}",
        )
    selector = f"{INSTANCE}={name}"
    if application := (metadata.get("labels") or {}).get(APPLICATION):
        selector += f",{APPLICATION}={application}"
    query = [("labelSelector", selector)]
    own: list[Json] = []
    others: list[str] = []
    for version, kind in [*PARTS, *([("v1", "PersistentVolumeClaim")] if volumes else [])]:
        try:
            listing = cluster.get(cluster.path({"apiVersion": version, "kind": kind}), query) or {}
        except Refused:  # a kind that this user has nothing to do with
            continue
        for item in listing.get("items", []):
            part = item["metadata"]["name"]
            managers = {entry.get("manager") for entry in item["metadata"].get("managedFields") or []}
            if MANAGER in managers and (part == name or part.startswith(f"{name}-")):
                own.append({"apiVersion": version, "kind": kind, "metadata": {"name": part}})
            else:
                others.append(f"{kind.lower()}/{part}")
    return own, others


def delete(cluster: Cluster, job: Json, parts: list[Json]) -> list[str]:
    """Delete the job, then what was submitted with it. Returns ``Kind/name`` of each that was there."""
    return [
        f"{document['kind']}/{document['metadata']['name']}"
        for document in (job, *parts)
        if cluster.delete(document)
    ]
