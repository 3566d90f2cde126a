"""podtune why on the real thing: causes planted in jobs of each kind, which it mistakes for no others."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.real_cluster import Cluster

from podtune.cluster.live.status import scene_of
from podtune.cluster.migrate.migrate import migrate
from podtune.cluster.why.answer import explain

Json = dict[str, Any]
KINDS: tuple[Any, ...] = ("pytorchjob", "trainjob", "job")

RANK_DIES = """
import torch.distributed as dist, torch
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    raise ValueError("rank 1 has no rows")
dist.all_reduce(torch.ones(1))
"""


@dataclass(frozen=True)
class Planted:
    """What a job of one pod or two has that it should not, and the answer."""

    words: str  # of the sentence
    reasons: set[str]
    container: Json = field(default_factory=dict)
    volume: Json = field(default_factory=dict)
    pods: int = 1


def program(*command: str) -> Json:
    return {"command": list(command)}


SECRET = {"name": "T", "valueFrom": {"secretKeyRef": {"name": "gone", "key": "t"}}}
ROOM = {"resources": {"requests": {"cpu": "900"}}}
LITTLE = {"resources": {"limits": {"memory": "64Mi"}}}
CAUSES = {
    "image": Planted("nowhere:1", {"ImagePullBackOff", "ErrImagePull"}, {"image": "localhost/nowhere:1"}),
    "room": Planted("Insufficient cpu", {"Unschedulable"}, ROOM),
    "claim": Planted(
        '"gone" not found', {"Unschedulable"}, volume={"persistentVolumeClaim": {"claimName": "gone"}}
    ),
    "file": Planted('configmap "gone" not found', {"FailedMount"}, volume={"configMap": {"name": "gone"}}),
    "secret": Planted('secret "gone" not found', {"CreateContainerConfigError"}, {"env": [SECRET]}),
    "memory": Planted(
        "more memory than its limit", {"OOMKilled"}, program("python", "-c", "b'x' * 2**30") | LITTLE
    ),
    "package": Planted("nowhere", {"PackageMissing"}, program("python", "-c", "import nowhere")),
    "program": Planted("torchrn", {"StartError"}, program("torchrn")),
    "users": Planted("learning_rat", {"Error"}, program("podtune", "train", "--learning_rat", "1")),
    "rank": Planted("rank 1 has no rows", {"Exception"}, program("python", "-c", RANK_DIES), pods=2),
}


def job(cluster: Cluster, name: str, planted: Planted) -> Json:
    main = {"name": "pytorch", "image": cluster.image, "command": ["sleep", "900"], **planted.container}
    spec = {"containers": [main], "terminationGracePeriodSeconds": 1}
    if planted.volume:
        spec["volumes"] = [{"name": "v", **planted.volume}]
        main["volumeMounts"] = [{"name": "v", "mountPath": "/v"}]
    replica = {"replicas": 1, "restartPolicy": "Never", "template": {"spec": spec}}
    replicas = {"Master": replica} | ({"Worker": replica} if planted.pods > 1 else {})
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "nprocPerNode": "1",
            "runPolicy": {"cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": replicas,
        },
    }


@pytest.fixture(scope="module")
def planted(cluster: Cluster) -> list[str]:
    """Every cause in a job of each kind, all at once."""
    cluster.need_trainer()
    for cause, one_cause in CAUSES.items():
        for kind in KINDS:
            one = job(cluster, f"{cause}-{kind}", one_cause)
            for document in [one] if kind == "pytorchjob" else migrate(one, kind).documents:
                cluster.client.put(document)
    return list(CAUSES)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cause", CAUSES)
def test_the_planted_cause_is_named_and_no_other(
    cluster: Cluster, planted: list[str], cause: str, kind: str
) -> None:
    end = time.monotonic() + 300
    while True:
        answer = explain(scene_of(cluster.client, f"{cause}-{kind}"))
        found = answer.certain and answer.cause
        if found:
            assert found.reason in CAUSES[cause].reasons, answer
            assert CAUSES[cause].words in answer.sentence
            return
        assert time.monotonic() < end, answer
        time.sleep(1)  # nothing can be waited on: events and conditions come when they come
