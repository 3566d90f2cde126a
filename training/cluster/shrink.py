"""Making a job fit this machine for a dry run: only what was asked for (--model, --steps), and the CPU where GPUs are too few."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from training.cluster.contract import Pod
from training.cluster.lint.job import count_gpus

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
    """``--set`` expressions and config keys that put a small model, made on the spot, in the place of the real one.

    ``values`` are the effective ones: the mount paths come from there.
    """
    paths = {name: values["persistence"][name]["mountPath"] for name in ("models", "data")}
    config: Json = {
        "model_name_or_path": f"{paths['models']}/podtune-{size}",
        "dataset_name": f"{paths['data']}/qa",
        "max_length": MODEL_LENGTH,
        **dict.fromkeys(("model_revision", "dataset_config", "dataset_train_split", "dataset_test_split", "chat_template_path")),
        "attn_implementation": None,
    }
    return ["prepare.enabled=true", f"prepare.build={size}"], config


def devices(pods: list[Pod]) -> tuple[Json, dict[str, dict[str, str]], list[str]]:
    """Config keys, variables by pod, and notes that say where the processes train.

    With as many GPUs as the job asks for, each pod sees its own; otherwise all train on the CPU, as they do when the job asks
    for none, because a pod without GPUs sees none either.
    """
    asked = {pod.name: sum(count_gpus(container, "limits") for container in pod.spec["containers"]) for pod in pods}
    here = local_gpus()
    if not any(asked.values()):
        return {}, {pod.name: {"CUDA_VISIBLE_DEVICES": ""} for pod in pods}, []
    if here >= sum(asked.values()):
        taken, variables = 0, {}
        for name, count in asked.items():
            variables[name] = {"CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in range(taken, taken + count))}
            taken += count
        return {}, variables, [f"each pod sees its own of this machine's {here} GPUs"]
    note = (
        f"the job asks for {sum(asked.values())} GPUs and this machine has {here}: CPU and gloo here, where the cluster has GPUs and NCCL"
    )
    variables = {pod.name: {"CUDA_VISIBLE_DEVICES": "", "PODTUNE_GPUS_PER_POD": ""} for pod in pods}
    for pod in pods:
        if pod.injected.get("PET_NPROC_PER_NODE") in ("auto", "gpu"):
            variables[pod.name]["PET_NPROC_PER_NODE"] = str(asked[pod.name] or 1)
    return ON_CPU, variables, [note]


def local_gpus() -> int:
    """NVIDIA GPUs of this machine, asked of the driver's own tool so that torch need not be loaded."""
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) if done.returncode == 0 else 0
