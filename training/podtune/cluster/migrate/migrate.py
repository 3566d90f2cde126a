"""A PyTorchJob as a TrainJob of Kubeflow Trainer 2.2 and later with its runtime, or as an Indexed Job.

The pod template moves whole: into a TrainingRuntime of the job's own, or into the Job. What the training
operator injects is written into it, so that every rank sees the same variables.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from podtune.cluster.job import pytorchjob, trainjob
from podtune.cluster.job.indexed_job import INDEX
from podtune.cluster.job.manifest import Json, as_env, dig
from podtune.cluster.job.pytorchjob import CONTAINER
from podtune.run.errors import DataError

To = Literal["trainjob", "job"]
#: what kubectl get -o yaml shows besides what was written
OF_THE_SERVER = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink")
APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
UNLIMITED = 2**31 - 1  # the operator's backoffLimit where none is set; a Job's would be 6
RANK_FIELD: Json = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
NEVER_RETRIED = list(range(1, 128))  # restartPolicy ExitCode of the operator
MAX_NAME = {"trainjob": trainjob.MAX_NAME, "job": 63}
ONE_SHAPE = "its pods are of one shape"


@dataclass
class Migration:
    """The manifests that take the job's place, and what has no equal in them."""

    documents: list[Json] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def migrate(job: Json, to: To) -> Migration:
    """Rewrite one PyTorchJob.

    Raises:
        DataError: it has no pods, or its name is too long for the other kind.
    """
    name = str(job["metadata"].get("name") or "")
    pods = pytorchjob.pods({**job, "metadata": {**job["metadata"], "name": name}})
    longest = f"{name}-{len(pods) - 1}" if to == "job" else name
    if not name or len(longest) > MAX_NAME[to]:
        what = f"the name {name!r} has {len(name)} characters" if name else "the job has no name"
        fix = f"a name of at most {MAX_NAME[to] - (len(longest) - len(name))} characters"
        raise DataError(what, where="metadata.name", fix=fix)
    result = Migration()
    template = _template(job, to, len(pods), result)
    job_spec: Json = {**_retries(job, template, result), "template": template}
    policy = _run_policy(job, result)
    metadata = _metadata(job["metadata"])
    if to == "job":
        counts = {"completionMode": "Indexed", "completions": len(pods), "parallelism": len(pods)}
        job_spec = {**policy, **counts, **job_spec}
        service = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the ranks meet before they are ready
            "selector": {"batch.kubernetes.io/job-name": name},
        }
        result.documents = [
            {"apiVersion": "v1", "kind": "Service", "metadata": _name(metadata), "spec": service},
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job_spec},
        ]
    else:
        result.documents = _trainjob(job, metadata, policy, job_spec, len(pods))
    return result


def _trainjob(job: Json, metadata: Json, policy: Json, job_spec: Json, nodes: int) -> list[Json]:
    """Build the TrainingRuntime with the pod template, and the TrainJob with what people change."""
    pod = job_spec["template"]["spec"]
    main = next(each for each in pod["containers"] if each["name"] == trainjob.NODE)
    trainer: Json = {"numNodes": nodes}
    processes = str(job["spec"].get("nprocPerNode") or "")
    if processes.isdigit():
        trainer["numProcPerNode"] = int(processes)
    for ours, theirs in trainjob.HANDED_ON.items():
        if theirs in main:
            trainer[ours] = main[theirs]
    trainer["env"] = main.pop("env")
    # without it Trainer drops image, command and numNodes of spec.trainer
    labels = {trainjob.ANCESTOR: "trainer"}
    step = {"name": trainjob.NODE, "template": {"metadata": {"labels": labels}, "spec": job_spec}}
    jobset: Json = {"replicatedJobs": [step]}
    for key, place in (("ttlSecondsAfterFinished", jobset), ("activeDeadlineSeconds", job_spec)):
        place.update({key: policy.pop(key)} if key in policy else {})
    version = "trainer.kubeflow.org/v1alpha1"
    spec = {"mlPolicy": {"numNodes": nodes, "torch": {}}, "template": {"spec": jobset}}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": metadata["name"]}
    return [
        {"apiVersion": version, "kind": "TrainingRuntime", "metadata": _name(metadata), "spec": spec},
        {
            "apiVersion": version,
            "kind": "TrainJob",
            "metadata": metadata,
            "spec": {**policy, "runtimeRef": reference, "trainer": trainer},
        },
    ]


def _name(metadata: Json) -> dict[str, str]:
    return {key: metadata[key] for key in ("name", "namespace") if key in metadata}


def _metadata(metadata: Json) -> dict[str, object]:
    kept = {key: value for key, value in copy.deepcopy(metadata).items() if key not in OF_THE_SERVER}
    (kept.get("annotations") or {}).pop(APPLIED, None)
    return {key: value for key, value in kept.items() if value not in ({}, None)}


