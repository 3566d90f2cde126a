"""One thing wrong with a good job, and what only looks wrong; for the tests of lint and of a real cluster."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from podtune.cluster.lint.explain import examples
from support.lint_examples import merged

Json = dict[str, Any]
FOLDER = Path(__file__).parents[1] / "cluster/lint"
FAULTS: dict[str, list[Any]] = yaml.safe_load((FOLDER / "faults.yaml").read_text(encoding="utf-8"))
SHAPES: dict[str, str] = yaml.safe_load((FOLDER / "jobs_that_run.yaml").read_text(encoding="utf-8"))
POD = ("template", "spec")


def of_container(change: Any) -> Json:
    return {"containers": [{"name": "pytorch", **change}]}


def nested(path: tuple[str, ...], change: Any) -> Any:
    return change if not path else {path[0]: nested(path[1:], change)}


def changed(where: str, change: Any) -> Json:
    """The good job, TrainJob or runtime with ``change`` made where it says."""
    kind = where.partition("-")[0]
    job: Json = yaml.safe_load(examples()[kind if kind in ("trainjob", "runtime") else "base"])
    job = copy.deepcopy(job)  # what YAML's aliases share is two things from here on
    if kind == "trainjob" or where in ("job", "runtime"):
        return merged(job, change)  # type: ignore[no-any-return]
    if kind == "runtime":
        if where != "runtime-step":
            change = {"containers": [{"name": "node", **change}]} if where == "runtime-container" else change
            change = nested(("template", "spec", "template", "spec"), change)
        step = {"replicatedJobs": [{"name": "node", **change}]}
        return merged(job, {"spec": {"template": {"spec": step}}})  # type: ignore[no-any-return]
    if where == "job-on-cpus":
        job = in_replicas(job, ("Master", "Worker"), nested(POD, of_container({"resources": None})))
        return merged(job, change)  # type: ignore[no-any-return]
    if where == "gpu-left-empty":
        for replica in job["spec"]["pytorchReplicaSpecs"].values():
            replica["template"]["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": None}}
        return job
    roles = {"master": ("Master",), "worker": ("Worker",)}.get(kind, ("Master", "Worker"))
    part = where.partition("-")[2] or kind
    path = {"pod": POD, "container": POD, "template": ("template",)}.get(part, ())
    return in_replicas(job, roles, nested(path, of_container(change) if part == "container" else change))


def in_replicas(job: Json, roles: tuple[str, ...], change: Any) -> Json:
    return merged(job, {"spec": {"pytorchReplicaSpecs": dict.fromkeys(roles, change)}})  # type: ignore[no-any-return]


HARMLESS: dict[str, tuple[str, Any]] = {
    "a label alone against the sidecar": ("master-template", {"metadata": {"annotations": None}}),
    "one process a pod in python": (
        "job-on-cpus",
        {"spec": {"nprocPerNode": None, "pytorchReplicaSpecs": {"Worker": {"replicas": 3}}}},
    ),
    "the operator's own variables as flags": (
        "container",
        {
            "command": [
                *("torchrun", "--nnodes=$(PET_NNODES)", "--nproc-per-node=$(PET_NPROC_PER_NODE)"),
                *("--node-rank=$(RANK)", "--master-addr=$(MASTER_ADDR)", "train.py"),
            ]
        },
    ),
    "flags with variables of a shell": (
        "container",
        {"command": ["bash", "-c", "exec torchrun --node_rank $PET_NODE_RANK --nnodes=$PET_NNODES a.py"]},
    ),
    "a variable of its own as the number of nodes": (
        "container",
        {
            "env": [{"name": "NODES", "value": "2"}],
            "command": ["torchrun", "--nnodes=$(NODES)", "train.py"],
        },
    ),
    "accelerate with the operator's variables": (
        "container",
        {
            "command": [
                *("accelerate", "launch", "--num_machines=2", "--machine_rank=$(RANK)"),
                *("--main_process_ip=$(MASTER_ADDR)", "train.py"),
            ]
        },
    ),
    "accelerate with flags in a variable": (
        "container",
        {"command": ["sh", "-c", "exec accelerate launch --num_machines 2 $FLAGS train.py"]},
    ),
    "ports with names, the operator's own among them": (
        "container",
        {
            "ports": [
                {"name": "pytorchjob-port", "containerPort": 23999},
                {"name": "m", "containerPort": 23456},
            ]
        },
    ),
    "the operator's port alone": (
        "container",
        {"ports": [{"name": "pytorchjob-port", "containerPort": 23456}]},
    ),
    "a trainer to log in to": ("container", {"command": ["sleep", "infinity"]}),
    "an explicit empty toleration": ("pod", {"tolerations": [{"operator": "Exists"}]}),
    "hostIPC in place of a volume": ("pod", {"hostIPC": True}),
    "dnsPolicy None with servers": (
        "pod",
        {"hostNetwork": True, "dnsPolicy": "None", "dnsConfig": {"nameservers": ["10.0.0.10"]}},
    ),
    "other resources of the vendor": (
        "container",
        {"resources": {key: {"nvidia.com/roce_gdr": 2} for key in ("limits", "requests")}},
    ),
    "MIG slices": (
        "container",
        {"resources": {"requests": None, "limits": {"nvidia.com/mig-1g.10gb": 2, "nvidia.com/gpu": None}}},
    ),
    "quantities of every notation": (
        "container",
        {
            "resources": {
                "requests": {"cpu": "0.5", "memory": "1e9", "ephemeral-storage": "10Gi"},
                "limits": {"cpu": "1500m", "memory": 2147483648, "ephemeral-storage": "20G"},
            }
        },
    ),
    "huge pages": (
        "container",
        {"resources": {key: {"hugepages-2Mi": "1Gi", "memory": "8Gi"} for key in ("limits", "requests")}},
    ),
    "a sidecar as an init container": (
        "pod",
        {"initContainers": [{"name": "logs", "image": "logs:1", "restartPolicy": "Always"}]},
    ),
    "every source of a volume": (
        "pod",
        {
            "volumes": [
                {"name": "a", "configMap": {"name": "a"}},
                {"name": "b", "secret": {"secretName": "b", "defaultMode": 256}},
                {"name": "c", "projected": {"sources": [{"secret": {"name": "c"}}]}},
                {"name": "d", "csi": {"driver": "x.y"}},
                {"name": "e"},
            ]
        },
    ),
    "downward API": (
        "container",
        {
            "env": [
                {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
                {"name": "B", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
                {"name": "C.D-e", "value": "1"},
            ]
        },
    ),
    "an image by digest in a registry with a port": (
        "container",
        {"image": f"localhost:5000/a/b_c/d-e.f:v1_2@sha256:{'0' * 64}"},
    ),
    "labels with empty values and prefixes": (
        "job",
        {"metadata": {"labels": {"a": "", "example.com/B_c.d": "X_1.y"}, "annotations": {"A.com/b": " "}}},
    ),
    "only the image's own program": ("container", {"command": None, "args": ["--epochs", "3"]}),
    "a script of the image": ("container", {"command": ["/opt/run me.sh", "--x"]}),
    "a script handed to a shell": ("container", {"command": ["bash", "/opt/start.sh", "--epochs", "3"]}),
    "arguments for a script after -c": (
        "container",
        {"command": ["sh", "-c", 'exec torchrun "$@"', "sh", "train.py"]},
    ),
    "python's -c": ("job-on-cpus", {"spec": {"nprocPerNode": "1"}}),
    "xpu as the processes": ("job", {"spec": {"nprocPerNode": "auto"}}),
    "a deadline and a kept job": (
        "job",
        {"spec": {"runPolicy": {"activeDeadlineSeconds": 3600, "ttlSecondsAfterFinished": 86400}}},
    ),
    "a date as a label": ("job", {"metadata": {"annotations": {"when": "2026-11-21", "ratio": "1:30"}}}),
    "trainjob, cpu for the processes": ("trainjob", {"spec": {"trainer": {"numProcPerNode": "cpu"}}}),
    "trainjob, two GPUs in limits only": (
        "trainjob",
        {"spec": {"trainer": {"numProcPerNode": 2, "resourcesPerNode": {"requests": None}}}},
    ),
    "trainjob, MASTER_PORT by hand": (
        "trainjob",
        {"spec": {"trainer": {"env": [{"name": "MASTER_PORT", "value": "29501"}]}}},
    ),
    "trainjob, a runtime of the cluster": ("trainjob", {"spec": {"runtimeRef": {"name": "ours"}}}),
    "runtime, no image for the trainer": ("runtime-container", {"image": None}),
}
