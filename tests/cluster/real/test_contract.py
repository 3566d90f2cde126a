"""The real operator's pods carry exactly the environment, names, labels and init containers that contract.py
computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from podtune.cluster.job.pytorchjob import pods

Json = dict[str, Any]


def job(
    name: str, workers: int, *, master: bool = True, containers: list[Json] | None = None, **spec: Any
) -> Json:
    container = {
        "name": "pytorch",
        "image": "localhost/kc-pause:1",
        "command": ["/pause"],
        "env": [{"name": "MINE", "value": "1"}],
    }
    template = {"metadata": {"labels": {"team": "a"}}, "spec": {"containers": containers or [container]}}
    specs = {"Worker": {"replicas": workers, "template": template}} if workers else {}
    if master:
        specs["Master"] = {"replicas": 1, "restartPolicy": "ExitCode", "template": template}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {**spec, "pytorchReplicaSpecs": specs},
    }


def two_containers(port: int) -> list[Json]:
    main = {
        "name": "pytorch",
        "image": "localhost/kc-pause:1",
        "ports": [{"name": "pytorchjob-port", "containerPort": port}],
    }
    return [{"name": "logs", "image": "localhost/kc-pause:1"}, main]


JOBS = {
    "one node": lambda: job("one", 0, nprocPerNode="1"),
    "two nodes, processes unset": lambda: job("two", 1),
    "two processes a node": lambda: job("nproc", 2, nprocPerNode="2"),
    "gpu": lambda: job("gpu", 1, nprocPerNode="gpu"),
    "cpu": lambda: job("cpu", 1, nprocPerNode="cpu"),
    "another port, two containers": lambda: job(
        "port", 1, nprocPerNode="1", containers=two_containers(23999)
    ),
    "no master": lambda: job("workers", 2, master=False, nprocPerNode="1"),
    "elastic": lambda: job(
        "elastic",
        2,
        master=False,
        nprocPerNode="2",
        elasticPolicy={
            "minReplicas": 1,
            "maxReplicas": 3,
            "maxRestarts": 4,
            "rdzvId": "run",
            "rdzvConf": [{"key": "timeout", "value": "60"}, {"key": "a", "value": "b"}],
        },
    ),
    ("elastic with a master and only a maximum"): lambda: job(
        "maximum", 1, elasticPolicy={"maxReplicas": 2, "rdzvPort": 29400}
    ),
    "elastic, standalone": lambda: job(
        "alone", 1, master=False, elasticPolicy={"standalone": True, "nProcPerNode": 2}
    ),
}


@pytest.mark.parametrize("make", JOBS.values(), ids=JOBS.keys())
def test_the_operator_makes_the_pods_that_the_contract_says(
    make: Callable[[], Json], api: Any, namespace: str
) -> None:
    manifest = make()
    name = manifest["metadata"]["name"]
    jobs = api.CustomObjectsApi()
    jobs.create_namespaced_custom_object("kubeflow.org", "v1", namespace, "pytorchjobs", manifest)
    try:
        expected = {pod.name: pod for pod in pods(manifest)}
        selector = f"training.kubeflow.org/job-name={name}"
        listed = await_names(
            lambda: api.CoreV1Api().list_namespaced_pod(namespace, label_selector=selector).items,
            set(expected),
        )
        for pod in listed:
            ours = expected[pod.metadata.name]
            assert pod.metadata.labels == dict(ours.labels)
            assert pod.spec.restart_policy == ours.spec["restartPolicy"]
            for container, mine in zip(pod.spec.containers, ours.spec["containers"], strict=True):
                assert {entry.name: entry.value or "" for entry in container.env} == ours.environment(mine)
                assert [port.container_port for port in container.ports or []] == [
                    port["containerPort"] for port in mine.get("ports", [])
                ]
            init = [(one.name, one.command) for one in pod.spec.init_containers or []]
            assert init == [(one["name"], one["command"]) for one in ours.spec.get("initContainers", [])]
    finally:
        jobs.delete_namespaced_custom_object("kubeflow.org", "v1", namespace, "pytorchjobs", name)


def await_names(listed: Callable[[], list[Any]], names: set[str]) -> list[Any]:
    deadline = time.monotonic() + 20
    while True:
        items = listed()
        found = {item.metadata.name for item in items}
        if found == names:
            return items
        assert time.monotonic() < deadline, (
            f"the operator made {sorted(found)}, the contract says {sorted(names)}"
        )
        time.sleep(0.1)  # between two questions to the API server
