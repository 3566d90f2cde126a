"""Making a job fit this machine: a small model where asked for, and the CPU where GPUs are too few."""

from __future__ import annotations

from typing import Any

from podtune.cluster.dry_run.dry_run import Adaptation
from podtune.cluster.job.manifest import Pod
from podtune.cluster.lint.templates import count_gpus
from podtune.machine.facts import gpus, usable_cpus

Json = dict[str, Any]

MODEL_LENGTH = 256  # tokens; the small models are made for short questions and answers
SIZES = ("micro", "tiny")

#: keys of the training YAML that need a GPU, with the value that a CPU takes; None removes the key
ON_CPU: Json = {
    "use_cpu": True,
    "tf32": None,
    "fp16": None,
    "attn_implementation": None,
    "load_in_4bit": None,
    "load_in_8bit": None,
    "use_liger_kernel": None,
}
#: keys of the training YAML that belong to the real model and data
REAL = (
    *("model_revision", "dataset_config", "dataset_train_split", "dataset_test_split"),
    *("chat_template_path", "attn_implementation"),
)


def small_model(size: str, values: Json) -> tuple[list[str], Json]:
    """``--set`` expressions and config keys that put a small model in the place of the real one.

    ``values`` are the effective ones: the mount paths come from there.
    """
    paths = {name: values["persistence"][name]["mountPath"] for name in ("models", "data")}
    config: Json = {
        "model_name_or_path": f"{paths['models']}/podtune-{size}",
        "dataset_name": f"{paths['data']}/qa",
        "max_length": MODEL_LENGTH,
        **dict.fromkeys(REAL),
    }
    return ["prepare.enabled=true", f"prepare.build={size}"], config


def devices(pods: list[Pod]) -> Adaptation:
    """The GPUs or the CPU on which the processes train.

    With as many GPUs as the job asks for, each pod sees its own; otherwise all train on the CPU, as they do
    when the job asks for none, because a pod without GPUs sees none either.
    """
    requested = {
        pod.name: sum(count_gpus(container, "limits") for container in pod.spec["containers"]) for pod in pods
    }
    total, here = sum(requested.values()), gpus().count
    if total and here >= total:
        free, variables = iter(range(here)), {}
        for name, count in requested.items():
            variables[name] = {"CUDA_VISIBLE_DEVICES": ",".join(str(next(free)) for _ in range(count))}
        return Adaptation({}, variables, [f"each pod sees its own of this machine's {here} GPUs"])
    variables = _on_cpu(pods, requested)
    if not total:
        return Adaptation({}, variables)
    note = (
        f"the job asks for {total} GPUs and this machine has {here}: CPU and gloo here, where the cluster "
        "has GPUs and NCCL"
    )
    return Adaptation(dict(ON_CPU), variables, [note])


def _on_cpu(pods: list[Pod], requested: dict[str, int]) -> dict[str, dict[str, str]]:
    """Variables by pod that hide GPUs and share the machine's cores."""
    variables = {pod.name: {"CUDA_VISIBLE_DEVICES": "", "PODTUNE_GPUS_PER_POD": ""} for pod in pods}
    processes = {pod.name: _processes(pod, requested[pod.name]) for pod in pods}
    threads = max(1, usable_cpus() // sum(processes.values()))
    for pod in pods:
        if any(requested.values()) and pod.variables.get("PET_NPROC_PER_NODE") in ("auto", "gpu"):
            variables[pod.name]["PET_NPROC_PER_NODE"] = str(processes[pod.name])
        for container in pod.spec["containers"]:
            in_pod = pod.environment(container).get("OMP_NUM_THREADS", "")
            # pods share this machine: more threads than cores wait for each other
            if in_pod.isdigit() and int(in_pod) > threads:
                variables[pod.name]["OMP_NUM_THREADS"] = str(threads)
    return variables


def _processes(pod: Pod, gpus: int) -> int:
    """Processes of a pod: its nprocPerNode where that is a number, else one a GPU or core."""
    value = pod.variables.get("PET_NPROC_PER_NODE", "1")
    return int(value) if value.isdigit() else gpus or usable_cpus()
