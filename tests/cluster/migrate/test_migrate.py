"""podtune migrate: the new pods see what those of the PyTorchJob saw, and what has no equal is named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cluster_jobs import podtune
from support.lint_examples import merged
from support.lint_faults import changed

from podtune.cluster.job.indexed_job import final_codes
from podtune.cluster.job.pytorchjob import FINAL
from podtune.cluster.lint.check import lint
from podtune.cluster.lint.explain import examples
from podtune.cluster.lint.targets import parse
from podtune.cluster.migrate.compare import compare, differences
from podtune.cluster.migrate.migrate import migrate

Json = dict[str, Any]


def base(**spec: Any) -> Json:
    job: Json = merged(yaml.safe_load(examples()["base"]), {"spec": spec})
    return copy.deepcopy(job)


def everywhere(**pod: Any) -> Json:
    """The good job with a change to both pods."""
    return changed("pod", pod)


SIDE = {"name": "metrics", "image": "registry.example/m:1", "command": ["serve", "$(RANK)"]}
#: jobs whose pods have an equal in both kinds
EQUAL: dict[str, Json] = {
    "two pods": base(),
    "one pod": base(pytorchReplicaSpecs={"Worker": None}),
    "a sidecar and an init container": everywhere(
        containers=[{"name": "pytorch"}, SIDE], initContainers=[{"name": "get", "image": "x:1"}]
    ),
    "its own port, on the host's network": everywhere(
        hostNetwork=True,
        dnsPolicy="ClusterFirstWithHostNet",
        containers=[{"name": "pytorch", "ports": [{"name": "pytorchjob-port", "containerPort": 23999}]}],
    ),
    "nodes, tolerations, a probe and a Secret": everywhere(
        nodeSelector={"gpu": "a100"},
        tolerations=[{"operator": "Exists"}],
        containers=[
            {
                "name": "pytorch",
                "readinessProbe": {"tcpSocket": {"port": 80}},
                "env": [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "t"}}}],
            }
        ],
    ),
    "a rank set by hand, which the operator overrides": changed(
        "container", {"env": [{"name": "RANK", "value": "7"}]}
    ),
    "the operator's variables as flags": changed(
        "container", {"command": ["torchrun", "--node-rank=$(RANK)", "--master-addr=$(MASTER_ADDR)", "t.py"]}
    ),
    "run policy": base(
        runPolicy={"activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 9999, "suspend": True}
    ),
}


@pytest.mark.parametrize("to", ["trainjob", "job"])
@pytest.mark.parametrize("name", EQUAL)
def test_every_rank_sees_what_it_saw(name: str, to: Any) -> None:
    result = migrate(EQUAL[name], to)
    ranks = compare(EQUAL[name], result.documents)
    assert (result.lost, differences(ranks)) == ([], [])
    assert all(rank.variables >= 9 for rank in ranks)
    text = yaml.safe_dump_all(result.documents)
    for version in ("2.2", "2.3", "2.4"):
        found = lint([("x.yaml", text)], target=parse(f"trainer={version}")).findings
        assert [one.message for one in found if one.severity == "error"] == []


#: (the job, the kind, what is named)
LOST: dict[str, tuple[Json, str, str]] = {
    "elastic": (
        *(base(elasticPolicy={"minReplicas": 1, "maxReplicas": 2}), "job"),
        "elasticPolicy: the number of pods is fixed, 2",
    ),
    "always": (changed("replica", {"restartPolicy": "Always"}), "job", "restartPolicy Always"),
    "two policies": (changed("worker", {"restartPolicy": "Never"}), "trainjob", "restartPolicy differs"),
    "two images": (
        *(changed("worker-container", {"image": "registry.example/train:2"}), "job"),
        "differ at spec.containers[0].image",
    ),
    "a gang": (
        base(runPolicy={"schedulingPolicy": {"minAvailable": 2}}),
        "job",
        "runPolicy.schedulingPolicy ({'minAvailable': 2})",
    ),
    "a selector": (
        everywhere(
            affinity={
                "podAntiAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [
                        {
                            "topologyKey": "kubernetes.io/hostname",
                            "labelSelector": {"matchLabels": {"training.kubeflow.org/job-name": "run"}},
                        }
                    ]
                }
            }
        ),
        "job",
        "a selector by training.kubeflow.org/...",
    ),
    "as many processes as GPUs": (base(nprocPerNode="gpu"), "trainjob", "gpu before, auto after"),
}


@pytest.mark.parametrize("name", LOST)
def test_what_has_no_equal_is_named_and_ends_with_a_code(name: str, tmp_path: Path) -> None:
    job, to, says = LOST[name]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    done = podtune("migrate", str(tmp_path / "job.yaml"), "--to", to)
    assert done.exit_code == 65
    named = [line for line in done.stderr.splitlines() if line.startswith("podtune: no equal: ")]
    assert any(says in line for line in named), named
    assert done.stdout.startswith("apiVersion: ")


@pytest.mark.parametrize("policy", ["Never", "ExitCode"])
def test_the_same_exit_codes_end_an_indexed_job(policy: str) -> None:
    _, job = migrate(changed("replica", {"restartPolicy": policy}), "job").documents
    assert final_codes(job["spec"]) == FINAL[policy]
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def test_a_pod_that_became_another_is_seen() -> None:
    service, job = migrate(base(), "job").documents
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["image"] = "registry.example/other:1"
    next(entry for entry in container["env"] if entry["name"] == "WORLD_SIZE")["value"] = "9"
    found = differences(compare(base(), [service, job]))
    assert any("containers[0].image" in one for one in found)
    assert any("9 after" in one for one in found)


def test_the_command_keeps_other_manifests_and_says_what_became_of_each_rank(tmp_path: Path) -> None:
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "output"}}
    job = merged(
        base(), {"metadata": {"uid": "x", "labels": {"kueue.x-k8s.io/queue-name": "team"}}, "status": {}}
    )
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all([claim, job]))
    done = podtune("migrate", str(tmp_path / "all.yaml"), "--to", "job")
    first, service, made = yaml.safe_load_all(done.stdout)
    assert (done.exit_code, first, service["spec"]["clusterIP"]) == (0, claim, "None")
    assert made["metadata"] == {"name": "run", "labels": {"kueue.x-k8s.io/queue-name": "team"}}
    assert (made["spec"]["completions"], made["spec"]["backoffLimit"]) == (2, 3)
    assert "podtune: run-worker-0 -> run-1: equal in 10 variables and all else" in done.stderr


@pytest.mark.parametrize(
    ("manifest", "says"),
    [
        ({"kind": "ConfigMap", "metadata": {"name": "a"}}, "there is no PyTorchJob"),
        (base(nprocPerNode=2), "the schema wants string"),
        (merged(base(), {"metadata": {"name": "a" * 60}}), "the name 'aaa"),
        (merged(base(), {"metadata": {"name": None, "generateName": "a-"}}), "the job has no name"),
        ({"kind": "AppWrapper", "metadata": {"name": "a"}, "spec": {"c": [base()]}}, "inside a AppWrapper"),
    ],
)
def test_what_cannot_be_read_is_a_sentence(manifest: Json, says: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"apiVersion": "v1", **manifest}))
    done = podtune("migrate", str(tmp_path / "job.yaml"))
    assert says in str(done.exception)
