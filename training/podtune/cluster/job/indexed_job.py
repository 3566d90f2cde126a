"""Kubernetes' contract of an Indexed Job, the kind that needs no operator: its pods, and codes that end it.

The rendezvous is the manifest's own: ``PET_*`` variables, and a headless Service by which ``NAME-0.NAME``
resolves.
"""

from __future__ import annotations

import copy

from podtune.cluster.job.manifest import EXIT_CODES, Json, Pod, as_env, dig

LABEL = "batch.kubernetes.io/"
INDEX = f"{LABEL}job-completion-index"  # label and annotation of a pod
RETRIES = 6  # backoffLimit, where it is not set


def is_indexed(document: Json) -> bool:
    """True for a Job whose pods have an index."""
    return document.get("kind") == "Job" and dig(document, "spec").get("completionMode") == "Indexed"


def pods(job: Json) -> list[Pod]:
    """The pods of an Indexed Job by their index; their names lack the suffix that Kubernetes appends."""
    return [_pod(job, index) for index in range(int(job["spec"].get("completions") or 1))]


def _pod(job: Json, index: int) -> Pod:
    template, name = dig(job, "spec", "template"), job["metadata"]["name"]
    spec = copy.deepcopy(dig(template, "spec"))
    for container in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]:
        container["env"] = [*(container.get("env") or []), *as_env({"JOB_COMPLETION_INDEX": str(index)})]
    by_code = dig(job, "spec").get("podFailurePolicy")
    return Pod(
        name=f"{name}-{index}",
        replica_type="index",
        index=index,
        labels={**dig(template, "metadata", "labels"), f"{LABEL}job-name": name, INDEX: str(index)},
        annotations={**dig(template, "metadata", "annotations"), INDEX: str(index)},
        spec=spec,
        # a podFailurePolicy decides by the exit code, as the operator's ExitCode does
        restart_policy="ExitCode" if by_code else spec.get("restartPolicy") or "Never",
        final=final_codes(job["spec"]),
    )


def final_codes(spec: Json) -> frozenset[int]:
    """The exit codes of a container after which the Job fails at once."""
    if spec.get("backoffLimit", RETRIES) == 0:
        return EXIT_CODES
    final, left = frozenset[int](), EXIT_CODES
    for rule in dig(spec, "podFailurePolicy").get("rules") or []:  # the first that fits decides
        codes = dig(rule, "onExitCodes")
        values = frozenset(codes.get("values") or [])
        fits = left & values if codes.get("operator") == "In" else left - values if codes else frozenset()
        final |= fits if rule.get("action") == "FailJob" else frozenset()
        left -= fits
    return final
