"""Checks of a cluster: API, kinds of job, permissions, and what it offers to jobs. No torch.

Whether the operator answers is asked by ``podtune submit --dry-run``.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from podtune.cluster.job.manifest import Json, dig, name_of
from podtune.cluster.job.pytorchjob import QUEUE
from podtune.cluster.live.client import Cluster, connect
from podtune.cluster.live.errors import Refused
from podtune.cluster.live.kinds import JOB_KINDS
from podtune.cluster.live.rights import RIGHTS
from podtune.cluster.live.submit import INSTALL, TOO_OLD, is_suspended, trainer_version
from podtune.machine.checks import Check, Result, run_checks
from podtune.run.errors import UserError

# of all together: loading the client counts, and so does an API server that is slow to answer
DEADLINE_S = 20.0

# Parts of provisioners' names whose volumes several nodes can mount and write, as their documentation says.
SHARED = (
    *("nfs", "cephfs", "efs.csi", "fsx", "lustre", "filestore", "file.csi.azure", "azure-file"),
    *("nasplugin", "longhorn", "glusterfs", "juicefs", "beegfs", "weka", "portworx", "pxd", "trident"),
    *("spectrumscale", "quobyte", "kubernetes.io/host-path"),
)
GPUS = ("nvidia.com/gpu", "amd.com/gpu")
# What enforces NetworkPolicies: API groups of CNIs, and parts of the DaemonSets' names of those without one.
POLICY_GROUPS = ("cilium.io", "crd.projectcalico.org", "crd.antrea.io", "k8s.ovn.org")
POLICY_AGENTS = (
    *("calico", "canal", "cilium", "anetd", "antrea", "ovnkube", "kube-router", "weave-net"),
    *("azure-npm", "kube-network-policies"),
)


def check_cluster(namespace: str = "", context: str = "") -> list[Result]:
    """Check everything about the cluster; one line alone if there is none or it does not answer."""
    try:
        cluster = connect(namespace, context)
    except UserError as error:
        return [Result("cluster", "fail", error.what, error.fix)]
    checks: dict[str, Callable[[Cluster], Result | list[Result]]] = {
        "cluster": api,
        "namespace": namespace_exists,
        "job kinds": job_kinds,
        "permissions": permissions,
        "shared volumes": storage,
        "cluster GPUs": gpu_nodes,
        "kueue": queues,
        "network policies": network_policies,
    }
    return run_checks([Check(name, partial(look, cluster)) for name, look in checks.items()])


def api(cluster: Cluster) -> Result:
    """Server and version."""
    return Result("cluster", "ok", f"Kubernetes {cluster.version()} at {cluster.server}")


def namespace_exists(cluster: Cluster) -> Result:
    """The namespace."""
    name = cluster.namespace
    if cluster.get(f"/api/v1/namespaces/{name}") is None:
        return Result("namespace", "fail", f"{name} does not exist", f"kubectl create namespace {name}")
    return Result("namespace", "ok", name)


def job_kinds(cluster: Cluster) -> list[Result]:
    """The CRDs of the kinds of job that need an operator."""
    checks = []
    for kind, fix in INSTALL.items():
        if not cluster.serves(kind):
            what = f"not installed; api: {kind.lower()} needs it, api: job needs no operator"
            checks.append(Result(kind, "warn" if kind == "PyTorchJob" else "ok", what, fix))
            continue
        found = f"served as {JOB_KINDS[kind].version}"
        trainer = trainer_version(cluster) if kind == "TrainJob" else ""
        if trainer in TOO_OLD:
            found = f"{found}, Kubeflow Trainer {trainer}; api: trainjob needs 2.2 or later"
            checks.append(Result(kind, "warn", found, fix))
        else:
            checks.append(Result(kind, "ok", f"{found}{f', Kubeflow Trainer {trainer}' if trainer else ''}"))
    return checks


def permissions(cluster: Cluster) -> Result:
    """Each verb that podtune's cluster commands need, of what is installed, asked of the API server."""
    optional = {"kueue.x-k8s.io", "trainer.kubeflow.org"}
    missing = {group for group in optional if cluster.get(f"/apis/{group}") is None}
    wanted = [
        (verb, group, resource)
        for group, resources, verbs in RIGHTS
        for resource in resources
        for verb in verbs
        if group not in missing
    ]
    with ThreadPoolExecutor(8) as pool:
        allowed = list(pool.map(lambda right: cluster.may(*right), wanted))
    refused = [
        f"{verb} {resource}" for (verb, _, resource), yes in zip(wanted, allowed, strict=True) if not yes
    ]
    if not refused:
        return Result("permissions", "ok", f"all {len(wanted)} that podtune needs in {cluster.namespace}")
    fix = "ask for the Role in docs/cluster.md"
    return Result("permissions", "fail", f"you may not {', '.join(refused)}", fix)


