"""The same values by each kind of job: PyTorchJob, TrainJob and Indexed Job train, resume and fail alike."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from cluster.real.test_client import podtune
from support.real_cluster import LONG, Cluster, config

from podtune.cluster.chart.render import CHART
from podtune.cluster.live.status import status_of

APIS = ("pytorchjob", "trainjob", "job")
SHORT = config(max_steps=6, eval_strategy="no", save_steps=6, logging_steps=1)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def runtime(cluster: Cluster) -> Iterator[str]:
    """The runtime of deploy/training-runtime.yaml."""
    cluster.need_trainer()
    made = yaml.safe_load((CHART.parents[1] / "deploy" / "training-runtime.yaml").read_text())
    kind = ("trainer.kubeflow.org", "v1alpha1", "clustertrainingruntimes")
    cluster.custom.create_cluster_custom_object(*kind, made)
    yield made["metadata"]["name"]
    cluster.custom.delete_cluster_custom_object(*kind, made["metadata"]["name"])


@pytest.mark.parametrize("pods", [1, 2])
def test_the_same_values_train_to_the_same_losses(cluster: Cluster, pods: int) -> None:
    cluster.need_trainer()
    losses = {}
    for api in APIS:
        name = f"{api}-{pods}"
        cluster.install(name, api=api, distributed={"nodes": pods}, config=SHORT)
        cluster.ended(name)
        record = cluster.read(f"{name}/run.json")
        assert (record["status"], record["world_size"], record["nnodes"]) == ("ok", pods, pods)
        losses[api] = cluster.losses(name)
    assert len(losses["pytorchjob"]) == 6
    assert losses["trainjob"] == losses["job"] == losses["pytorchjob"]


@pytest.mark.parametrize("kind", ["trainjob", "job"])
def test_a_pod_that_is_deleted_is_made_again_and_the_run_resumes(cluster: Cluster, kind: str) -> None:
    cluster.need_trainer()
    name = f"lost-{kind}"
    cluster.install(name, api=kind, distributed={"nodes": 2, "strategy": "ddp"}, config=config(**LONG))
    cluster.started(name)
    before = names(cluster, name)
    cluster.core.delete_namespaced_pod(before[1], cluster.namespace)
    cluster.ended(name, seconds=400)
    assert names(cluster, name)[1] != before[1]
    record = cluster.read(f"{name}/run.json")
    assert (record["status"], len(record["attempts"])) == ("ok", 2)
    assert record["attempts"][-1]["from_step"] > 0, "it came back to a checkpoint"


def names(cluster: Cluster, name: str) -> list[str]:
    return [pod["metadata"]["name"] for pod in cluster.client.pods(cluster.job(name))]


@pytest.mark.parametrize("kind", ["trainjob", "job"])
def test_a_users_error_is_final(cluster: Cluster, kind: str, request: Any) -> None:
    values = {"trainingRuntime": request.getfixturevalue("runtime")} if kind == "trainjob" else {}
    name = f"wrong-{kind}"
    wrong = "model_name_or_path: /models/podtune-tiny\ndataset_name: /data/qa\nlearning_rat: 1\n"
    cluster.install(name, api=kind, config=wrong, **values)
    cluster.ended(name, "Failed", seconds=120)
    status = status_of(cluster.client, cluster.job(name))
    assert (status.condition, [pod.restarts for pod in status.pods]) == ("Failed", [0])
    assert "exit code 78: " in status.problems[0].text
    assert "learning_rate" in status.problems[0].text


def test_a_trainjob_shows_its_progress_while_it_trains(cluster: Cluster) -> None:
    """In its status, which ``podtune status`` reads and ``podtune logs --follow`` (and watch) follows."""
    cluster.need_trainer()
    # 40 s on a quiet node: a controller is told every ten
    cluster.install("progress", api="trainjob", config=config(**LONG | {"max_steps": 600}))
    (pod,) = cluster.until("its pod", lambda: cluster.client.pods(cluster.job("progress")))
    given = {variable["name"] for variable in pod["spec"]["containers"][0]["env"]}
    if "KUBEFLOW_TRAINER_SERVER_URL" not in given:
        cluster.helm("uninstall", "progress")
        pytest.skip("Kubeflow Trainer runs without its feature gate TrainJobStatus")
    words = [sys.executable, "-m", "podtune.cli", "logs", "progress", "--follow", "-n", cluster.namespace]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as following:

        def shown() -> re.Match[str] | None:
            done = podtune("status", "progress", "-n", cluster.namespace)
            return re.search(r"Running \((\d+) % done, about \w+ left\)", done.stdout)

        assert 0 < int(cluster.until("its progress", shown)[1]) < 100
        told, _ = following.communicate(timeout=400)
    percents = [int(each) for each in re.findall(r"^--- Running: (\d+) % done", told, re.MULTILINE)]
    assert len(set(percents)) > 1, told
    assert percents == sorted(percents)
    assert "--- Succeeded" in told
    reported = cluster.job("progress")["status"]["trainerStatus"]
    assert reported["progressPercentage"] == 100
    assert "loss" in {metric["name"] for metric in reported["metrics"]}
