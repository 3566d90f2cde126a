"""What Kubeflow Trainer 2.0 and JobSet make of a TrainJob (api: trainjob): its pods and their environment.

A TrainJob refers to a runtime, which holds the pod template. Runtimes are looked for among the documents that
come with the TrainJob; ``torch-distributed``, which every installation has, is known here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from podtune.cluster.job.pytorchjob import Pod
from podtune.run.errors import DataError

Json = dict[str, Any]

PORT = 29500
NODE = "node"  # the name of the replicated job and of its container: PET_MASTER_ADDR is built with it
LABEL = "jobset.sigs.k8s.io/"
MAX_NAME = 48  # a longer one passes Trainer's webhook, JobSet refuses it, and the TrainJob waits for ever

TORCH_DISTRIBUTED: Json = {
    "kind": "ClusterTrainingRuntime",
    "metadata": {"name": "torch-distributed"},
    "spec": {
        "mlPolicy": {"numNodes": 1, "torch": {"numProcPerNode": "auto"}},
        "template": {
            "spec": {
                "replicatedJobs": [
                    {
                        "name": NODE,
                        "template": {
                            "metadata": {
                                "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
                            },
                            "spec": {
                                "template": {
                                    "spec": {"containers": [{"name": NODE, "image": "pytorch/pytorch"}]}
                                }
                            },
                        },
                    }
                ]
            }
        },
    },
}


def runtime_of(job: Json, documents: Iterable[Json] = ()) -> Json | None:
    """The runtime that the TrainJob refers to, from ``documents`` or built in; None if it is only in the
    cluster.
    """
    reference = (job.get("spec") or {}).get("runtimeRef") or {}
    kind, name = reference.get("kind") or "ClusterTrainingRuntime", reference.get("name")
    for document in (*documents, TORCH_DISTRIBUTED):
        if document.get("kind") == kind and (document.get("metadata") or {}).get("name") == name:
            return document
    return None


def pods(job: Json, documents: Iterable[Json] = ()) -> list[Pod]:
    """The pods of a TrainJob; their names lack the random suffix that Kubernetes appends.

    Raises:
        UserError: the runtime is neither among the documents nor built in.
    """
    runtime = runtime_of(job, documents)
    if runtime is None:
        raise DataError(
            f"the runtime {job['spec'].get('runtimeRef')} is not among the documents",
            where=f"TrainJob {job['metadata']['name']}",
            fix="put the TrainingRuntime into the same file, or refer to torch-distributed",
        )
    trainer: Json | None = job["spec"].get("trainer")
    policy = runtime["spec"].get("mlPolicy") or {}
    nodes = (trainer or {}).get("numNodes") or policy.get("numNodes") or 1
    name = job["metadata"]["name"]
    pods_of_job = []
    for index in range(nodes):
        template = _node_template(runtime)
        spec = copy.deepcopy(template["spec"])
        container = next(item for item in spec["containers"] if item["name"] == NODE)
        for key, target in (
            ("image", "image"),
            ("command", "command"),
            ("args", "args"),
            ("resourcesPerNode", "resources"),
        ):
            if (trainer or {}).get(key) is not None:
                container[target] = (trainer or {})[key]
        injected = environment(job, runtime, index)
        own = [*(container.get("env") or []), *((trainer or {}).get("env") or [])]
        container["env"] = [*own, *({"name": key, "value": value} for key, value in injected.items())]
        _override(spec, job["spec"].get("podSpecOverrides") or [])
        pods_of_job.append(
            Pod(
                name=f"{name}-{NODE}-0-{index}",
                replica_type=NODE,
                index=index,
                labels={
                    **((template.get("metadata") or {}).get("labels") or {}),
                    f"{LABEL}jobset-name": name,
                    f"{LABEL}replicatedjob-name": NODE,
                    "batch.kubernetes.io/job-completion-index": str(index),
                },
                annotations=(template.get("metadata") or {}).get("annotations") or {},
                spec=spec,
                restart_policy=spec.get("restartPolicy") or "OnFailure",
                injected=injected,
            )
        )
    return pods_of_job


def environment(job: Json, runtime: Json, index: int) -> dict[str, str]:
    """What a node's container gets: PET_* only, no MASTER_*, WORLD_SIZE or RANK; without spec.trainer no
    PET_* either.
    """
    env = {"JOB_COMPLETION_INDEX": str(index)}
    trainer = job["spec"].get("trainer")
    if trainer is None:
        return env
    policy = runtime["spec"].get("mlPolicy") or {}
    name = job["metadata"]["name"]
    return {
        "PET_NNODES": str(trainer.get("numNodes") or policy.get("numNodes") or 1),
        "PET_NPROC_PER_NODE": _processes(trainer, policy),
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": f"{name}-{NODE}-0-0.{name}",
        "PET_MASTER_PORT": str(PORT),
        **env,
    }


def _processes(trainer: Json, policy: Json) -> str:
    """numProcPerNode as Trainer 2.0.0 resolves it: with ``auto``, GPUs are seen in requests only, else a CPU
    limit counts.
    """
    value = str(trainer.get("numProcPerNode") or (policy.get("torch") or {}).get("numProcPerNode") or "auto")
    resources = trainer.get("resourcesPerNode")
    if value != "auto" or not resources:
        return value
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    if any("gpu" in key.lower() for key in requests):
        return "auto"
    cpu = str(limits.get("cpu") or requests.get("cpu") or "1")
    cores = int(cpu[:-1]) / 1000 if cpu.endswith("m") else float(cpu)
    return str(max(1, -int(-cores // 1)))


def _node_template(runtime: Json) -> Json:
    for replicated in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        if replicated.get("name") == NODE:
            template: Json = replicated["template"]["spec"]["template"]
            return template
    raise DataError(
        f"the runtime has no replicated job named {NODE!r}", where="TrainingRuntime", fix=f"name it {NODE!r}"
    )


def _override(spec: Json, overrides: list[Json]) -> None:
    """podSpecOverrides for the job ``node``: volumes and the container's mounts, merged by name as Trainer
    does.
    """
    for override in overrides:
        if not any(target.get("name") == NODE for target in override.get("targetJobs") or []):
            continue
        for key in ("serviceAccountName", "nodeSelector", "tolerations"):
            if key in override:
                spec[key] = override[key]
        for key in ("volumes", "initContainers"):
            spec[key] = _merged(spec.get(key) or [], override.get(key) or [])
        for change in override.get("containers") or []:
            for container in spec["containers"]:
                if container["name"] == change["name"]:
                    for key in ("env", "volumeMounts"):
                        container[key] = _merged(container.get(key) or [], change.get(key) or [])


def _merged(own: list[Json], changes: list[Json]) -> list[Json]:
    by_name = {item["name"]: item for item in own}
    for change in changes:
        by_name[change["name"]] = {**by_name.get(change["name"], {}), **change}
    return list(by_name.values())
