"""One thing wrong with a job that is fine else: lint finds it, by the rule for it. What looks wrong and is
not is no error.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from podtune.cluster.lint.check import Verdict, lint
from podtune.cluster.lint.explain import example, examples, merged
from podtune.cluster.lint.rules import RULES

Json = dict[str, Any]
FOLDER = Path(__file__).parent
FAULTS: dict[str, tuple[str, str, Any]] = yaml.safe_load((FOLDER / "faults.yaml").read_text(encoding="utf-8"))
SHAPES: dict[str, str] = yaml.safe_load((FOLDER / "jobs_that_run.yaml").read_text(encoding="utf-8"))
POD = ("template", "spec")


def of_container(change: Any) -> Json:
    return {"containers": [{"name": "pytorch", **change}]}


def nested(path: tuple[str, ...], change: Any) -> Any:
    return change if not path else {path[0]: nested(path[1:], change)}


def changed(where: str, change: Any) -> Json:
    """The good job, TrainJob or runtime with ``change`` made where it says."""
    kind = where.partition("-")[0]
    job: Json = yaml.safe_load(examples()[kind if kind in ("trainjob", "runtime") else "base"])
    job = copy.deepcopy(job)  # what YAML's aliases share is two things from here on
    if kind == "trainjob" or where in ("job", "runtime"):
        return merged(job, change)  # type: ignore[no-any-return]
    if kind == "runtime":
        if where != "runtime-step":
            change = {"containers": [{"name": "node", **change}]} if where == "runtime-container" else change
            change = nested(("template", "spec", "template", "spec"), change)
        step = {"replicatedJobs": [{"name": "node", **change}]}
        return merged(job, {"spec": {"template": {"spec": step}}})  # type: ignore[no-any-return]
    if where == "job-on-cpus":
        job = in_replicas(job, ("Master", "Worker"), nested(POD, of_container({"resources": None})))
        return merged(job, change)  # type: ignore[no-any-return]
    if where == "gpu-left-empty":
        for replica in job["spec"]["pytorchReplicaSpecs"].values():
            replica["template"]["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": None}}
        return job
    roles = {"master": ("Master",), "worker": ("Worker",)}.get(kind, ("Master", "Worker"))
    part = where.partition("-")[2] or kind
    path = {"pod": POD, "container": POD, "template": ("template",)}.get(part, ())
    return in_replicas(job, roles, nested(path, of_container(change) if part == "container" else change))


def in_replicas(job: Json, roles: tuple[str, ...], change: Any) -> Json:
    return merged(job, {"spec": {"pytorchReplicaSpecs": dict.fromkeys(roles, change)}})  # type: ignore[no-any-return]


def verdict(*manifests: Json) -> Verdict:
    return lint([("job.yaml", yaml.safe_dump_all(manifests, sort_keys=False))])


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_its_rule(name: str) -> None:
    code, where, change = FAULTS[name]
    findings = verdict(changed(where, change)).findings
    assert code in {finding.code for finding in findings}, [finding.message for finding in findings]


@pytest.mark.parametrize("name", SHAPES)
def test_a_job_that_runs_has_no_error_and_few_warnings(name: str) -> None:
    judged = lint([(name, SHAPES[name])])
    assert not judged.empty
    assert [one for one in judged.findings if one.severity == "error"] == []
    assert judged.count("warning") <= 2


HARMLESS: dict[str, tuple[str, Any]] = {
    "a label alone against the sidecar": ("master-template", {"metadata": {"annotations": None}}),
    "one process a pod in python": (
        "job-on-cpus",
        {"spec": {"nprocPerNode": None, "pytorchReplicaSpecs": {"Worker": {"replicas": 3}}}},
    ),
    "the operator's own variables as flags": (
        "container",
        {
            "command": [
                *("torchrun", "--nnodes=$(PET_NNODES)", "--nproc-per-node=$(PET_NPROC_PER_NODE)"),
                *("--node-rank=$(RANK)", "--master-addr=$(MASTER_ADDR)", "train.py"),
            ]
        },
    ),
    "flags with variables of a shell": (
        "container",
        {"command": ["bash", "-c", "exec torchrun --node_rank $PET_NODE_RANK --nnodes=$PET_NNODES a.py"]},
    ),
    "a variable of its own as the number of nodes": (
        "container",
        {
            "env": [{"name": "NODES", "value": "2"}],
            "command": ["torchrun", "--nnodes=$(NODES)", "train.py"],
        },
    ),
    "an explicit empty toleration": ("pod", {"tolerations": [{"operator": "Exists"}]}),
    "hostIPC in place of a volume": ("pod", {"hostIPC": True}),
    "dnsPolicy None with servers": (
        "pod",
        {"hostNetwork": True, "dnsPolicy": "None", "dnsConfig": {"nameservers": ["10.0.0.10"]}},
    ),
    "other resources of the vendor": (
        "container",
        {"resources": {key: {"nvidia.com/roce_gdr": 2} for key in ("limits", "requests")}},
    ),
    "MIG slices": (
        "container",
        {"resources": {"requests": None, "limits": {"nvidia.com/mig-1g.10gb": 2, "nvidia.com/gpu": None}}},
    ),
    "quantities of every notation": (
        "container",
        {
            "resources": {
                "requests": {"cpu": "0.5", "memory": "1e9", "ephemeral-storage": "10Gi"},
                "limits": {"cpu": "1500m", "memory": 2147483648, "ephemeral-storage": "20G"},
            }
        },
    ),
    "huge pages": (
        "container",
        {"resources": {key: {"hugepages-2Mi": "1Gi", "memory": "8Gi"} for key in ("limits", "requests")}},
    ),
    "a sidecar as an init container": (
        "pod",
        {"initContainers": [{"name": "logs", "image": "logs:1", "restartPolicy": "Always"}]},
    ),
    "every source of a volume": (
        "pod",
        {
            "volumes": [
                {"name": "a", "configMap": {"name": "a"}},
                {"name": "b", "secret": {"secretName": "b", "defaultMode": 256}},
                {"name": "c", "projected": {"sources": [{"secret": {"name": "c"}}]}},
                {"name": "d", "csi": {"driver": "x.y"}},
                {"name": "e"},
            ]
        },
    ),
    "downward API": (
        "container",
        {
            "env": [
                {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
                {"name": "B", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
                {"name": "C.D-e", "value": "1"},
            ]
        },
    ),
    "an image by digest in a registry with a port": (
        "container",
        {"image": f"localhost:5000/a/b_c/d-e.f:v1_2@sha256:{'0' * 64}"},
    ),
    "labels with empty values and prefixes": (
        "job",
        {"metadata": {"labels": {"a": "", "example.com/B_c.d": "X_1.y"}, "annotations": {"A.com/b": " "}}},
    ),
    "only the image's own program": ("container", {"command": None, "args": ["--epochs", "3"]}),
    "a script of the image": ("container", {"command": ["/opt/run me.sh", "--x"]}),
    "a script handed to a shell": ("container", {"command": ["bash", "/opt/start.sh", "--epochs", "3"]}),
    "arguments for a script after -c": (
        "container",
        {"command": ["sh", "-c", 'exec torchrun "$@"', "sh", "train.py"]},
    ),
    "python's -c": ("job-on-cpus", {"spec": {"nprocPerNode": "1"}}),
    "xpu as the processes": ("job", {"spec": {"nprocPerNode": "auto"}}),
    "a deadline and a kept job": (
        "job",
        {"spec": {"runPolicy": {"activeDeadlineSeconds": 3600, "ttlSecondsAfterFinished": 86400}}},
    ),
    "a date as a label": ("job", {"metadata": {"annotations": {"when": "2026-11-21", "ratio": "1:30"}}}),
    "trainjob, cpu for the processes": ("trainjob", {"spec": {"trainer": {"numProcPerNode": "cpu"}}}),
    "trainjob, two GPUs in limits only": (
        "trainjob",
        {"spec": {"trainer": {"numProcPerNode": 2, "resourcesPerNode": {"requests": None}}}},
    ),
    "trainjob, MASTER_PORT by hand": (
        "trainjob",
        {"spec": {"trainer": {"env": [{"name": "MASTER_PORT", "value": "29501"}]}}},
    ),
    "trainjob, a runtime of the cluster": ("trainjob", {"spec": {"runtimeRef": {"name": "ours"}}}),
    "runtime, no image for the trainer": ("runtime-container", {"image": None}),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_wrong_is_no_error(name: str) -> None:
    judged = verdict(changed(*HARMLESS[name]))
    assert [one for one in judged.findings if one.severity == "error"] == []


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule.severity == "error"], ids=lambda rule: rule.code
)
def test_an_error_says_who_refuses_it_or_why_it_hangs(rule: Any) -> None:
    words = {
        "api": ("API server",),
        "webhook": ("webhook",),
        "operator": ("operator", "API server", "JobSet"),
        "hang": ("hang", "never", "for ever", "kubelet"),
    }
    assert any(word in rule.summary for word in words[rule.by]), rule.summary
    findings = [one for one in lint([("e", example(rule.code, "bad"))]).findings if one.code == rule.code]
    assert "error" in {finding.severity for finding in findings}


def test_master_and_worker_alike_are_one_finding() -> None:
    job = changed("container", {"imagePullPolicy": "Alway"})
    (finding,) = verdict(job).findings
    assert "so in Worker" in finding.message


def test_claims_count_the_pods_that_mount_them_in_their_namespace() -> None:
    def claimed(change: Json, *modes: str, namespace: str = "team") -> set[str]:
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "output", "namespace": namespace},
            "spec": {"accessModes": [*modes]},
        }
        job = merged(changed("job", change), {"metadata": {"namespace": "team"}})
        return {finding.code for finding in verdict(claim, job).findings}

    assert "PT302" in claimed({}, "ReadWriteOnce")
    assert "PT302" not in claimed({}, "ReadWriteMany")
    assert "PT302" not in claimed({}, "ReadWriteOnce", namespace="other")
    alone = {"spec": {"pytorchReplicaSpecs": {"Worker": None}}}
    assert "PT302" not in claimed(alone, "ReadWriteOnce")


def test_configmaps_are_read_for_secrets() -> None:
    text = "hub_token: hf_abcdefghijklmnopqrstuv\nlearning_rate: 0.1\nimage_token: <image>\n"
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "c"},
        "data": {"train.yaml": text},
    }
    (finding,) = verdict(config).findings
    assert (finding.code, finding.path) == ("PT403", "data.train.yaml")
    assert "hf_" not in finding.message
