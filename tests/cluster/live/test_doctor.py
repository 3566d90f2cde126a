"""What the doctor says of a cluster, against an API server of our own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.cluster_api import Serving

from podtune.cluster.job.pytorchjob import QUEUE
from podtune.cluster.live.client import connect
from podtune.cluster.live.doctor import job_kinds, network_policies, queues
from podtune.cluster.live.kinds import JOB_KINDS
from podtune.cluster.live.submit import check
from podtune.run.errors import UserError


@pytest.mark.parametrize(
    ("groups", "sets", "state", "says"),
    [
        (["apps", "cilium.io"], [], "ok", "cilium.io"),
        (["apps"], ["kube-proxy", "kube-router"], "ok", "kube-router"),
        (["apps"], ["kube-proxy", "kube-flannel-ds"], "warn", "can run code in its pods"),
        (["apps"], None, "warn", "no CNI"),
    ],
)
def test_a_cluster_that_enforces_no_network_policy_is_a_warning(
    serving: Serving, groups: list[str], sets: list[str] | None, state: str, says: str
) -> None:
    def answer(method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, bytes]:
        if path == "/apis":
            return 200, json.dumps({"groups": [{"name": name} for name in groups]}).encode()
        if path.endswith("daemonsets"):
            items = [{"metadata": {"name": name}} for name in sets or []]
            return (200, json.dumps({"items": items}).encode()) if sets is not None else (403, b"{}")
        return 200, b"{}"

    serving(answer)
    check = network_policies(connect())
    assert (check.state, says in check.found) == (state, True)


def with_trainer(serving: Serving, *fields: str) -> None:
    """A cluster whose TrainJobs have these fields; without any it has no TrainJobs."""

    def answer(method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, bytes]:
        if path.startswith("/openapi/v3/"):
            spec = {"properties": {"spec": {"properties": {key: {} for key in fields}}}}
            schemas = {"org.kubeflow.trainer.v1alpha1.TrainJob": spec}
            return 200, json.dumps({"components": {"schemas": schemas}}).encode()
        if path == "/apis/trainer.kubeflow.org/v1alpha1" and fields:
            return 200, b'{"resources": [{"name": "trainjobs"}]}'
        return (200, b"{}") if path == "/version" else (404, b"{}")

    serving(answer)


@pytest.mark.parametrize(
    ("fields", "state", "says"),
    [
        (("trainer", "runtimePatches"), "ok", "Kubeflow Trainer 2.2 or later"),
        (
            ("trainer", "podTemplateOverrides"),
            "warn",
            "Kubeflow Trainer 2.1; api: trainjob needs 2.2 or later",
        ),
        (("trainer", "podSpecOverrides"), "warn", "Kubeflow Trainer 2.0; api: trainjob needs 2.2 or later"),
        ((), "ok", "not installed; api: trainjob needs it, api: job needs no operator"),
    ],
)
def test_the_version_of_trainer_is_told_by_the_fields_of_its_jobs(
    serving: Serving, fields: tuple[str, ...], state: str, says: str
) -> None:
    with_trainer(serving, *fields)
    operator, trainer = job_kinds(connect())
    assert (trainer.state, says in trainer.found) == (state, True), trainer
    assert (operator.state, "api: job needs no operator" in operator.found) == ("warn", True)


def test_a_trainjob_for_a_newer_trainer_is_not_submitted(serving: Serving) -> None:
    with_trainer(serving, "podSpecOverrides")
    job = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "run"}}
    with pytest.raises(
        UserError, match=r"Trainer is 2\.0; this TrainJob's runtimePatches need 2\.2"
    ) as refused:
        check(connect(), [{**job, "spec": {"runtimePatches": [{"manager": "a.b/c"}]}}])
    assert refused.value.code == 69


@pytest.fixture
def kueue_of_jobs(serving: Serving) -> None:
    """A cluster with PyTorchJobs and Jobs, of which Kueue suspends Jobs alone."""

    def answer(method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, bytes] | None:
        if method == "POST" and "dryRun" in query:
            if body["kind"] == "Job" and body["metadata"]["labels"][QUEUE] == "queue":
                body["spec"]["suspend"] = True
            return 201, json.dumps(body).encode()
        if path == "/apis/kueue.x-k8s.io":
            return 200, b'{"preferredVersion": {"groupVersion": "kueue.x-k8s.io/v1beta2"}}'
        if path.endswith("/localqueues"):
            return 200, b'{"items": [{"metadata": {"name": "queue"}}]}'
        kinds = [{"name": "pytorchjobs"}, {"name": "jobs"}]
        return 200, json.dumps({"resources": kinds}).encode() if path.count("/") == 3 else b"{}"

    serving(answer)


@pytest.mark.usefixtures("kueue_of_jobs")
def test_a_kind_that_kueue_does_not_hold_back_is_named() -> None:
    found = queues(connect())
    assert (found.state, "does not hold back PyTorchJob" in found.found) == ("warn", True), found
    assert "Job," not in found.found


@pytest.mark.usefixtures("kueue_of_jobs")
@pytest.mark.parametrize(("kind", "told"), [("PyTorchJob", True), ("Job", False)])
def test_a_job_for_a_queue_that_would_start_beside_it_is_told(kind: str, told: bool) -> None:
    metadata = {"name": "run", "labels": {QUEUE: "queue"}}
    job = {"apiVersion": JOB_KINDS[kind].version, "kind": kind, "metadata": metadata, "spec": {}}
    assert any("beside the queue queue" in note for note in check(connect(), [job])) is told
