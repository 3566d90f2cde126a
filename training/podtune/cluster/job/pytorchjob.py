"""The Kubeflow training operator's contract (v1.9): defaults, pods and environment of a PyTorchJob.

The one statement of the contract between a manifest and the processes in its pods. ``podtune dry-run`` starts
processes from it, ``podtune lint`` reasons with it, and the cluster tests compare it with pods that the real
operator made. Read from kubeflow/training-operator v1.9.3 (pkg/controller.v1/pytorch,
pkg/apis/kubeflow.org/v1/pytorch_defaults.go).
"""

from __future__ import annotations

import copy
import re

from podtune.cluster.job.manifest import EXIT_CODES, Json, Pod, as_env, dig
from podtune.run.errors import DataError

PORT, PORT_NAME, CONTAINER = 23456, "pytorchjob-port", "pytorch"
INIT_CONTAINER, INIT_IMAGE, INIT_TRIES, INIT_WAIT_S = "init-pytorch", "alpine:3.10", 100, 2
LABEL = "training.kubeflow.org/"
QUEUE = "kueue.x-k8s.io/queue-name"  # the label by which Kueue admits a job
REPLICA_TYPES = ("Master", "Worker")
#: exit codes after which the job fails, by restartPolicy
FINAL = {"ExitCode": frozenset(range(1, 128)), "Never": EXIT_CODES}

