"""Is the cluster fit? The API, the operator, your permissions, volumes that several pods can share, GPUs,
queues. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from podtune.cluster.live.client import JOB_KINDS, Cluster, Refused, connect
from podtune.cluster.live.submit import INSTALL
from podtune.machine.doctor import Check, Question
from podtune.machine.doctor import answers as ask_all
from podtune.run.errors import NO_PERMISSION, UserError

Json = dict[str, Any]
# of all together: loading the client counts, and so does an API server that is slow to answer
DEADLINE_S = 20.0

_EDIT = ("get", "list", "create", "patch", "delete")
# : (apiVersion, kind, subresource, verbs) of all that podtune's cluster commands do; docs/cluster.md has it
# as a Role
RIGHTS = (
    ("kubeflow.org/v1", "PyTorchJob", "", ("get", "list", "create", "delete")),
    ("trainer.kubeflow.org/v1alpha1", "TrainJob", "", ("get", "list", "create", "delete")),
    *(("v1", kind, "", _EDIT) for kind in ("ConfigMap", "ServiceAccount", "PersistentVolumeClaim")),
    ("networking.k8s.io/v1", "NetworkPolicy", "", _EDIT),
    *(("v1", kind, part, ("get", "list")) for kind, part in (("Pod", ""), ("Pod", "log"), ("Event", ""))),
    *(("kueue.x-k8s.io/v1beta1", kind, "", ("get", "list")) for kind in ("LocalQueue", "Workload")),
)


def rules() -> list[Json]:
    """RIGHTS as the rules of a Role."""
    from podtune.cluster.live.client import PLURALS

    by_verbs: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for version, kind, part, verbs in RIGHTS:
        resource = PLURALS.get(kind) or f"{kind.lower()}s"
        by_verbs.setdefault((version.rpartition("/")[0], verbs), []).append(
            resource + (f"/{part}" if part else "")
        )
    return [
        {"apiGroups": [group], "resources": resources, "verbs": list(verbs)}
        for (group, verbs), resources in by_verbs.items()
    ]


# Parts of provisioners' names whose volumes several nodes can mount and write, as their documentation says.
SHARED = (
    *(
        "nfs",
        "cephfs",
        "efs.csi",
        "fsx",
        "lustre",
        "filestore",
        "file.csi.azure",
        "azure-file",
        "nasplugin",
        "longhorn",
        "glusterfs",
    ),
    *(
        "juicefs",
        "beegfs",
        "weka",
        "portworx",
        "pxd",
        "trident",
        "spectrumscale",
        "quobyte",
        "kubernetes.io/host-path",
    ),
)
GPUS = ("nvidia.com/gpu", "amd.com/gpu")
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


def answers(namespace: str = "", context: str = "") -> list[Check]:
    """Everything about the cluster; one line alone if there is none or it does not answer."""
    try:
        cluster = connect(namespace, context)
    except UserError as error:
        return [Check("cluster", "fail", error.what, error.fix)]
    return ask_all(
        [
            Question("cluster", lambda: api(cluster)),
            Question("namespace", lambda: namespace_exists(cluster)),
            Question("job kinds", lambda: job_kinds(cluster)),
            Question("operator", lambda: operator(cluster)),
            Question("permissions", lambda: permissions(cluster)),
            Question("shared volumes", lambda: storage(cluster)),
            Question("cluster GPUs", lambda: gpu_nodes(cluster)),
            Question("kueue", lambda: queues(cluster)),
            Question("network policies", lambda: network_policies(cluster)),
        ]
    )


def api(cluster: Cluster) -> Check:
    """Server and version."""
    return Check("cluster", "ok", f"Kubernetes {cluster.version()} at {cluster.server}")


def namespace_exists(cluster: Cluster) -> Check:
    """The namespace, and which Pod Security profile it enforces."""
    namespace = cluster.get(f"/api/v1/namespaces/{cluster.namespace}")
    if namespace is None:
        return Check(
            "namespace",
            "fail",
            f"{cluster.namespace} does not exist",
            f"kubectl create namespace {cluster.namespace}",
        )
    enforced = (namespace["metadata"].get("labels") or {}).get("pod-security.kubernetes.io/enforce")
    return Check(
        "namespace",
        "ok",
        cluster.namespace + ((f", enforces the {enforced} Pod Security profile") if enforced else ""),
    )


def job_kinds(cluster: Cluster) -> list[Check]:
    """The CRDs of both kinds of job; only the PyTorchJob's is needed."""
    checks = []
    for kind, (version, plural, _) in JOB_KINDS.items():
        if cluster.serves(kind):
            group = version.partition("/")[0]
            checks.append(
                Check(kind, "ok", f"served as {version}{_crd_version(cluster, f'{plural}.{group}')}")
            )
        elif kind == "PyTorchJob":
            checks.append(
                Check(
                    kind,
                    "fail",
                    "the cluster does not know this kind: its CRD is not installed",
                    INSTALL[kind],
                )
            )
        else:
            checks.append(Check(kind, "ok", "not installed; only api: trainjob needs it"))
    return checks


