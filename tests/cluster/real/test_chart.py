"""The chart on a real cluster with the real operator: what ``helm install`` starts ends as the chart
promises.

    KUBECONFIG=... IMAGE=localhost/podtune:1 make test-cluster

IMAGE is one that the nodes can get. STORAGE_CLASS names a class that offers ReadWriteMany, where the default
does not.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from support.object_store import ObjectStore
from support.real_cluster import LONG, VALUES, VOLUMES, Cluster, config

from podtune.cluster.chart.render import CHART
from podtune.run.collect import collect

pytestmark = pytest.mark.timeout(600)


def test_a_suspended_job_has_volumes_and_no_pods(cluster: Cluster) -> None:
    assert "Suspended" in cluster.conditions("first")
    assert cluster.pods("first") == []


def test_a_claim_that_only_one_node_can_mount_is_refused_before_anything_is_created(cluster: Cluster) -> None:
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}
    cluster.core.create_namespaced_persistent_volume_claim(
        cluster.namespace, {"metadata": {"name": "narrow"}, "spec": claim}
    )
    values = cluster.values(
        distributed={"nodes": 2}, persistence={volume: {"existingClaim": "narrow"} for volume in VOLUMES}
    )
    done = cluster.helm("install", "refused", str(CHART), "--values", values, ok=False)
    assert done.returncode != 0
    assert "the claim narrow is [ReadWriteOnce], but 2 pods share the volume" in done.stderr
    secrets = cluster.core.list_namespaced_secret(
        cluster.namespace, label_selector="owner=helm,name=refused"
    ).items
    assert secrets == [], "helm keeps a release as a Secret"


def test_helm_test_runs_the_preflight(cluster: Cluster) -> None:
    done = cluster.helm("test", "first", "--timeout", "120s")
    assert "Succeeded" in done.stdout


def test_an_upgrade_starts_the_suspended_job_and_it_ends_with_a_model_on_the_volume(cluster: Cluster) -> None:
    cluster.helm("upgrade", "first", str(CHART), "--reuse-values", "--set", "runPolicy.suspend=false")
    cluster.ended("first", seconds=500)
    listing = cluster.run_pod("list", "ls", "/output/first", "/output/first/final").split()
    assert {"run.json", "metrics.jsonl", "checkpoint-60", "model.safetensors", "tokenizer.json"} <= set(
        listing
    )
    record = cluster.read("first/run.json")
    assert (record["status"], record["world_size"], record["name"]) == ("ok", 1, "first")
    assert record["provenance"]["image"] == cluster.image
    assert record["provenance"]["pod"] == "first-master-0"


def test_the_record_can_be_collected_from_the_pods_log(cluster: Cluster, tmp_path: Path) -> None:
    log = tmp_path / "first.log"
    log.write_text(cluster.log("first-master-0"))
    for words in ([str(log)], ["--job", "first", "--namespace", cluster.namespace]):
        command = [
            "podtune",
            "collect",
            *words,
            "--output",
            str(tmp_path / words[0].strip("-/").replace("/", "-")),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + log.read_text()[-2000:]
    first, second = (json.loads(path.read_text()) for path in sorted(tmp_path.rglob("run.json")))
    assert first == second == cluster.read("first/run.json")


def test_two_pods_train_one_model(cluster: Cluster) -> None:
    cluster.install(
        "two",
        distributed={"nodes": 2, "strategy": "ddp"},
        config=config(max_steps=6, eval_strategy="no", save_steps=6),
    )
    cluster.ended("two")
    folder = "/models/huggingface/.podtune-prepared"
    markers = cluster.run_pod(
        "markers",
        "python",
        "-c",
        (f"import pathlib; [print(m.read_text()) for m in pathlib.Path('{folder}').glob('*.json')]"),
    )
    assert markers.count('"making the tiny model') == 1, (
        "made for the first run, found by both pods of the second"
    )
    assert len(re.findall(r'"by": "two-(master|worker)-0"', markers)) == 1, "one of the two pods tokenised"
    record = cluster.read("two/run.json")
    assert (record["status"], record["world_size"], record["nnodes"]) == ("ok", 2, 2)


@pytest.mark.parametrize(
    ("victim", "strategy", "streams"), [("worker", "fsdp", False), ("master", "ddp", True)]
)
def test_a_pod_that_is_taken_away_is_made_again_and_the_run_goes_on(
    cluster: Cluster, victim: str, strategy: str, streams: bool
) -> None:
    """With shards that each pod writes, and with rows that are tokenised while they are trained."""
    name, pod = f"lost-{victim}", f"lost-{victim}-{victim}-0"
    cluster.install(
        name,
        distributed={"nodes": 2, "strategy": strategy},
        config=config(**LONG, dataset_streaming=streams),
    )
    cluster.started(name)
    before = {one.metadata.name: one.metadata.uid for one in cluster.pods(name)}
    if victim == "worker":  # as a node's drain does
        cluster.core.create_namespaced_pod_eviction(pod, cluster.namespace, {"metadata": {"name": pod}})
    else:
        cluster.core.delete_namespaced_pod(pod, cluster.namespace)
    cluster.ended(name, seconds=400)
    after = {one.metadata.name: one.metadata.uid for one in cluster.pods(name)}
    assert after[pod] != before[pod]
    record = cluster.read(f"{name}/run.json")
    assert record["status"] == "ok"
    assert len(record["attempts"]) >= 2
    assert record["attempts"][-1]["from_step"] > 0, "it came back to a checkpoint"
    assert ("rows" in record["data"]) is not streams
    assert "waits for its saves" not in cluster.log(f"{name}-master-0")
    saves = record["measurements"]["saves"]
    assert saves["stall_s"] < saves["write_s"]


def test_a_release_installed_again_goes_on_from_the_checkpoint_that_its_end_saved(cluster: Cluster) -> None:
    cluster.install("again", config=config(**LONG))
    cluster.started("again")
    cluster.helm("uninstall", "again")
    cluster.until("its pod to save and go", lambda: not cluster.pods("again"), 120)
    left = cluster.read("again/run.json")
    assert left["status"] == "preempted"
    cluster.install("again", config=config(**LONG))
    cluster.ended("again")
    record = cluster.read("again/run.json")
    assert (record["status"], len(record["attempts"])) == ("ok", 2)
    assert record["attempts"][1]["from_step"] == left["measurements"]["steps"] > 0


def test_elastic_workers_meet_without_a_master_and_train(cluster: Cluster) -> None:
    elastic = {"nodes": 2, "elastic": {"minNodes": 1, "maxNodes": 2}}
    cluster.install(
        "elastic", distributed=elastic, config=config(max_steps=6, eval_strategy="no", save_steps=6)
    )
    cluster.ended("elastic")
    assert cluster.read("elastic/run.json")["status"] == "ok"


def test_a_users_error_fails_the_job_at_once_with_its_code(cluster: Cluster) -> None:
    cluster.install(
        "wrong",
        config=("model_name_or_path: /models/podtune-tiny\ndataset_name: /data/qa\nlearning_rat: 1\n"),
    )
    cluster.ended("wrong", "Failed", seconds=120)
    (pod,) = cluster.pods("wrong")
    (status,) = pod.status.container_statuses
    assert status.state.terminated.exit_code == 78
    assert "learning_rate" in status.state.terminated.message


def test_the_aim_page_comes_with_an_upgrade_and_answers(cluster: Cluster) -> None:
    on_a_volume_that_it_may_write = "persistence.aim.existingClaim=first-data"
    cluster.helm(
        "upgrade",
        "first",
        str(CHART),
        "--reuse-values",
        "--set",
        "aim.enabled=true",
        "--set",
        on_a_volume_that_it_may_write,
    )

    def pod() -> Any:
        found = cluster.core.list_namespaced_pod(
            cluster.namespace, label_selector="app.kubernetes.io/component=aim"
        ).items
        states = {state.name: state for state in (found[0].status.container_statuses or [])} if found else {}
        ready = states and all(state.ready and not state.restart_count for state in states.values())
        return (
            found[0].metadata.name
            if ready and "-> Aim run" in cluster.log(found[0].metadata.name, "sync")
            else ""
        )

    name = cluster.until("the Aim page to answer its probe and the run to be in it", pod, 240)
    assert "error" not in cluster.log(name, "sync").lower()


def gpus(cluster: Cluster) -> int:
    return sum(
        int(node.status.allocatable.get("nvidia.com/gpu", 0)) for node in cluster.core.list_node().items
    )


def install_on_gpus(cluster: Cluster, profile: str, **changed: Any) -> None:
    small = {
        "requests": {"cpu": "100m", "memory": "64Mi"},
        "limits": {"cpu": "1", "memory": "6Gi", "nvidia.com/gpu": 1},
    }
    overrides = cluster.values(resources=small, **changed)
    cluster.helm(
        "install", profile, str(CHART), "--values", str(VALUES / f"{profile}.yaml"), "--values", overrides
    )


@pytest.mark.parametrize(("profile", "pods"), [("single-gpu", 1), ("two-node", 2)])
def test_profiles_for_gpus_are_scheduled_and_the_preflight_finds_no_gpu_in_time(
    cluster: Cluster, profile: str, pods: int
) -> None:
    """On a node that claims GPUs and has none. Nothing is prepared: the real model would be downloaded."""
    if gpus(cluster) < pods:
        pytest.skip(f"no node claims {pods} nvidia.com/gpu")
    if any("nvidia.com/gpu.product" in node.metadata.labels for node in cluster.core.list_node().items):
        pytest.skip("the nodes have real GPUs: the profile would train")
    install_on_gpus(
        cluster, profile, nodeSelector={"nvidia.com/gpu.product": None}, prepare={"enabled": False}
    )
    cluster.ended(profile, "Failed", seconds=90)
    ends = [
        status.state.terminated
        for pod in cluster.pods(profile)
        for status in pod.status.container_statuses or []
    ]
    assert any(
        end and end.exit_code == 69 and "GPU asked for and none there" in end.message for end in ends
    ), cluster.story()
    cluster.helm("uninstall", profile)


def test_profiles_for_gpus_get_their_volumes_and_say_what_is_missing(cluster: Cluster) -> None:
    if gpus(cluster):
        pytest.skip("the nodes have GPUs, or say so")
    for profile, pods in (("single-gpu", 1), ("two-node", 2)):
        install_on_gpus(cluster, profile)
        cluster.until(
            f"pods of {profile}", lambda profile=profile, pods=pods: len(cluster.pods(profile)) == pods, 60
        )

        def reason(profile: str = profile) -> str:
            found = [
                condition.message or ""
                for pod in cluster.pods(profile)
                for condition in pod.status.conditions or []
            ]
            return " ".join(found)

        cluster.until("the scheduler's reason", lambda reason=reason: "node" in reason(), 60)
        assert "unbound" not in reason()
        cluster.helm("uninstall", profile)


def test_a_sweep_makes_its_jobs_and_compares_them(cluster: Cluster, tmp_path: Path) -> None:
    sweep, output = tmp_path / "rates.yaml", tmp_path / "out"
    sweep.write_text("learning_rate: [1.0e-3, 3.0e-3]\noptions: {seed: 1}\n")
    values = cluster.values(config=config(max_steps=6, eval_steps=6, save_steps=6, logging_steps=1))
    words = ["-f", str(VALUES / "cpu-smoke.yaml"), "-f", values, "--at-once", "2", "-n", cluster.namespace]
    command = ["podtune", "sweep", str(sweep), "--output", str(output), *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr + cluster.story()
    states = json.loads(done.stdout)["runs"]
    assert list(states.values()) == ["ok", "ok"]
    for name, rate in zip(states, (1e-3, 3e-3), strict=True):
        record = json.loads((output / name / "run.json").read_text())
        assert (record["config"]["learning_rate"], record["config"]["seed"]) == (rate, 1)
        assert record == cluster.read(f"{record['name']}/run.json")
    assert (output / "compare.html").stat().st_size > 10_000


def test_each_case_of_the_benchmark_is_a_job_and_the_report_follows(cluster: Cluster, tmp_path: Path) -> None:
    """Six cases: each job is gone afterwards, its record and the report are here."""
    sweep, output = tmp_path / "cases.yaml", tmp_path / "out"
    sweep.write_text(
        "models: [tinygpt-test]\nstrategies: [ddp, fsdp, tensor]\nworld_sizes: [1, 2]\n"
        "options: {steps: 3, warmup: 1, repeats: 2, cpu: true, global_batch_size: 4}\n"
    )
    values = cluster.values(distributed={"nodes": 2})
    words = ["-f", str(VALUES / "cpu-smoke.yaml"), "-f", values, "-n", cluster.namespace]
    command = ["podtune", "bench", "run", "--sweep", str(sweep), "--output", str(output), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr + cluster.story()
    records = [json.loads(file.read_text()) for file in output.glob("cells/*/run.json")]
    assert {record["strategy"] for record in records if record["nnodes"] == 2} == {"ddp", "fsdp", "tensor"}
    assert len(records) == 6
    losses = [record["measurements"]["loss"]["last"] for record in records]
    assert max(losses) - min(losses) < 1e-4, "all strategies compute the same"
    assert (output / "report.html").exists()
    jobs = cluster.custom.list_namespaced_custom_object(
        "kubeflow.org", "v1", cluster.namespace, "pytorchjobs"
    )
    assert not [job for job in jobs["items"] if "tinygpt" in job["metadata"]["name"]]


@pytest.fixture
def store(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """An S3 server at this machine's address in the cluster's network."""
    host = urlsplit(cluster.core.api_client.configuration.host).hostname or ""
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "")  # set by the server, and as it was afterwards
    try:
        found = ObjectStore(host)
    except OSError:
        pytest.skip(
            f"{host}, the API server's address, is not this machine's: pods could not reach a server here"
        )
    yield found
    found.close()


def test_pods_with_volumes_of_their_own_train_from_a_bucket_and_go_on_from_it(
    cluster: Cluster, store: ObjectStore, micro_model: Path, qa_data: Path
) -> None:
    """Where no volume can be shared, and when all of them are gone."""
    bucket = store.bucket("team")
    client = boto3.client("s3")
    client.upload_file(qa_data / "train.parquet", "team", "rows/train.parquet")
    for file in micro_model.iterdir():
        client.upload_file(file, "team", f"model/{file.name}")
    secret = {"metadata": {"name": "store"}, "stringData": store.environment}
    cluster.core.create_namespaced_secret(cluster.namespace, secret)
    port = int(store.environment["AWS_ENDPOINT_URL"].rpartition(":")[2])
    values = {
        "config": config(
            model_name_or_path=f"{bucket}/model",
            dataset_name=f"{bucket}/rows/train.parquet",
            publish=f"{bucket}/runs",
            eval_strategy="no",
            logging_steps=1,
            max_steps=120,
            save_steps=20,
        ),
        "prepare": {"build": ""},
        "distributed": {"nodes": 2, "strategy": "ddp"},
        "envFrom": [{"secretRef": {"name": "store"}}],
        "networkPolicy": {"extraEgress": [{"ports": [{"port": port, "protocol": "TCP"}]}]},
        "persistence": {volume: {"perPod": True, "size": "1Gi"} for volume in VOLUMES},
        # a class that does not honour fsGroup gives its volumes to root, and nobody can change that before
        "podSecurityContext": {"runAsUser": 0, "runAsGroup": 0, "runAsNonRoot": False},
    }
    cluster.install("alone", **values)
    cluster.started("alone", 25)
    cluster.helm("uninstall", "alone")
    cluster.until("its pods to publish and go", lambda: not cluster.pods("alone"), 120)
    cluster.until(
        "their volumes to go with them",
        lambda: not any(claim.startswith("alone-") for claim in cluster.claims()),
        60,
    )
    cluster.install("alone", **values)
    cluster.ended("alone")
    (record,) = collect(cluster.log("alone-master-0").splitlines()).records
    assert (record["status"], record["world_size"], record["measurements"]["steps"]) == ("ok", 2, 120)
    assert [attempt["from_step"] >= 20 for attempt in record["attempts"]] == [False, True]
    published = {entry["Key"] for entry in client.list_objects_v2(Bucket="team", Prefix="runs/")["Contents"]}
    assert {"runs/alone/final/model.safetensors", "runs/alone/run.json"} <= published


def test_the_volumes_outlive_the_release(cluster: Cluster) -> None:
    cluster.helm("uninstall", "first")
    cluster.until("the job to go", lambda: not cluster.pods("first"), 60)
    assert {"first-data", "first-models", "first-output"} <= set(cluster.claims("Bound"))
