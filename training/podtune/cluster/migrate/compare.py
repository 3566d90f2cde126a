"""The pods of a PyTorchJob beside those of what it became, rank by rank, by the contracts of cluster/job."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from podtune.cluster.job.manifest import Json, Pod, dig
from podtune.cluster.job.pods import one_job, pods_of
from podtune.cluster.job.pytorchjob import CONTAINER, INIT_CONTAINER, INJECTED
from podtune.cluster.job.trainjob import NODE
from podtune.cluster.migrate.migrate import RANK_FIELD, differing

#: variables whose value is the address of the first pod, which has another name and port in each kind
ADDRESSES = {"MASTER_ADDR", "MASTER_PORT", "PET_MASTER_ADDR", "PET_MASTER_PORT"}


@dataclass(frozen=True)
class RankComparison:
    """One rank's pod before and after; ``differences`` are places and variables."""

    before: str
    after: str
    variables: int  # that are equal
    differences: list[str]


def compare(job: Json, documents: list[Json]) -> list[RankComparison]:
    """Hold each pod of the PyTorchJob ``job`` against that of the same rank in ``documents``."""
    before, after = pods_of(job, []), pods_of(one_job(documents), documents)
    # an elastic rendezvous has no equal at all, which is said of elasticPolicy
    elastic = dig(job, "spec").get("elasticPolicy") is not None
    without = {"JOB_COMPLETION_INDEX", *(INJECTED if elastic else ())}
    return [_compared(*pair, without) for pair in zip(before, after, strict=True)]


def differences(ranks: list[RankComparison]) -> list[str]:
    """Each difference once, with the pods that it holds for."""
    pods: dict[str, list[str]] = {}
    for rank in ranks:
        for text in rank.differences:
            pods.setdefault(text, []).append(rank.after)
    return [
        f"{'all pods' if len(names) == len(ranks) else ', '.join(names)}: {text}"
        for text, names in pods.items()
    ]


def _compared(before: Pod, after: Pod, without: set[str]) -> RankComparison:
    found, equal = differing(_bare(before), _bare(after)), 0
    for container, same in zip(before.spec["containers"], after.spec["containers"], strict=False):
        ours, theirs = _variables(before, container), _variables(after, same)
        for name in sorted({*ours, *theirs} - without):
            if ours.get(name) == theirs.get(name) or (name in ADDRESSES and name in theirs):
                equal += 1
            else:
                says = f"{ours.get(name, 'unset')} before, {theirs.get(name, 'unset')} after"
                says += "; give nprocPerNode a number" if name == "PET_NPROC_PER_NODE" else ""
                found.append(f"{name} of {container['name']}: {says}")
    return RankComparison(before.name, after.name, equal, found)


def _bare(pod: Pod) -> dict[str, object]:
    """The pod's spec without the containers' variables, and without what each controller adds."""
    spec = copy.deepcopy(pod.spec)
    for key in ("restartPolicy", "subdomain"):
        spec.pop(key, None)
    for container in spec["containers"]:
        container["name"] = CONTAINER if container["name"] == NODE else container["name"]
        ports = [port for port in container.get("ports") or [] if port.get("name") != "pytorchjob-port"]
        container |= {"env": [], "ports": ports}
    init = [each for each in spec.get("initContainers") or [] if each["name"] != INIT_CONTAINER]
    for container in init:
        env = container.get("env") or []
        container["env"] = [entry for entry in env if entry["name"] != "JOB_COMPLETION_INDEX"]
    return spec | {"initContainers": init}


def _variables(pod: Pod, container: Json) -> dict[str, str]:
    """The variables that the container's process sees; those from elsewhere as where they come from."""
    values = pod.environment(container)
    for entry in container.get("env") or []:
        if "valueFrom" in entry:
            rank = entry["valueFrom"] == RANK_FIELD
            values[entry["name"]] = str(pod.index if rank else entry["valueFrom"])
    return values