#: every variable that the operator can inject; a manifest sets none of them itself
INJECTED = (
    *("PYTHONUNBUFFERED", "MASTER_PORT", "PET_MASTER_PORT", "MASTER_ADDR", "PET_MASTER_ADDR", "WORLD_SIZE"),
    *("RANK", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_NNODES", "PET_RDZV_ENDPOINT", "PET_RDZV_BACKEND"),
    *("PET_RDZV_ID", "PET_RDZV_CONF", "PET_MAX_RESTARTS", "PET_STANDALONE"),
)


def with_defaults(job: Json) -> Json:
    """A copy of the PyTorchJob with the defaults that the operator fills in, in its memory only."""
    job = copy.deepcopy(job)
    spec = job["spec"]
    spec.setdefault("runPolicy", {}).setdefault("cleanPodPolicy", "None")
    for replica in replica_specs(job).values():
        replica.setdefault("replicas", 1)
        replica["restartPolicy"] = replica.get("restartPolicy") or "OnFailure"
        for container in dig(replica, "template", "spec").get("containers") or []:
            ports = container.get("ports") or []
            named = any(port.get("name") == PORT_NAME for port in ports)
            if container.get("name") == CONTAINER and not named:
                container["ports"] = [*ports, {"name": PORT_NAME, "containerPort": PORT, "protocol": "TCP"}]
    elastic = spec.get("elasticPolicy")
    if elastic is not None:
        workers = replica_specs(job).get("Worker", {}).get("replicas", 1)
        low, high = elastic.get("minReplicas"), elastic.get("maxReplicas")
        elastic["minReplicas"] = next(n for n in (low, high, workers) if n is not None)
        elastic["maxReplicas"] = next(n for n in (high, low, workers) if n is not None)
    if spec.get("nprocPerNode") is None and (elastic is None or elastic.get("nProcPerNode") is None):
        spec["nprocPerNode"] = "auto"
    return job


def replica_specs(job: Json) -> dict[str, Json]:
    """``spec.pytorchReplicaSpecs``, the Master first."""
    specs = dig(job, "spec", "pytorchReplicaSpecs")
    return {role: specs[role] for role in REPLICA_TYPES if specs.get(role)}


def replica_name(job: str, replica_type: str, index: int) -> str:
    """The name of a pod and of its Service: ``run-master-0``, ``run-worker-1``."""
    return f"{job}-{replica_type.lower()}-{index}"


def pods(job: Json) -> list[Pod]:
    """The pods of a PyTorchJob, the master first.

    Raises:
        UserError: it is not a PyTorchJob with a replica that has a container named ``pytorch``.
    """
    if job.get("kind") != "PyTorchJob" or not replica_specs(job):
        what = f"a {job.get('kind', 'document')} without pytorchReplicaSpecs has no pods"
        fix = "give it spec.pytorchReplicaSpecs with a Master, or lint it: podtune lint FILE"
        raise DataError(what, where="manifest", fix=fix)
    job = with_defaults(job)
    return [
        _pod(job, role, index)
        for role, replica in replica_specs(job).items()
        for index in range(replica["replicas"])
    ]


def _pod(job: Json, role: str, index: int) -> Pod:
    name, replica = job["metadata"]["name"], replica_specs(job)[role]
    spec, metadata = copy.deepcopy(dig(replica, "template", "spec")), dig(replica, "template", "metadata")
    injected = injected_environment(job, role, index)
    for container in spec.get("containers") or []:
        container["env"] = [*(container.get("env") or []), *as_env(injected)]
    # behind the pod's own, which run while the master's name does not resolve yet
    if role == "Worker" and "Master" in replica_specs(job):
        spec["initContainers"] = [*(spec.get("initContainers") or []), init_container(name)]
    policy = replica["restartPolicy"]
    # the operator makes the pod again itself, so the kubelet may not start its containers again
    spec["restartPolicy"] = "Never" if policy == "ExitCode" else policy
    return Pod(
        name=replica_name(name, role, index),
        replica_type=role.lower(),
        index=index,
        labels={**dig(metadata, "labels"), **labels(job, role, index)},
        annotations=dig(metadata, "annotations"),
        spec=spec,
        restart_policy=policy,
        final=FINAL.get(policy, frozenset()),
    )


def labels(job: Json, role: str, index: int) -> dict[str, str]:
    """The operator's labels of a pod; ``training.kubeflow.org/job-name`` selects a job's pods."""
    own = {
        f"{LABEL}operator-name": "pytorchjob-controller",
        f"{LABEL}job-name": job["metadata"]["name"],
        f"{LABEL}replica-type": role.lower(),
        f"{LABEL}replica-index": str(index),
    }
    if role == "Master" or ("Master" not in replica_specs(job) and index == 0):
        own[f"{LABEL}job-role"] = "master"
    return own


def init_container(job_name: str) -> dict[str, object]:
    """The last init container of a worker, which waits for the master's DNS name, not its port."""
    master = replica_name(job_name, "Master", 0)
    look_up = f"if nslookup {master}; then err=0 && break; fi;echo waiting for master; sleep {INIT_WAIT_S}"
    return {
        "name": INIT_CONTAINER,
        "image": INIT_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "resources": {
            "limits": {"cpu": "100m", "memory": "20Mi"},
            "requests": {"cpu": "50m", "memory": "10Mi"},
        },
        "command": ["sh", "-c", f"err=1;for i in $(seq {INIT_TRIES}); do {look_up}; done; exit $err"],
    }


def injected_environment(job: Json, role: str, index: int) -> dict[str, str]:
    """The variables that the operator appends to every container (not init container) of one replica.

    ``job`` has its defaults. Appended after the pod's own env, so these win over anything the manifest sets.
    """
    spec, specs = job["spec"], replica_specs(job)
    nodes = sum(replica["replicas"] for replica in specs.values())
    env = {"PYTHONUNBUFFERED": "1"}
    if "Master" in specs:
        port, host = str(port_of(job, "Master")), replica_name(job["metadata"]["name"], "Master", 0)
        # the pod's, whatever its name says: torchrun gives the processes theirs
        rank = str(index + (role == "Worker"))
        env |= {"MASTER_PORT": port, "PET_MASTER_PORT": port, "MASTER_ADDR": host, "PET_MASTER_ADDR": host}
        env |= {"WORLD_SIZE": str(nodes * processes_per_node(spec)), "RANK": rank, "PET_NODE_RANK": rank}
    if spec.get("nprocPerNode") is not None:
        env["PET_NPROC_PER_NODE"] = str(spec["nprocPerNode"])
    elastic = spec.get("elasticPolicy")
    return env | (_elastic_environment(job, elastic) if elastic is not None else {"PET_NNODES": str(nodes)})


def _elastic_environment(job: Json, elastic: Json) -> dict[str, str]:
    host = elastic.get("rdzvHost") or replica_name(job["metadata"]["name"], "Worker", 0)
    env = {
        "PET_RDZV_ENDPOINT": f"{host}:{elastic.get('rdzvPort') or port_of(job, 'Worker')}",
        "PET_RDZV_BACKEND": elastic.get("rdzvBackend") or "c10d",
        # bounds of the Workers alone: a Master is not counted
        "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
    }
    keys = {"PET_MAX_RESTARTS": "maxRestarts", "PET_NPROC_PER_NODE": "nProcPerNode", "PET_RDZV_ID": "rdzvId"}
    env |= {name: str(elastic[key]) for name, key in keys.items() if elastic.get(key) is not None}
    if conf := elastic.get("rdzvConf"):
        env["PET_RDZV_CONF"] = ",".join(f"{each.get('key', '')}={each.get('value', '')}" for each in conf)
    return env | ({"PET_STANDALONE": ""} if elastic.get("standalone") else {})


def processes_per_node(spec: Json) -> int:
    """The factor of WORLD_SIZE: nprocPerNode, or 1 for auto, cpu and gpu, whatever torchrun then starts."""
    text = str(spec.get("nprocPerNode") or "")
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else 1


def port_of(job: Json, role: str) -> int:
    """The containerPort named ``pytorchjob-port`` of the container ``pytorch``; ``job`` has its defaults."""
    for container in dig(replica_specs(job).get(role), "template", "spec").get("containers") or []:
        if container.get("name") == CONTAINER:
            return next(
                int(port["containerPort"]) for port in container["ports"] if port.get("name") == PORT_NAME
            )
    where = f"spec.pytorchReplicaSpecs.{role}.template.spec.containers"
    what, fix = f"{role} has no container named {CONTAINER!r}", f"name the training container {CONTAINER!r}"
    raise DataError(what, where=where, fix=fix)
