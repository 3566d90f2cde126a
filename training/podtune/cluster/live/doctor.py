"""Checks of a cluster: the API, the operator, your permissions, and what facilities.py looks at. No torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from podtune.cluster.live import facilities
from podtune.cluster.live.client import Cluster, connect
from podtune.cluster.live.errors import Refused
from podtune.cluster.live.kinds import JOB_KINDS
from podtune.cluster.live.rights import RIGHTS
from podtune.cluster.live.submit import INSTALL
from podtune.machine.checks import Check, Result, run_checks
from podtune.run.errors import NoPermission, UserError

# of all together: loading the client counts, and so does an API server that is slow to answer
DEADLINE_S = 20.0

# A job that the operator's webhook refuses (two masters): its refusal shows that the operator answers. Never
# created.
REFUSED = {
    "apiVersion": "kubeflow.org/v1",
    "kind": "PyTorchJob",
    "metadata": {"name": "podtune-doctor"},
    "spec": {
        "pytorchReplicaSpecs": {
            "Master": {
                "replicas": 2,
                "template": {
                    "spec": {"containers": [{"name": "pytorch", "image": "none", "command": ["true"]}]}
                },
            }
        }
    },
}


def check_cluster(namespace: str = "", context: str = "") -> list[Result]:
    """Result everything about the cluster; one line alone if there is none or it does not answer."""
    try:
        cluster = connect(namespace, context)
    except UserError as error:
        return [Result("cluster", "fail", error.what, error.fix)]
    return run_checks(
        [
            Check("cluster", lambda: api(cluster)),
            Check("namespace", lambda: namespace_exists(cluster)),
            Check("job kinds", lambda: job_kinds(cluster)),
            Check("operator", lambda: operator(cluster)),
            Check("permissions", lambda: permissions(cluster)),
            Check("shared volumes", lambda: facilities.storage(cluster)),
            Check("cluster GPUs", lambda: facilities.gpu_nodes(cluster)),
            Check("kueue", lambda: facilities.queues(cluster)),
            Check("network policies", lambda: facilities.network_policies(cluster)),
        ]
    )


def api(cluster: Cluster) -> Result:
    """Server and version."""
    return Result("cluster", "ok", f"Kubernetes {cluster.version()} at {cluster.server}")


def namespace_exists(cluster: Cluster) -> Result:
    """The namespace, and which Pod Security profile it enforces."""
    name = cluster.namespace
    namespace = cluster.get(f"/api/v1/namespaces/{name}")
    if namespace is None:
        return Result("namespace", "fail", f"{name} does not exist", f"kubectl create namespace {name}")
    enforced = (namespace["metadata"].get("labels") or {}).get("pod-security.kubernetes.io/enforce")
    profile = f", enforces the {enforced} Pod Security profile" if enforced else ""
    return Result("namespace", "ok", f"{name}{profile}")


def job_kinds(cluster: Cluster) -> list[Result]:
    """The CRDs of the kinds of job that need an operator."""
    checks = []
    for kind, fix in INSTALL.items():
        version, plural, *_ = JOB_KINDS[kind]
        if not cluster.serves(kind):
            what = f"not installed; api: {kind.lower()} needs it, api: job needs no operator"
            checks.append(Result(kind, "warn" if kind == "PyTorchJob" else "ok", what, fix))
            continue
        trainer = facilities.trainer_version(cluster) if kind == "TrainJob" else ""
        crd = _crd_version(cluster, f"{plural}.{version.partition('/')[0]}")
        found = f"served as {version}{crd}"
        if trainer in facilities.TOO_OLD:
            found = f"{found}, Kubeflow Trainer {trainer}; api: trainjob needs 2.2 or later"
            checks.append(Result(kind, "warn", found, fix))
        else:
            checks.append(Result(kind, "ok", f"{found}{f', Kubeflow Trainer {trainer}' if trainer else ''}"))
    return checks


def _crd_version(cluster: Cluster, name: str) -> str:
    """The release that installed the CRD, where that may be read and is labelled."""
    try:
        definition = cluster.get(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}")
    except Refused:
        return ""
    labels = (definition or {}).get("metadata", {}).get("labels") or {}
    said = labels.get("app.kubernetes.io/version") or labels.get("helm.sh/chart")
    return f", CRD of {said}" if said else ""


def operator(cluster: Cluster) -> Result:
    """The training operator: its webhook answers a job that it has to refuse, or its Deployment is ready."""
    if not cluster.serves("PyTorchJob"):
        return Result("operator", "warn", "not installed", INSTALL["PyTorchJob"])
    fix = "kubectl -n kubeflow get pods; kubectl -n kubeflow logs deployment/training-operator"
    try:
        cluster.put(REFUSED, dry_run=True)
    except UserError as error:
        if "denied the request" in error.what:
            return Result("operator", "ok", "its webhook answers")
        if "webhook" in error.what:
            return Result("operator", "fail", f"its webhook does not answer: {error.what[:200]}", fix)
        if not isinstance(error, NoPermission):
            raise
    try:
        query = [("fieldSelector", "metadata.name=training-operator")]
        deployments = (cluster.get("/apis/apps/v1/deployments", query) or {}).get("items", [])
    except Refused:
        deployments = []
    if not deployments:
        what = "not seen: no webhook answered, and no Deployment training-operator is shown to you"
        fix = "ask whoever runs the cluster whether the training operator is up"
        return Result("operator", "warn", what, fix)
    if any((deployment.get("status") or {}).get("readyReplicas") for deployment in deployments):
        return Result("operator", "ok", "its Deployment is ready")
    return Result("operator", "fail", "its Deployment is not ready", fix)


def permissions(cluster: Cluster) -> Result:
    """Each verb that podtune's cluster commands need, of what is installed, asked of the API server."""
    optional = {"kueue.x-k8s.io", "trainer.kubeflow.org"}
    missing = {group for group in optional if cluster.get(f"/apis/{group}") is None}
    rights = [
        (verb, right)
        for right in RIGHTS
        if right.version.partition("/")[0] not in missing
        for verb in right.verbs
    ]
    with ThreadPoolExecutor(8) as pool:
        allowed = pool.map(
            lambda each: cluster.may(each[0], each[1].version, each[1].kind, each[1].subresource), rights
        )
        refused = [
            f"{verb} {right.kind}{'/' + right.subresource if right.subresource else ''}"
            for (verb, right), yes in zip(rights, allowed, strict=True)
            if not yes
        ]
    if not refused:
        return Result("permissions", "ok", f"all {len(rights)} that podtune needs in {cluster.namespace}")
    fix = "ask for the Role in docs/cluster.md"
    return Result("permissions", "fail", f"you may not {', '.join(refused)}", fix)
