"""Kubeflow Trainer's and JobSet's contract (2.2 and later): pods and environment of a TrainJob.

A TrainJob refers to a runtime, which holds the pod template. Runtimes are looked for among the documents that
come with the TrainJob; ``torch-distributed``, which every installation has, is known here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

from podtune.cluster.job.manifest import Json, Pod, as_env, dig
from podtune.run.errors import DataError

PORT = 29500
NODE = "node"  # the name of the replicated job and of its container: PET_MASTER_ADDR is built with it
ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"  # the label of a replicated job
LABEL = "jobset.sigs.k8s.io/"
MAX_NAME = 48  # a longer one passes Trainer's webhook, JobSet refuses it, and the TrainJob waits for ever

_POD: Json = {"spec": {"containers": [{"name": NODE, "image": "pytorch/pytorch"}]}}
_STEP: Json = {
    "name": NODE,
    "template": {"metadata": {"labels": {ANCESTOR: "trainer"}}, "spec": {"template": _POD}},
}
TORCH_DISTRIBUTED: Json = {
    "kind": "ClusterTrainingRuntime",
    "metadata": {"name": "torch-distributed"},
    "spec": {
        "mlPolicy": {"numNodes": 1, "torch": {"numProcPerNode": "auto"}},
        "template": {"spec": {"replicatedJobs": [_STEP]}},
    },
}
#: fields of spec.trainer -> of the container
HANDED_ON = {"image": "image", "command": "command", "args": "args", "resourcesPerNode": "resources"}
#: lists that a patch merges by a key of their entries
MERGED = {
    **dict.fromkeys(("volumes", "containers", "initContainers", "env", "imagePullSecrets"), "name"),
    "volumeMounts": "mountPath",
}


def runtime_of(job: Json, documents: Iterable[Json] = ()) -> Json | None:
    """The runtime of the TrainJob, from ``documents`` or built in; None if it is only in the cluster."""
    reference = dig(job, "spec", "runtimeRef")
    kind, name = reference.get("kind") or "ClusterTrainingRuntime", reference.get("name")
    for document in (*documents, TORCH_DISTRIBUTED):
        if document.get("kind") == kind and dig(document, "metadata").get("name") == name:
            return document
    return None


def pods(job: Json, documents: Iterable[Json] = ()) -> list[Pod]:
    """The pods of a TrainJob; their names lack the random suffix that Kubernetes appends.

    Raises:
        UserError: the runtime is neither among the documents nor built in.
    """
    runtime = runtime_of(job, documents)
    if runtime is None:
        what = f"the runtime {job['spec'].get('runtimeRef')} is not among the documents"
        fix = "put the TrainingRuntime into the same file, or refer to torch-distributed"
        raise DataError(what, where=f"TrainJob {job['metadata']['name']}", fix=fix)
    template, nodes = _node_template(runtime), _nodes(dig(job, "spec", "trainer"), runtime)
    return [_pod(job, runtime, template, index) for index in range(nodes)]


def _nodes(trainer: Json, runtime: Json) -> int:
    return int(trainer.get("numNodes") or dig(runtime, "spec", "mlPolicy").get("numNodes") or 1)


def _pod(job: Json, runtime: Json, template: Json, index: int) -> Pod:
    trainer, name = dig(job, "spec", "trainer"), job["metadata"]["name"]
    template = copy.deepcopy(template)
    for patch in job["spec"].get("runtimePatches") or []:
        for step in dig(patch, "trainingRuntimeSpec", "template", "spec").get("replicatedJobs") or []:
            if step["name"] == NODE:
                _merge(template, dig(step, "template", "spec", "template"))
    spec = template["spec"]
    # spec.trainer goes into this container and no other
    container = next(item for item in spec["containers"] if item["name"] == NODE)
    container |= {target: trainer[key] for key, target in HANDED_ON.items() if trainer.get(key) is not None}
    own = [*(container.get("env") or []), *(trainer.get("env") or [])]
    container["env"] = [*own, *as_env(environment(job, runtime, index))]
    labels = {
        # the JobSet has the TrainJob's name
        f"{LABEL}jobset-name": name,
        f"{LABEL}replicatedjob-name": NODE,
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    return Pod(
        name=f"{name}-{NODE}-0-{index}",
        replica_type=NODE,
        index=index,
        labels={**dig(template, "metadata", "labels"), **labels},
        annotations=dig(template, "metadata", "annotations"),
        spec=spec,
        restart_policy=spec.get("restartPolicy") or "OnFailure",
    )


def _merge(own: Json, patch: Json) -> None:
    """Merge as Kubernetes' strategic merge does: the lists of MERGED by that key, others replaced."""
    for key, value in patch.items():
        if isinstance(value, dict):
            _merge(own.setdefault(key, {}), value)
        elif key in MERGED:
            entries = {entry[MERGED[key]]: entry for entry in own.get(key) or []}
            for entry in value:
                _merge(entries.setdefault(entry[MERGED[key]], {}), entry)
            own[key] = list(entries.values())
        else:
            own[key] = value


def environment(job: Json, runtime: Json, index: int) -> dict[str, str]:
    """The variables of a node's container: PET_* and no RANK; without spec.trainer no PET_* either."""
    env = {"JOB_COMPLETION_INDEX": str(index)}
    trainer = job["spec"].get("trainer")
    if trainer is None:
        return env
    name = job["metadata"]["name"]
    return {
        "PET_NNODES": str(_nodes(trainer, runtime)),
        "PET_NPROC_PER_NODE": _processes(trainer),
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": f"{name}-{NODE}-0-0.{name}",
        "PET_MASTER_PORT": str(PORT),
        **env,
    }


def _processes(trainer: Json) -> str:
    """Resolve numProcPerNode: unset it is auto where the pod has GPUs, else its CPUs."""
    if trainer.get("numProcPerNode"):
        return str(trainer["numProcPerNode"])
    resources = trainer.get("resourcesPerNode") or {}
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    if any("gpu" in name.lower() for name in (*requests, *limits)):
        return "auto"
    cpu = str(requests.get("cpu") or limits.get("cpu") or "1")
    cores = int(cpu[:-1]) / 1000 if cpu.endswith("m") else float(cpu)
    return str(max(1, -int(-cores // 1)))


def _node_template(runtime: Json) -> Json:
    for replicated in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        if replicated.get("name") == NODE:
            template: Json = replicated["template"]["spec"]["template"]
            return template
    what = f"the runtime has no replicated job named {NODE!r}"
    raise DataError(what, where="TrainingRuntime", fix=f"name it {NODE!r}")
