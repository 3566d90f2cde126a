"""Making a job fit this machine for a dry run: only what was asked for (--model, --steps), and the CPU where
GPUs are too few.
"""

from __future__ import annotations

from typing import Any

from podtune.cluster.job.pytorchjob import Pod
from podtune.cluster.lint.job import count_gpus
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


def small_model(size: str, values: Json) -> tuple[list[str], Json]:
    """``--set`` expressions and config keys that put a small model, made on the spot, in the place of the
    real one.

    ``values`` are the effective ones: the mount paths come from there.
    """
    paths = {name: values["persistence"][name]["mountPath"] for name in ("models", "data")}
    config: Json = {
        "model_name_or_path": f"{paths['models']}/podtune-{size}",
        "dataset_name": f"{paths['data']}/qa",
        "max_length": MODEL_LENGTH,
        **dict.fromkeys(
            (
                "model_revision",
                "dataset_config",
                "dataset_train_split",
                "dataset_test_split",
                "chat_template_path",
            )
        ),
        "attn_implementation": None,
    }
    return ["prepare.enabled=true", f"prepare.build={size}"], config


def devices(pods: list[Pod]) -> tuple[Json, dict[str, dict[str, str]], list[str]]:
    """Config keys, variables by pod, and notes that say where the processes train.

    With as many GPUs as the job asks for, each pod sees its own; otherwise all train on the CPU, as they do
    when the job asks for none, because a pod without GPUs sees none either.
    """
    asked = {
        pod.name: sum(count_gpus(container, "limits") for container in pod.spec["containers"]) for pod in pods
    }
    here = local_gpus()
    if any(asked.values()) and here >= sum(asked.values()):
        taken, variables = 0, {}
        for name, count in asked.items():
            variables[name] = {
                "CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in range(taken, taken + count))
            }
            taken += count
        return {}, variables, [f"each pod sees its own of this machine's {here} GPUs"]
    variables = {pod.name: {"CUDA_VISIBLE_DEVICES": "", "PODTUNE_GPUS_PER_POD": ""} for pod in pods}
    processes = {pod.name: _processes(pod, asked[pod.name]) for pod in pods}
    threads = max(1, usable_cpus() // sum(processes.values()))
    for pod in pods:
        if any(asked.values()) and pod.injected.get("PET_NPROC_PER_NODE") in ("auto", "gpu"):
            variables[pod.name]["PET_NPROC_PER_NODE"] = str(processes[pod.name])
        for container in pod.spec["containers"]:
            wanted = pod.environment(container).get("OMP_NUM_THREADS", "")
            # pods share this machine: more threads than cores wait for each other
            if wanted.isdigit() and int(wanted) > threads:
                variables[pod.name]["OMP_NUM_THREADS"] = str(threads)
    if not any(asked.values()):
        return {}, variables, []
    note = (
        f"the job asks for {sum(asked.values())} GPUs and this machine has {here}: CPU and gloo here, where "
        "the cluster has GPUs and NCCL"
    )
    return ON_CPU, variables, [note]


def _processes(pod: Pod, gpus: int) -> int:
    """How many processes a pod starts here: one a GPU that it asks for, or one a core, unless it says a
    number.
    """
    wanted = pod.injected.get("PET_NPROC_PER_NODE", "1")
    return int(wanted) if wanted.isdigit() else gpus or usable_cpus()


def local_gpus() -> int:
    """NVIDIA GPUs of this machine that answer."""
    return gpus().count
