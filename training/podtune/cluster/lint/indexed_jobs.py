"""PT6: Jobs of Kubernetes itself, whose manifest makes the rendezvous that an operator would make."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from podtune.cluster.job.indexed_job import is_indexed
from podtune.cluster.job.manifest import Json
from podtune.cluster.lint import schema as crd
from podtune.cluster.lint.diagnostic import Diagnostic
from podtune.cluster.lint.job import Job
from podtune.cluster.lint.rules import rule
from podtune.cluster.lint.torchrun import trains_alone

ONLY = ("Job",)
#: the fields of batch/v1 (Kubernetes 1.34)
FIELDS = {
    **dict.fromkeys(("activeDeadlineSeconds", "backoffLimit", "backoffLimitPerIndex"), "integer"),
    **dict.fromkeys(("completions", "maxFailedIndexes", "parallelism"), "integer"),
    **dict.fromkeys(("completionMode", "managedBy", "podReplacementPolicy"), "string"),
    **dict.fromkeys(("podFailurePolicy", "selector", "successPolicy"), "object"),
    **dict.fromkeys(("manualSelector", "suspend"), "boolean"),
    "ttlSecondsAfterFinished": "integer",
}


@cache
def schema() -> crd.Schema:
    """The schema of a Job: its own fields, and the pod template of a PyTorchJob's."""
    replicas = crd.schema("pytorchjob-1.9")["properties"]["spec"]["properties"]["pytorchReplicaSpecs"]
    spec: Json = {name: {"type": kind} for name, kind in FIELDS.items()}
    # a pod template is core/v1's in both
    spec["template"] = replicas["additionalProperties"]["properties"]["template"]
    spec["completionMode"] |= {"enum": ["Indexed", "NonIndexed"]}
    of_spec = {"type": "object", "required": ["template"], "properties": spec, "additionalProperties": False}
    return {
        "type": "object",
        "required": ["metadata", "spec"],
        "properties": {"metadata": {"type": "object"}, "spec": of_spec},
    }


@rule("PT601", "error", by="hang", fix="parallelism: as many as completions", kinds=ONLY)
def pods_wait_for_later_ones(job: Job) -> Iterator[Diagnostic]:
    """A rendezvous of all pods never ends where fewer than completions run at a time.

    The others start when one of the first has ended.
    """
    at_once = job.spec.get("parallelism", 1)
    if 0 < at_once < job.pods and not _alone(job):
        message = f"{job.pods} pods have to meet, and {at_once} of them run at a time"
        yield Diagnostic(("spec", "parallelism"), message)


@rule(
    "PT602", "error", by="hang", fix="completionMode: Indexed, and a rank by JOB_COMPLETION_INDEX", kinds=ONLY
)
def pods_without_rank(job: Job) -> Iterator[Diagnostic]:
    """Torchrun hangs in pods that are all alike, as each takes itself for rank 0: of a Job not Indexed.

    With --rdzv-endpoint they agree on their ranks by themselves.
    """
    (template,) = job.templates
    if is_indexed(job.content) or job.pods < 2 or template.main is None or _alone(job):
        return
    agree = "rdzv-endpoint" in template.main.launch.options or "PET_RDZV_ENDPOINT" in template.main.literals
    if template.main.launch.kind == "torchrun" and not agree:
        message = f"completionMode is not Indexed, so nothing tells {job.pods} pods apart"
        yield Diagnostic(("spec", "completionMode"), message)


@rule("PT603", "error", by="hang", fix="subdomain: the name of a headless Service", kinds=ONLY)
def address_without_service(job: Job) -> Iterator[Diagnostic]:
    """A pod of a Job has a name in DNS, JOB-INDEX.SERVICE, only by the subdomain of a headless Service.

    The rendezvous waits for an address that never resolves.
    """
    (template,) = job.templates
    main = template.main
    if main is None:
        return
    options, given = main.launch.options, main.literals
    named = [options.get(name) for name in ("master-addr", "rdzv-endpoint")]
    named += [given.get(name) for name in ("PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "MASTER_ADDR")]
    address = next(filter(None, named), "")
    found = re.match(rf"{re.escape(job.name)}-\d+(?:\.([-a-z0-9]+))?(?=[:.]|$)", address)
    subdomain = template.pod.get("subdomain")
    if found and job.name and (not subdomain or subdomain != found[1]):
        says = f"subdomain is {subdomain}" if subdomain else "the pods have no subdomain"
        fix = "" if found[1] else "JOB-0.SERVICE as the address, and subdomain: SERVICE"
        message = f"the address {found[0]} does not resolve: {says}"
        yield Diagnostic((*template.pod_path, "subdomain"), message, fix=fix)


@rule("PT604", "error", by="api", fix="restartPolicy: Never", kinds=ONLY)
def restart_policy_of_a_job(job: Job) -> Iterator[Diagnostic]:
    """The API server wants a Job's restartPolicy: OnFailure or Never, beside a podFailurePolicy Never."""
    (template,) = job.templates
    policy, by_code = template.pod.get("restartPolicy"), "podFailurePolicy" in job.spec
    if policy not in ("Never", *([] if by_code else ["OnFailure"])):
        says = f"restartPolicy is {policy or 'absent'}" + " beside a podFailurePolicy" * by_code
        yield Diagnostic((*template.pod_path, "restartPolicy"), says)


def _alone(job: Job) -> bool:
    """True if each pod trains by itself, as in a Job of many trainings."""
    main = job.templates[0].main
    if main is None:
        return True
    nodes = main.launch.options.get("nnodes") or main.literals.get("PET_NNODES") or "1"
    return trains_alone(main.launch.options) or nodes in ("1", "1:1")
