"""Checks of what a cluster offers to jobs: volumes, GPUs, queues, a network that enforces policies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from podtune.cluster.job.manifest import dig
from podtune.cluster.live.client import Cluster
from podtune.cluster.live.errors import Refused
from podtune.cluster.live.kinds import name_of
from podtune.machine.checks import Result

Json = dict[str, Any]

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

#: versions of Trainer by the field of a TrainJob that changes the runtime's pods, the newest first
TRAINERS = {"runtimePatches": "2.2 or later", "podTemplateOverrides": "2.1", "podSpecOverrides": "2.0"}
TOO_OLD = ("2.1", "2.0")


def trainer_version(cluster: Cluster) -> str:
    """Kubeflow Trainer's version by the fields of its TrainJobs; empty where the API does not say."""
    document = cluster.get("/openapi/v3/apis/trainer.kubeflow.org/v1alpha1") or {}
    for name, schema in dig(document, "components", "schemas").items():
        if name.endswith(".TrainJob"):
            fields = dig(schema, "properties", "spec", "properties")
            return next((version for field, version in TRAINERS.items() if field in fields), "")
    return ""


def storage(cluster: Cluster) -> Result:
    """Storage classes whose provisioner can give several nodes one volume to write."""
    items = cluster.items("/apis/storage.k8s.io/v1/storageclasses")
    classes = {name_of(item): str(item.get("provisioner")) for item in items}
    shared = [name for name, provisioner in classes.items() if any(part in provisioner for part in SHARED)]
    if shared:
        return Result("shared volumes", "ok", f"ReadWriteMany by {', '.join(shared)}")
    others = ", ".join(f"{name} ({provisioner})" for name, provisioner in classes.items())
    fix = (
        "persistence.*.existingClaim of a ReadWriteMany volume, or a class of NFS, CephFS, EFS, Filestore "
        "or Azure Files"
    )
    return Result(
        "shared volumes", "warn", f"none known for ReadWriteMany: {others or 'no storage class'}", fix
    )


def gpu_nodes(cluster: Cluster) -> Result:
    """Nodes with GPUs, and how many of those no pod has asked for."""
    nodes = cluster.items("/api/v1/nodes")
    counts = {name_of(node): _count((node.get("status") or {}).get("allocatable")) for node in nodes}
    on_nodes = {name: count for name, count in counts.items() if count}
    if not on_nodes:
        fix = "install the GPU's device plugin, or use deploy/values/cpu-smoke.yaml"
        return Result("cluster GPUs", "warn", f"none on {len(nodes)} nodes", fix)
    total = sum(on_nodes.values())
    try:
        pods = cluster.items("/api/v1/pods")
    except Refused:
        text = (
            f"{total} on {len(on_nodes)} nodes; without the right to list pods, how many are free is unknown"
        )
        return Result("cluster GPUs", "ok", text)
    free = total - sum(_held(pod) for pod in pods if pod["spec"].get("nodeName") in on_nodes)
    text = f"{free} of {total} free on {len(on_nodes)} nodes"
    if free:
        return Result("cluster GPUs", "ok", text)
    return Result("cluster GPUs", "warn", text, "the job would wait; podtune status says for what")


def _held(pod: Json) -> int:
    """GPUs that a pod holds: the containers' together, or one init container's if that is more.

    A pod that has ended holds none.
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
    return Result(
        "network policies",
        "warn",
        "no CNI that enforces them is seen: who reaches a job's rendezvous can run code in its pods",
        "ask whoever runs the cluster whether NetworkPolicies are enforced, for example by Cilium or Calico",
    )


def queues(cluster: Cluster) -> Result:
    """Kueue's queues that the namespace may use."""
    found = cluster.kueue("LocalQueue")
    if found is None:
        return Result("kueue", "ok", "not installed; jobs start as soon as their pods fit")
    if names := [name_of(queue) for queue in found]:
        return Result("kueue", "ok", f"queues: {', '.join(names)} (kueue.queueName)")
    return Result(
        "kueue",
        "warn",
        f"installed, and {cluster.namespace} has no LocalQueue",
        "ask for one if jobs have to be admitted by Kueue",
    )
