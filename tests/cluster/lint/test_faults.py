"""One thing wrong with a job that is fine else: lint finds it, by the rule for it. What looks wrong and is
not is no error.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from support.lint_examples import example, merged
from support.lint_faults import FAULTS, HARMLESS, SHAPES, Json, changed

from podtune.cluster.lint.check import Verdict, lint
from podtune.cluster.lint.rules import RULES


def verdict(*manifests: Json) -> Verdict:
    return lint([("job.yaml", yaml.safe_dump_all(manifests, sort_keys=False))])


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_its_rule(name: str) -> None:
    code, where, change, *beside = FAULTS[name]
    others = [one if "kind" in one else changed("runtime", one) for one in beside]
    findings = verdict(changed(where, change), *others).findings
    assert code in {finding.code for finding in findings}, [finding.message for finding in findings]


@pytest.mark.parametrize("name", SHAPES)
def test_a_job_that_runs_has_no_error_and_few_warnings(name: str) -> None:
    judged = lint([(name, SHAPES[name])])
    assert not judged.empty
    assert [one for one in judged.findings if one.severity == "error"] == []
    assert judged.count("warning") <= 2


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
