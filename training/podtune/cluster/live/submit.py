"""Submitting and deleting: everything is asked before anything is created, and what a failure leaves is taken
back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from podtune.cluster.live.client import JOB_KINDS, Cluster, Unreachable
from podtune.run.errors import NO_INPUT, NO_PERMISSION, UNAVAILABLE, UserError

Json = dict[str, Any]

KEEP = "helm.sh/resource-policy"
INSTANCE = "app.kubernetes.io/instance"
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
    """The documents without Helm's test hooks, the job last."""
    kept = [
        one
        for one in documents
        if "helm.sh/hook" not in ((one.get("metadata") or {}).get("annotations") or {})
    ]
    return sorted(kept, key=lambda one: one["kind"] in JOB_KINDS)


def check(cluster: Cluster, documents: list[Json]) -> list[str]:
    """Everything that can be known before creating: operator, permissions, namespace, references, and a
    server-side dry run.

    Returns notes about what could not be looked at.

    Raises:
        UserError: the first thing that is missing, with what to do.
    """
    job = documents[-1]
    if not cluster.serves(job["kind"]):
        raise UserError(
            f"the cluster does not know the kind {job['kind']}: the operator (its CRD) is not installed",
            where=cluster.server,
            fix=INSTALL[job["kind"]],
            code=UNAVAILABLE,
        )
    _check_permissions(cluster, documents)
    notes = list(_check_references(cluster, documents))
    path = cluster.path(job, name=job["metadata"]["name"])
    if cluster.get(path) is not None:
        raise UserError(
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
        raise UserError(
            f"you may not {', '.join(refused)} in the namespace {cluster.namespace}",
            where=cluster.server,
            fix="ask for a Role with these rights (docs/cluster.md lists them), or use --namespace",
            code=NO_PERMISSION,
        )


def _check_references(cluster: Cluster, documents: list[Json]) -> Iterator[str]:
    """Secrets, ConfigMaps and claims that the pods name and that are not among the documents; yields what may
    not be read.
    """
    own = {(document["kind"], document["metadata"]["name"]) for document in documents}
    for kind, name in sorted(set(references(documents)) - own):
        document = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}}
        try:
            found = cluster.get(cluster.path(document, name=name))
        except UserError as error:
            if error.code != NO_PERMISSION:
                raise
            yield f"the {kind} {name} may not be read by you; it has to exist"
            continue
        if found is None:
            raise UserError(
                f"the {kind} {name!r} does not exist in the namespace {cluster.namespace}",
                where="pods",
                fix=HOW_TO_CREATE[kind],
                code=NO_INPUT,
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
    except (UserError, Unreachable) as error:
        left = _taken_back(cluster, new)
        what = str(error) if isinstance(error, Unreachable) else error.what
        told = (
            (f"; left behind: kubectl -n {cluster.namespace} delete {' '.join(left)}")
            if left
            else "; what had been created is removed again"
        )
        where, code = (
            (error.where, error.code) if isinstance(error, UserError) else (cluster.server, UNAVAILABLE)
        )
        raise UserError(
            what + told,
            where=where,
            fix=error.fix if isinstance(error, UserError) else "try again",
            code=code,
        ) from error
    return [f"{one['kind']}/{one['metadata']['name']}" for one in made]


def _taken_back(cluster: Cluster, documents: list[Json]) -> list[str]:
    left = []
    for document in reversed(documents):
        try:
            cluster.delete(document)
        except (UserError, Unreachable):
            left.append(f"{document['kind'].lower()}/{document['metadata']['name']}")
    return left


def delete(cluster: Cluster, name: str, *, volumes: bool) -> list[str]:
    """Delete the job and what was submitted with it; the claims only if ``volumes``. Returns ``Kind/name`` of
    each.

    Raises:
        UserError: there is nothing of that name, or it is Helm's.
    """
    job = cluster.job(name)
    if "meta.helm.sh/release-name" in (job["metadata"].get("annotations") or {}):
        release = job["metadata"]["annotations"]["meta.helm.sh/release-name"]
        raise UserError(
            (f"the job {name!r} belongs to the Helm release {release!r}"),
            where="delete",
            fix=f"helm uninstall {release}",
        )
    gone = [f"{job['kind']}/{name}"] if cluster.delete(job) else []
    instance = (job["metadata"].get("labels") or {}).get(INSTANCE)
    parts = [*PARTS, *([("v1", "PersistentVolumeClaim")] if volumes else [])]
    for version, kind in parts if instance else []:
        example = {"apiVersion": version, "kind": kind}
        try:
            listed = cluster.get(cluster.path(example), [("labelSelector", f"{INSTANCE}={instance}")])
        except UserError:  # a kind that this user has nothing to do with
            continue
        for item in (listed or {}).get("items", []):
            document = {**example, "metadata": {"name": item["metadata"]["name"]}}
            if cluster.delete(document):
                gone.append(f"{kind}/{item['metadata']['name']}")
    return gone