def _crd_version(cluster: Cluster, name: str) -> str:
    """Who installed the CRD, where that may be read and is said."""
    try:
        definition = cluster.get(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}")
    except Refused:
        return ""
    labels = (definition or {}).get("metadata", {}).get("labels") or {}
    said = labels.get("app.kubernetes.io/version") or labels.get("helm.sh/chart")
    return f", CRD of {said}" if said else ""


def operator(cluster: Cluster) -> Check:
    """Whether the training operator runs: its webhook answers a job that it has to refuse, or its Deployment
    is ready.
    """
    if not cluster.serves("PyTorchJob"):
        return Check("operator", "fail", "not installed", INSTALL["PyTorchJob"])
    fix = "kubectl -n kubeflow get pods; kubectl -n kubeflow logs deployment/training-operator"
    try:
        cluster.create(REFUSED, dry_run=True)
    except UserError as error:
        if "denied the request" in error.what:
            return Check("operator", "ok", "its webhook answers")
        if "webhook" in error.what:
            return Check("operator", "fail", f"its webhook does not answer: {error.what[:200]}", fix)
        if error.code != NO_PERMISSION:
            raise
    ready = _ready_deployment(cluster)
    if ready is None:
        fix = "ask whoever runs the cluster whether the training operator is up"
        return Check(
            "operator",
            "warn",
            "not seen: no webhook answered, and no Deployment training-operator is shown to you",
            fix,
        )
    return (
        Check("operator", "ok", "its Deployment is ready")
        if ready
        else Check("operator", "fail", "its Deployment is not ready", fix)
    )


def _ready_deployment(cluster: Cluster) -> bool | None:
    try:
        listing = cluster.get(
            "/apis/apps/v1/deployments", [("fieldSelector", "metadata.name=training-operator")]
        )
    except Refused:
        return None
    statuses = [deployment.get("status") or {} for deployment in (listing or {}).get("items", [])]
    return any(status.get("readyReplicas") for status in statuses) if statuses else None


def permissions(cluster: Cluster) -> Check:
    """Each verb that podtune's cluster commands need, of what is installed, asked of the API server."""
    optional = {"kueue.x-k8s.io", "trainer.kubeflow.org"}
    missing = {group for group in optional if cluster.get(f"/apis/{group}") is None}
    kinds = [right for right in RIGHTS if right[0].partition("/")[0] not in missing]
    asked = [(verb, version, kind, part) for version, kind, part, verbs in kinds for verb in verbs]

    def may(right: tuple[str, str, str, str]) -> bool:
        verb, version, kind, part = right
        return cluster.may(verb, {"apiVersion": version, "kind": kind}, part)

    with ThreadPoolExecutor(8) as pool:
        allowed = list(pool.map(may, asked))
    refused = [
        (f"{verb} {kind}{'/' + part if part else ''}")
        for (verb, _, kind, part), yes in zip(asked, allowed, strict=True)
        if not yes
    ]
    if not refused:
        return Check("permissions", "ok", f"all {len(asked)} that podtune needs in {cluster.namespace}")
    fix = "ask for the Role in docs/cluster.md"
    return Check("permissions", "fail", f"you may not {', '.join(refused)}", fix)


