"""What the operator makes of a manifest, without a cluster; tests/cluster/real asks the real operator."""

from __future__ import annotations

from typing import Any

import pytest

from podtune.cluster.job import indexed_job, trainjob
from podtune.cluster.job import pytorchjob as contract
from podtune.run.errors import UserError

Json = dict[str, Any]


def job(workers: int = 1, *, master: bool = True, env: list[Json] | None = None, **spec: Any) -> Json:
    template = {"spec": {"containers": [{"name": "pytorch", "image": "i:1", "env": env or []}]}}
    specs = {"Worker": {"replicas": workers, "template": template}} if workers else {}
    specs |= {"Master": {"template": template}} if master else {}
    return {"kind": "PyTorchJob", "metadata": {"name": "run"}, "spec": {**spec, "pytorchReplicaSpecs": specs}}


def environments(manifest: Json) -> dict[str, dict[str, str]]:
    return {pod.name: pod.environment(pod.spec["containers"][0]) for pod in contract.pods(manifest)}


def test_two_nodes_of_two_processes_have_four_ranks_and_node_ranks_0_and_1() -> None:
    found = environments(job(nprocPerNode="2"))
    assert found["run-master-0"] == {
        "PYTHONUNBUFFERED": "1",
        "MASTER_PORT": "23456",
        "PET_MASTER_PORT": "23456",
        "MASTER_ADDR": "run-master-0",
        "PET_MASTER_ADDR": "run-master-0",
        "WORLD_SIZE": "4",
        "RANK": "0",
        "PET_NODE_RANK": "0",
        "PET_NPROC_PER_NODE": "2",
        "PET_NNODES": "2",
    }
    assert found["run-worker-0"] == found["run-master-0"] | {"RANK": "1", "PET_NODE_RANK": "1"}


@pytest.mark.parametrize("value", [None, "auto", "cpu", "gpu"])
def test_auto_cpu_and_gpu_count_once_in_world_size(value: str | None) -> None:
    manifest = job(nprocPerNode=value) if value else job()
    env = environments(manifest)["run-worker-0"]
    assert (env["WORLD_SIZE"], env["PET_NPROC_PER_NODE"]) == ("2", value or "auto")


def test_the_operator_wins_over_the_manifest_s_own_variables() -> None:
    env = environments(
        job(env=[{"name": "RANK", "value": "7"}, {"name": "MINE", "value": "$(RANK) $(NONE) $$(RANK)"}])
    )["run-worker-0"]
    assert (env["RANK"], env["MINE"]) == ("1", "7 $(NONE) $(RANK)")


def test_without_a_master_there_is_no_rank_and_no_address() -> None:
    assert environments(job(2, master=False))["run-worker-1"] == {
        "PYTHONUNBUFFERED": "1",
        "PET_NPROC_PER_NODE": "auto",
        "PET_NNODES": "2",
    }


def test_an_elastic_job_gets_a_range_without_the_master_and_an_endpoint_at_worker_0() -> None:
    env = environments(
        job(2, nprocPerNode="1", elasticPolicy={"minReplicas": 1, "maxReplicas": 4, "maxRestarts": 3})
    )["run-worker-1"]
    assert env["PET_NNODES"] == "1:4"
    assert env["PET_RDZV_ENDPOINT"] == "run-worker-0:23456"
    assert (env["PET_RDZV_BACKEND"], env["PET_MAX_RESTARTS"], env["RANK"]) == ("c10d", "3", "2")


def test_only_workers_of_a_job_with_a_master_wait_for_its_name() -> None:
    manifest = job()
    manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["initContainers"] = [
        {"name": "prepare"}
    ]
    inits = {
        pod.name: [one["name"] for one in pod.spec.get("initContainers", [])]
        for pod in contract.pods(manifest)
    }
    assert inits == {"run-master-0": ["prepare"], "run-worker-0": ["prepare", "init-pytorch"]}