def storage(cluster: Cluster) -> Result:
    """Storage classes whose provisioner can give several nodes one volume to write."""
    # a class does not say its access modes: its provisioner's name has to do
    items = cluster.items("/apis/storage.k8s.io/v1/storageclasses")
    classes = {name_of(item): str(item.get("provisioner")) for item in items}
    shared = [name for name, provisioner in classes.items() if any(part in provisioner for part in SHARED)]
    if shared:
        return Result("shared volumes", "ok", f"ReadWriteMany by {', '.join(shared)}")
    others = ", ".join(f"{name} ({provisioner})" for name, provisioner in classes.items())
    found = f"none known for ReadWriteMany: {others or 'no storage class'}"
    fix = "persistence.*.existingClaim of a ReadWriteMany volume, or a class of NFS, CephFS, EFS or the like"
    return Result("shared volumes", "warn", found, fix)


def gpu_nodes(cluster: Cluster) -> Result:
    """Nodes with GPUs, whoever holds them."""
    nodes = [dig(node, "status", "allocatable") for node in cluster.items("/api/v1/nodes")]
    counts = [count for node in nodes if (count := sum(int(node.get(name, 0)) for name in GPUS))]
    if counts:
        return Result("cluster GPUs", "ok", f"{sum(counts)} on {len(counts)} nodes")
    fix = "install the GPU's device plugin, or use deploy/values/cpu-smoke.yaml"
    return Result("cluster GPUs", "warn", f"none on {len(nodes)} nodes", fix)


def network_policies(cluster: Cluster) -> Result:
    """Anything that enforces the chart's NetworkPolicies; Kubernetes takes them without."""
    groups = {group["name"] for group in (cluster.get("/apis") or {}).get("groups", [])}
    enforcers = [group for group in POLICY_GROUPS if group in groups]
    if not enforcers:
        try:
            names = [name_of(each) for each in cluster.items("/apis/apps/v1/daemonsets")]
        except Refused:
            names = []
        enforcers = [name for name in names if any(agent in name for agent in POLICY_AGENTS)]
    if enforcers:
        return Result("network policies", "ok", f"enforced by {', '.join(enforcers)}")
    what = "no CNI that enforces them is seen: who reaches a job's rendezvous can run code in its pods"
    fix = "ask whoever runs the cluster whether NetworkPolicies are enforced, for example by Cilium or Calico"
    return Result("network policies", "warn", what, fix)


def queues(cluster: Cluster) -> Result:
    """Kueue's queues that the namespace may use."""
    found = cluster.kueue("LocalQueue")
    if found is None:
        return Result("kueue", "ok", "not installed; jobs start as soon as their pods fit")
    if names := [name_of(queue) for queue in found]:
        said = f"queues: {', '.join(names)} (kueue.queueName)"
        admits = {kind: _admits(cluster, kind, names[0]) for kind in JOB_KINDS if cluster.serves(kind)}
        if refused := [kind for kind, admitted in admits.items() if admitted is False]:
            fix = "add them to the `integrations.frameworks` of its configuration, or use another api"
            return Result("kueue", "warn", f"{said}; does not hold back {', '.join(refused)}", fix)
        return Result("kueue", "ok", said)
    what = f"installed, and {cluster.namespace} has no LocalQueue"
    return Result("kueue", "warn", what, "ask for one if jobs have to be admitted by Kueue")


def _admits(cluster: Cluster, kind: str, queue: str) -> bool | None:
    """True if Kueue's webhook suspends a new job of the kind, None if one is refused; nothing is created."""
    pod = {"containers": [{"name": "pytorch", "image": "none"}], "restartPolicy": "Never"}
    specs: dict[str, Json] = {
        "PyTorchJob": {"pytorchReplicaSpecs": {"Master": {"replicas": 1, "template": {"spec": pod}}}},
        "TrainJob": {"runtimeRef": {"name": "torch-distributed"}},
        "Job": {"template": {"spec": pod}},
    }
    metadata = {"name": "podtune-doctor", "labels": {QUEUE: queue}}
    job = {"apiVersion": JOB_KINDS[kind].version, "kind": kind, "metadata": metadata, "spec": specs[kind]}
    try:
        # nothing else tells: Kueue's configuration lies in a namespace of its own
        return is_suspended(cluster.put(job, dry_run=True))
    except Refused:
        return None
