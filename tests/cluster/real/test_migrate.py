"""podtune migrate on the real thing: five PyTorchJobs, each then run as a TrainJob and as an Indexed Job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.real.test_client import podtune
from support.chart import render
from support.real_cluster import VALUES, Cluster, config

from podtune.cluster.job.manifest import name_of
from podtune.cluster.live.follow import log_of
from podtune.cluster.live.status import status_of
from podtune.cluster.live.submit import installable
from podtune.cluster.why.state import phase

Json = dict[str, Any]

#: what every rank sees, and that it finds the first one, which waits: a PyTorchJob ends with its Master
SEES = (
    "env | grep -E '^(RANK|WORLD_SIZE|PET_NNODES|PET_NPROC_PER_NODE|PET_NODE_RANK|MINE)=' | sort;"
    " until getent hosts $MASTER_ADDR >/dev/null; do sleep 1; done;"
    " if [ $RANK = 0 ]; then sleep 10; fi;"
)
SHARED = [{"name": "shared", "mountPath": "/shared"}]
EMPTY = [{"name": "shared", "emptyDir": {}}]


def job(script: str, policy: str, workers: int = 0, pod: Json | None = None) -> Json:
    main = {"name": "pytorch", "command": ["sh", "-c", script], "volumeMounts": SHARED}
    main["env"] = [{"name": "MINE", "value": "1"}]
    spec = {"containers": [main], "volumes": EMPTY, "terminationGracePeriodSeconds": 1, **(pod or {})}
    replica = {"replicas": 1, "restartPolicy": policy, "template": {"spec": spec}}
    replicas = {"Master": replica} | ({"Worker": {**replica, "replicas": workers}} if workers else {})
    run_policy = {"cleanPodPolicy": "None", "backoffLimit": 3}
    return {"nprocPerNode": "1", "runPolicy": run_policy, "pytorchReplicaSpecs": replicas}


#: name -> the PyTorchJob's spec, how it ends
JOBS: dict[str, tuple[Json, str]] = {
    "three": (job(SEES, "Never", workers=2), "Succeeded"),
    "final": (job(SEES + "exit 3", "ExitCode"), "Failed"),
    "again": (job(SEES + "[ -e /shared/seen ] || { touch /shared/seen; exit 1; }", "OnFailure"), "Succeeded"),
    "init": (
        job(
            SEES + "cat /shared/made",
            "Never",
            workers=1,
            pod={
                "initContainers": [
                    {"name": "make", "command": ["sh", "-c", "echo x > /shared/made"], "volumeMounts": SHARED}
                ]
            },
        ),
        "Succeeded",
    ),
}


def run(cluster: Cluster, documents: list[Json], condition: str) -> tuple[list[int], list[list[str]]]:
    """Run a job to its end, and delete it: restarts and log of each rank."""
    for document in documents:
        cluster.client.put(document)
    name = name_of(documents[-1])
    cluster.ended(name, condition)
    found = cluster.job(name)
    over = ("Succeeded", "Failed")
    cluster.until("all ranks", lambda: all(phase(pod) in over for pod in cluster.client.pods(found)))
    pods = status_of(cluster.client, found).pods
    logs = [log_of(cluster.client, found, pod.name) for pod in pods]
    for document in documents:
        cluster.client.delete(document)
    cluster.until(f"{name} to go", lambda: not cluster.client.pods(found), 60)
    return [pod.restarts for pod in pods], logs


def migrated(path: Path, document: Json, kind: str) -> list[Json]:
    path.write_text(yaml.safe_dump(document))
    done = podtune("migrate", str(path), "--to", kind)
    assert (done.returncode, "no equal" in done.stderr) == (0, False), done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", JOBS)
def test_a_migrated_job_runs_as_it_did(cluster: Cluster, name: str, tmp_path: Path) -> None:
    cluster.need_trainer()
    spec, condition = JOBS[name]
    for replica in spec["pytorchReplicaSpecs"].values():
        pod = replica["template"]["spec"]
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            container["image"] = cluster.image
    document = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": name}}
    document |= {"spec": spec}
    before = run(cluster, [document], condition)
    assert "MINE=1" in before[1][0]
    for kind in ("trainjob", "job"):
        assert run(cluster, migrated(tmp_path / "job.yaml", document, kind), condition) == before, kind


@pytest.mark.timeout(900)
def test_a_migrated_training_trains_to_the_same_losses(cluster: Cluster, tmp_path: Path) -> None:
    """The chart's own job, of two pods."""
    cluster.need_trainer()
    short = config(max_steps=6, eval_strategy="no", save_steps=6, logging_steps=1)
    values = [VALUES / "cpu-smoke.yaml", Path(cluster.values(distributed={"nodes": 2}, config=short))]
    text = render(values, [], "moved", cluster.namespace)
    *parts, document = installable(list(yaml.safe_load_all(text)))
    for part in parts:
        cluster.client.put(part)
    losses = []
    for documents in (
        [document],
        *(migrated(tmp_path / "j.yaml", document, to) for to in ("trainjob", "job")),
    ):
        run(cluster, documents, "Succeeded")
        losses.append(cluster.losses("moved"))
        cluster.run_pod("clear", "rm", "-r", "/output/moved")  # the next would find a run that has ended
    assert len(losses[0]) == 6
    assert losses[0] == losses[1] == losses[2]