def _template(job: Json, to: To, nodes: int, result: Migration) -> Json:
    """The pod template of all pods, with the variables that the operator injects."""
    specs = pytorchjob.replica_specs(job)
    role = next(iter(specs))
    templates = {each: copy.deepcopy(dig(replica, "template")) for each, replica in specs.items()}
    template = templates[role]
    for other in templates.values():
        for path in differing(template, other):
            result.lost.append(f"Master and Worker differ at {path}: {ONE_SHAPE}, and the Master's is taken")
    pod = template.setdefault("spec", {})
    name = job["metadata"]["name"]
    if pytorchjob.LABEL in str(template):
        result.lost.append(f"a selector by {pytorchjob.LABEL}...: the new pods do not have these labels")
    overridden = set(pytorchjob.injected_environment(pytorchjob.with_defaults(job), role, 0))
    for container in pod["containers"]:
        rest = [entry for entry in container.get("env") or [] if entry.get("name") not in overridden]
        main = container["name"] == CONTAINER
        container["env"] = [*rest, *_rendezvous(job, to, nodes, pet=to == "job" or not main)]
        if main and to == "trainjob":
            container["name"] = trainjob.NODE
    if to == "job":
        pod["subdomain"] = name
    if dig(job, "spec").get("elasticPolicy") is not None:
        result.lost.append(f"elasticPolicy: the number of pods is fixed, {nodes}")
    return template


def _rendezvous(job: Json, to: To, nodes: int, *, pet: bool) -> list[Json]:
    """The operator's variables: ranks by the pod's index, the address of pod 0.

    Without ``pet`` none of PET_*, which Trainer sets itself in the container that trains, and refuses.
    """
    name, spec = job["metadata"]["name"], job["spec"]
    job = pytorchjob.with_defaults(job)
    role = next(iter(pytorchjob.replica_specs(job)))
    values = {"PYTHONUNBUFFERED": "1"}
    if pet:
        values |= {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": str(spec.get("nprocPerNode") or "auto")}
    if role != "Master" and spec.get("elasticPolicy") is None:
        return as_env(values)  # the operator gives Workers alone no rendezvous
    host = f"{name}-0.{name}" if to == "job" else f"{name}-{trainjob.NODE}-0-0.{name}"
    port = str(pytorchjob.port_of(job, role) if to == "job" else trainjob.PORT)
    values |= {"MASTER_ADDR": host, "MASTER_PORT": port}
    values["WORLD_SIZE"] = str(nodes * pytorchjob.processes_per_node(spec))
    values |= {"PET_MASTER_ADDR": host, "PET_MASTER_PORT": port} if pet else {}
    ranks = ["RANK", "PET_NODE_RANK"] if pet else ["RANK"]
    # a copy each: one mapping in two places is an alias in YAML
    return [*({"name": rank, "valueFrom": copy.deepcopy(RANK_FIELD)} for rank in ranks), *as_env(values)]


def _retries(job: Json, template: Json, result: Migration) -> dict[str, object]:
    """The fields of a Job for restartPolicy and backoffLimit: when pods are started again."""
    replicas = pytorchjob.replica_specs(pytorchjob.with_defaults(job))
    policies = {role: replica["restartPolicy"] for role, replica in replicas.items()}
    policy = next(iter(policies.values()))
    if len(set(policies.values())) > 1:
        result.lost.append(f"restartPolicy differs ({policies}): {ONE_SHAPE}, and {policy} is taken")
    if policy == "Always":
        result.lost.append("restartPolicy Always: a Job has OnFailure or Never, and OnFailure is taken")
    # a Job has no ExitCode: its podFailurePolicy, which wants Never, decides by the code
    template["spec"]["restartPolicy"] = "Never" if policy in ("Never", "ExitCode") else "OnFailure"
    limit = dig(job, "spec", "runPolicy").get("backoffLimit")
    limit = UNLIMITED if limit is None else limit
    spec: dict[str, object] = {"backoffLimit": 0 if policy == "Never" else limit}
    if policy == "ExitCode":
        codes = {"operator": "In", "values": NEVER_RETRIED}
        spec["podFailurePolicy"] = {"rules": [{"action": "FailJob", "onExitCodes": codes}]}
    return spec


def _run_policy(job: Json, result: Migration) -> dict[str, object]:
    """The rest of runPolicy, as far as the other kinds have it."""
    kept: dict[str, object] = {}
    for key, value in dig(job, "spec", "runPolicy").items():
        if key in ("suspend", "activeDeadlineSeconds", "ttlSecondsAfterFinished"):
            kept |= {key: value} if value is not None else {}
        # what ended stays with its logs in all kinds, and other values of managedBy are Kueue's
        elif key not in ("backoffLimit", "cleanPodPolicy") and value != "kubeflow.org/training-operator":
            result.lost.append(f"runPolicy.{key} ({value}): the other kinds have no such field")
    return kept


def differing(one: Json, other: Json) -> list[str]:
    """The places at which two mappings differ, the deepest that have a name."""
    ours, theirs = dict(_leaves(one, "")), dict(_leaves(other, ""))
    return [place for place in sorted({*ours, *theirs}) if ours.get(place) != theirs.get(place)]


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield every scalar and empty collection with its place: spec.containers[0].image."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _leaves(each, f"{place}.{key}".lstrip("."))
    elif isinstance(value, list) and value:
        for index, each in enumerate(value):
            yield from _leaves(each, f"{place}[{index}]")
    else:
        yield place, value