def storage(cluster: Cluster) -> Check:
    """Storage classes whose provisioner can give several nodes one volume to write."""
    listing = cluster.get("/apis/storage.k8s.io/v1/storageclasses") or {}
    classes = {item["metadata"]["name"]: str(item.get("provisioner")) for item in listing.get("items", [])}
    shared = [name for name, provisioner in classes.items() if any(part in provisioner for part in SHARED)]
    if shared:
        return Check("shared volumes", "ok", f"ReadWriteMany by {', '.join(shared)}")
    others = (
        ", ".join(f"{name} ({provisioner})" for name, provisioner in classes.items())
        or "no storage class at all"
    )
    fix = (
        "persistence.*.existingClaim of a ReadWriteMany volume, or a class of NFS, CephFS, EFS, Filestore "
        "or Azure Files"
    )
    return Check("shared volumes", "warn", f"none known for ReadWriteMany: {others}", fix)


def gpu_nodes(cluster: Cluster) -> Check:
    """Nodes with GPUs, and how many of those no pod has asked for."""
    nodes = (cluster.get("/api/v1/nodes") or {}).get("items", [])
    having = {
        node["metadata"]["name"]: _count((node.get("status") or {}).get("allocatable")) for node in nodes
    }
    having = {name: count for name, count in having.items() if count}
    if not having:
        fix = "install the GPU's device plugin, or use deploy/values/cpu-smoke.yaml"
        return Check("cluster GPUs", "warn", f"none on {len(nodes)} nodes", fix)
    total = sum(having.values())
    try:
        pods = (cluster.get("/api/v1/pods") or {}).get("items", [])
    except Refused:
        return Check(
            "cluster GPUs", "ok", f"{total} on {len(having)} nodes; how many are free may not be seen"
        )
    free = total - sum(_asked(pod) for pod in pods if pod["spec"].get("nodeName") in having)
    text = f"{free} of {total} free on {len(having)} nodes"
    return Check(
        "cluster GPUs",
        "ok" if free else "warn",
        text,
        "" if free else "the job would wait; podtune status says for what",
    )


def _asked(pod: Json) -> int:
    """GPUs that a pod holds: the containers' together, or one init container's if that is more; none once it
    has ended.
    """
    if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return 0

    def limits(key: str) -> Iterable[int]:
        return (
            _count((container.get("resources") or {}).get("limits"))
            for container in pod["spec"].get(key) or []
        )

    return max(sum(limits("containers")), max(limits("initContainers"), default=0))


def _count(resources: Json | None) -> int:
    return sum(int((resources or {}).get(name, 0)) for name in GPUS)


# What enforces NetworkPolicies: API groups of CNIs, and parts of the DaemonSets' names of those without one.
POLICY_GROUPS = ("cilium.io", "crd.projectcalico.org", "crd.antrea.io", "k8s.ovn.org")
POLICY_AGENTS = (
    *("calico", "canal", "cilium", "anetd", "antrea", "ovnkube", "kube-router", "weave-net"),
    *("azure-npm", "kube-network-policies"),
)


def network_policies(cluster: Cluster) -> Check:
    """Whether anything is seen that enforces the chart's NetworkPolicies; Kubernetes takes them without."""
    groups = {group["name"] for group in (cluster.get("/apis") or {}).get("groups", [])}
    enforcers = [group for group in POLICY_GROUPS if group in groups]
    if not enforcers:
        try:
            sets = (cluster.get("/apis/apps/v1/daemonsets") or {}).get("items", [])
        except Refused:
            sets = []
        names = [each["metadata"]["name"] for each in sets]
        enforcers = [name for name in names if any(agent in name for agent in POLICY_AGENTS)]
    if enforcers:
        return Check("network policies", "ok", f"enforced by {', '.join(enforcers)}")
    return Check(
        "network policies",
        "warn",
        "no CNI that enforces them is seen: who reaches a job's rendezvous can run code in its pods",
        "ask whoever runs the cluster whether NetworkPolicies are enforced, for example by Cilium or Calico",
    )


def queues(cluster: Cluster) -> Check:
    """Kueue's queues that the namespace may use."""
    found = cluster.kueue("localqueues")
    if found is None:
        return Check("kueue", "ok", "not installed; jobs start as soon as their pods fit")
    if names := [queue["metadata"]["name"] for queue in found]:
        return Check("kueue", "ok", f"queues: {', '.join(names)} (kueue.queueName)")
    return Check(
        "kueue",
        "warn",
        f"installed, and {cluster.namespace} has no LocalQueue",
        "ask for one if jobs have to be admitted by Kueue",
    )
