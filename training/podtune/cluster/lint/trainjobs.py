"""PT5: TrainJob, where Trainer's webhook is silent or the job would wait for ever."""

from __future__ import annotations

import re
from collections.abc import Iterator

from podtune.cluster.job.trainjob import MAX_NAME, runtime_of
from podtune.cluster.lint.job import Job, count_gpus
from podtune.cluster.lint.rules import Found, rule

ONLY = ("TrainJob",)


@rule("PT501", "error", fix="add spec.trainer, with numNodes and numProcPerNode", kinds=ONLY)
def no_trainer(job: Job) -> Iterator[Found]:
    """Without spec.trainer no PET_* reaches the pods, so torchrun starts a job of its own in each."""
    if job.spec.get("trainer") is None:
        yield Found(("spec",), "the TrainJob has no spec.trainer")


@rule(
    "PT502",
    "error",
    fix=("numProcPerNode: the processes (GPUs) of one pod"),
    values="distributed.nprocPerNode",
    kinds=ONLY,
)
def trainer_processes(job: Job) -> Iterator[Found]:
    """numProcPerNode is a number or auto, cpu, gpu; unset means auto, which on CPUs is every core of the
    node.
    """
    if job.spec.get("trainer") is None:
        return
    value = (job.spec.get("trainer") or {}).get("numProcPerNode")
    if value is None:
        yield Found(
            ("spec", "trainer"),
            ("numProcPerNode is absent, which means the runtime's, usually auto"),
            "warning",
        )
    elif str(value) not in ("auto", "cpu", "gpu") and not re.fullmatch(r"[1-9]\d*", str(value)):
        yield Found(("spec", "trainer", "numProcPerNode"), f"numProcPerNode is {value!r}")


@rule(
    "PT503",
    "error",
    fix=(f"keep the name within {MAX_NAME} characters"),
    values="fullnameOverride (or the release name)",
    kinds=ONLY,
)
def trainjob_name_too_long(job: Job) -> Iterator[Found]:
    """JobSet refuses names over 48 characters after Trainer's webhook took them: the TrainJob waits for ever
    without a status.
    """
    if len(job.name) > MAX_NAME:
        yield Found(("metadata", "name"), f"the name has {len(job.name)} characters")


@rule(
    "PT504",
    "warning",
    fix=("install the runtime first, or as a pre-install hook, or refer to an installed one"),
    kinds=ONLY,
)
def runtime_beside_trainjob(job: Job) -> Iterator[Found]:
    """A TrainingRuntime in the same chart is created after the TrainJob (Helm goes by kind's name), whose
    webhook then refuses it.
    """
    runtime = runtime_of(job.content, (other.content for other in job.others))
    if runtime is None or runtime.get("kind") != "TrainingRuntime":
        return
    metadata = runtime.get("metadata") or {}
    by_helm = (metadata.get("labels") or {}).get("app.kubernetes.io/managed-by") == "Helm"
    if by_helm and not (metadata.get("annotations") or {}).get("helm.sh/hook"):
        yield Found(
            ("spec", "runtimeRef"),
            (f"the TrainingRuntime {metadata.get('name')} comes with the chart of its TrainJob"),
        )


@rule("PT505", "error", fix="write the same GPUs under requests and limits", values="resources", kinds=ONLY)
def gpu_limit_without_request(job: Job) -> Iterator[Found]:
    """With numProcPerNode auto, Trainer 2.0 counts GPUs in requests only: limits alone start one process a
    pod.
    """
    trainer = job.spec.get("trainer") or {}
    resources = {"resources": trainer.get("resourcesPerNode")}
    value = str(trainer.get("numProcPerNode") or "auto")
    if value == "auto" and count_gpus(resources, "limits") and not count_gpus(resources, "requests"):
        yield Found(
            ("spec", "trainer", "resourcesPerNode"), ("GPUs are in limits only and numProcPerNode is auto")
        )


@rule(
    "PT506",
    "warning",
    fix=("restartPolicy: Never in the runtime's template, with backoffLimit: 0"),
    values="restartPolicy",
    kinds=ONLY,
)
def trainjob_logs_lost(job: Job) -> Iterator[Found]:
    """Unless the template's restartPolicy is Never, a failed job's pods are deleted with their logs."""
    runtime = runtime_of(job.content, (other.content for other in job.others))
    if runtime is not None and runtime.get("kind") == "TrainingRuntime":
        for template in job.templates:
            if template.restart_policy != "Never":
                yield Found(
                    ("spec", "runtimeRef"), (f"the runtime's restartPolicy is {template.restart_policy}")
                )