def test_exit_code_becomes_never_for_the_kubelet_and_stays_known() -> None:
    manifest = job(0)
    manifest["spec"]["pytorchReplicaSpecs"]["Master"]["restartPolicy"] = "ExitCode"
    (pod,) = contract.pods(manifest)
    assert (pod.restart_policy, pod.spec["restartPolicy"]) == ("ExitCode", "Never")


def test_a_document_without_replicas_is_refused_with_the_fix() -> None:
    with pytest.raises(UserError, match="has no pods"):
        contract.pods({"kind": "ConfigMap"})


def trainjob_of(**trainer: Any) -> Json:
    spec: Json = {"runtimeRef": {"name": "torch-distributed"}}
    return {
        "kind": "TrainJob",
        "metadata": {"name": "t"},
        "spec": spec | ({"trainer": trainer} if trainer else {}),
    }


def test_a_trainjob_s_nodes_get_pet_variables_only() -> None:
    first, second = trainjob.pods(trainjob_of(numNodes=2, numProcPerNode=1, image="i:1"))
    assert first.variables == {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "t-node-0-0.t",
        "PET_MASTER_PORT": "29500",
        "JOB_COMPLETION_INDEX": "0",
    }
    assert (second.name, second.variables["PET_NODE_RANK"]) == ("t-node-0-1", "1")


def test_a_trainjob_without_a_trainer_gets_no_pet_variables() -> None:
    (pod,) = trainjob.pods(trainjob_of())
    assert pod.variables == {"JOB_COMPLETION_INDEX": "0"}


@pytest.mark.parametrize(
    ("resources", "processes"),
    [
        ({"limits": {"nvidia.com/gpu": 2}}, "auto"),
        ({"limits": {"cpu": "4"}, "requests": {"cpu": "1500m"}}, "2"),
        ({}, "1"),
    ],
)
def test_processes_that_are_not_written_follow_gpus_then_cpus(resources: Json, processes: str) -> None:
    (pod,) = trainjob.pods(trainjob_of(resourcesPerNode=resources))
    assert pod.variables["PET_NPROC_PER_NODE"] == processes


def test_a_trainjobs_patches_reach_the_pod_by_the_names_of_their_entries() -> None:
    patch: Json = {"metadata": {"labels": {"team": "a"}}}
    mounts = [{"name": "v", "mountPath": "/v"}]
    patch["spec"] = {"volumes": [{"name": "v"}], "containers": [{"name": "node", "volumeMounts": mounts}]}
    steps = [{"name": name, "template": {"spec": {"template": patch}}} for name in ("node", "other")]
    manifest = trainjob_of(image="i:1")
    spec = {"template": {"spec": {"replicatedJobs": steps}}}
    manifest["spec"]["runtimePatches"] = [{"manager": "a.b/c", "trainingRuntimeSpec": spec}]
    (pod,) = trainjob.pods(manifest)
    (container,) = pod.spec["containers"]
    assert (container["image"], container["volumeMounts"], pod.spec["volumes"]) == (
        "i:1",
        mounts,
        [{"name": "v"}],
    )
    assert pod.labels["team"] == "a"


def test_an_indexed_jobs_pods_know_their_index_and_end_it_by_its_policy() -> None:
    rules = [
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [70]}},
        {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [71]}},
    ]
    spec = {"containers": [{"name": "pytorch"}], "initContainers": [{"name": "i"}], "restartPolicy": "Never"}
    manifest: Json = {"kind": "Job", "metadata": {"name": "run"}}
    manifest["spec"] = {"completions": 2, "template": {"spec": spec}, "podFailurePolicy": {"rules": rules}}
    first, second = indexed_job.pods(manifest)
    assert (first.name, second.name) == ("run-0", "run-1")
    assert second.variables == {"JOB_COMPLETION_INDEX": "1"}
    assert second.annotations[indexed_job.INDEX] == "1"
    assert {code in first.final for code in (70, 71)} == {False}
    assert 72 in first.final


def test_a_runtime_that_is_only_in_the_cluster_is_named() -> None:
    manifest = trainjob_of()
    manifest["spec"]["runtimeRef"] = {"name": "mine", "kind": "TrainingRuntime"}
    with pytest.raises(UserError, match="mine"):
        trainjob.pods(manifest)
