"""Making a job fit this machine: a small model where asked for, and the CPU where GPUs are too few."""

from __future__ import annotations

from dataclasses import dataclass, field

from podtune.cluster.job.manifest import Json, Pod
from podtune.cluster.lint.templates import count_gpus
from podtune.machine.facts import visible_gpus

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


@dataclass(frozen=True)
class Adaptation:
    """Changes that make a job fit this machine.

    Args:
        config: keys set in every YAML file of a mounted ConfigMap; None removes a key.
        variables: by pod, set for its containers after everything else.
        notes: what the changes mean, for the person to read.
    """

    config: Json = field(default_factory=dict)
    variables: dict[str, dict[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


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
    total, here = sum(requested.values()), visible_gpus()
    variables: dict[str, dict[str, str]] = {}
    if total and here >= total:
        free = iter(range(here))
        for name, count in requested.items():
            variables[name] = {"CUDA_VISIBLE_DEVICES": ",".join(str(next(free)) for _ in range(count))}
        return Adaptation({}, variables, [f"each pod sees its own of this machine's {here} GPUs"])
    for pod in pods:
        variables[pod.name] = {"CUDA_VISIBLE_DEVICES": "", "PODTUNE_GPUS_PER_POD": ""}
        if total and pod.variables.get("PET_NPROC_PER_NODE") in ("auto", "gpu"):
            variables[pod.name]["PET_NPROC_PER_NODE"] = str(requested[pod.name] or 1)
    if not total:
        return Adaptation({}, variables)
    note = f"the job asks for {total} GPUs and this machine has {here}: CPU and gloo here"
    return Adaptation(dict(ON_CPU), variables, [f"{note}, where the cluster has GPUs and NCCL"])
