"""The commands about jobs, against an API server of our own that stops or holds what is not ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cluster_api import NAMESPACE, Serving
from typer.testing import CliRunner, Result

from podtune.cli import app
from podtune.cluster.job.pytorchjob import QUEUE
from podtune.cluster.lint.explain import examples
from podtune.cluster.live.errors import Unreachable
from podtune.run.errors import UserError

VALUES = Path(__file__).resolve().parents[3] / "deploy" / "values"
JOB_LABEL = "training.kubeflow.org/job-name"


def podtune(*words: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, list(words), input=stdin, catch_exceptions=True)


class Api:
    """A namespace with objects. From the request on that has ``silent`` in it nothing is answered."""

    def __init__(self) -> None:
        self.objects: dict[str, list[dict[str, Any]]] = {}  # by plural
        self.silent: str | None = None
        self.stopped = False
        self.asked: list[str] = []
        self.deleted: list[str] = []

    def add(self, plural: str, name: str, *, manager: str = "podtune", **labels: str) -> None:
        fields = [{"manager": manager, "operation": "Apply"}]
        metadata = {"name": name, "labels": labels, "managedFields": fields, "uid": name}
        status = {"phase": "Running", "conditions": [{"type": "Running", "status": "True"}]}
        self.objects.setdefault(plural, []).append({"metadata": metadata, "spec": {}, "status": status})

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, bytes] | None:
        self.asked.append(path)
        self.stopped = self.stopped or (self.silent is not None and self.silent in f"{method} {path}")
        if self.stopped:
            return None
        if path == "/version":
            return 200, b'{"gitVersion": "v1"}'
        if path.endswith("selfsubjectaccessreviews"):
            return 201, b'{"status": {"allowed": true}}'
        if path == "/apis/kueue.x-k8s.io" and "workloads" in self.objects:
            return 200, b'{"preferredVersion": {"groupVersion": "kueue.x-k8s.io/v1beta1"}}'
        if path.count("/") == 3:  # /apis/GROUP/VERSION
            return 200, b'{"resources": [{"name": "pytorchjobs"}]}'
        if method in ("PATCH", "POST"):
            return 200, json.dumps(body).encode()
        *_, plural, name = path.split("/") if f"/{NAMESPACE}/" in path else ("", "")
        if name == "log":
            return 200, b"2026-01-01T00:00:00.000000001Z a line\n"
        if name in ("events", "pods") or name in self.objects:
            wanted = dict(part.split("=") for part in query.get("labelSelector", "").split(",") if part)
            items = [
                each
                for each in self.objects.get(name, [])
                if wanted.items() <= each["metadata"]["labels"].items()
            ]
            return 200, json.dumps({"items": items}).encode()
        for each in self.objects.get(plural, []):
            if each["metadata"]["name"] == name:
                if method == "DELETE":
                    self.deleted.append(f"{plural}/{name}")
                return 200, json.dumps(each).encode()
        return 404, b'{"message": "not found"}'


@pytest.fixture
def api(serving: Serving) -> Api:
    api = Api()
    serving(lambda *asked: api.answer(*asked))  # noqa: PLW0108  # a test puts another answer in its place
    return api


@pytest.mark.parametrize(
    ("silent", "words"),
    [
        ("POST", ("submit", "-f", str(VALUES / "cpu-smoke.yaml"))),
        ("PATCH", ("submit", "-f", str(VALUES / "cpu-smoke.yaml"))),
        ("/pods", ("collect", "--job", "run")),
        ("/log", ("collect", "--job", "run")),
        ("/log", ("logs", "run")),
        ("/pods", ("status", "run")),
        ("/events", ("why", "run")),
        ("DELETE", ("delete", "run")),
        ("configmaps", ("delete", "run")),
        ("/pods", ("watch", "run", "--once")),
        ("/pytorchjobs", ("status",)),
    ],
)
def test_a_server_that_stops_in_mid_command_is_a_sentence_with_code_69(
    api: Api, silent: str, words: tuple[str, ...]
) -> None:
    api.add("pytorchjobs", "run")
    api.add("pods", "run-master-0", **{JOB_LABEL: "run"})
    api.objects["configmaps"] = []
    api.silent = silent
    error = podtune(*words).exception
    assert api.stopped
    assert isinstance(error, Unreachable)
    assert (error.code, "does not answer" in str(error), bool(error.fix)) == (69, True, True)


def test_a_job_that_the_cluster_would_refuse_is_not_sent(api: Api, tmp_path: Path) -> None:
    manifest = yaml.safe_load(examples()["base"])
    manifest["spec"]["nprocPerNode"] = 1
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    error = podtune("submit", "--manifest", str(tmp_path / "job.yaml")).exception
    assert isinstance(error, UserError)
    assert (error.code, "the cluster would refuse the job" in error.what, api.asked) == (65, True, [])


def test_what_was_created_before_the_server_stopped_is_named(api: Api) -> None:
    """A job cannot be half made: what stands is taken back, or named with the command that removes it."""
    api.add("pytorchjobs", "other")
    api.objects["serviceaccounts"] = []
    applied: list[str] = []
    whole = api.answer

    def answer(method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, bytes] | None:
        if method in ("PATCH", "POST") and "dryRun" not in query and "accessreviews" not in path:
            applied.append(path)
            api.stopped = len(applied) > 1
        return None if api.stopped else whole(method, path, query, body)

    api.answer = answer  # type: ignore[method-assign]
    error = podtune("submit", "-f", str(VALUES / "cpu-smoke.yaml")).exception
    assert isinstance(error, UserError)
    assert error.code == 69
    assert "left behind: kubectl -n team delete networkpolicy/cpu-smoke" in error.what


OWN = {"app.kubernetes.io/instance": "run", "app.kubernetes.io/name": "podtune"}


def test_delete_takes_only_what_podtune_made_for_this_job(api: Api) -> None:
    api.add("pytorchjobs", "run", **{**OWN, "app.kubernetes.io/instance": "postgres"})
    api.add("configmaps", "run", **OWN)
    api.add("networkpolicies", "run", **OWN)
    api.add("services", "run-aim", **OWN)
    # the label that the job's author chose, another's objects with this job's labels, another manager
    api.add("deployments", "postgres-data", **{**OWN, "app.kubernetes.io/instance": "postgres"})
    api.add("deployments", "database", **OWN)
    api.add("serviceaccounts", "run", manager="kubectl", **OWN)
    api.add("persistentvolumeclaims", "run-output", **OWN)
    shown = podtune("delete", "run")
    assert shown.exception is None, shown.output
    assert sorted(api.deleted) == [
        "configmaps/run",
        "networkpolicies/run",
        "pytorchjobs/run",
        "services/run-aim",
    ]


def test_claims_go_only_after_a_yes(api: Api) -> None:
    api.add("pytorchjobs", "run", **OWN)
    api.add("persistentvolumeclaims", "run-output", **OWN)
    error = podtune("delete", "run", "--volumes").exception
    assert isinstance(error, UserError)
    assert "--yes" in error.fix
    assert api.deleted == []
    assert podtune("delete", "run", "--volumes", "--yes").exception is None
    assert "persistentvolumeclaims/run-output" in api.deleted


INDEX = "batch.kubernetes.io/job-completion-index"


def test_an_indexed_job_is_the_newest_pod_of_each_index_and_no_other_job(api: Api) -> None:
    containers = [{"name": "pytorch", "command": ["podtune", "launch", "podtune.training"]}]
    spec = {"completionMode": "Indexed", "completions": 2, "template": {"spec": {"containers": containers}}}
    for name, made in (("run", spec), ("backup", {"template": {"spec": {"containers": containers}}})):
        api.add("jobs", name)
        api.objects["jobs"][-1] |= {"spec": made, "status": {}}
    for pod, index, second in (("run-0-aaaaa", "0", 1), ("run-1-bbbbb", "1", 1), ("run-0-ccccc", "0", 2)):
        api.add("pods", pod, **{"batch.kubernetes.io/job-name": "run", INDEX: index})
        api.objects["pods"][-1]["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:0{second}Z"
    api.objects |= {"pytorchjobs": [], "trainjobs": []}
    listed = json.loads(podtune("status", "--json").output)
    assert listed == [{"job": "run", "kind": "Job", "condition": "Pending"}]
    shown = json.loads(podtune("status", "run", "--json").output)
    assert [pod["name"] for pod in shown["pods"]] == ["run-0-ccccc", "run-1-bbbbb"]
    assert shown["condition"] == "Running", "Kubernetes gives it no condition until it ends"
    assert "Job run in team: Running" in podtune("watch", "run", "--once").output
    error = podtune("status", "backup").exception
    assert isinstance(error, UserError)
    assert "there is no job 'backup'" in str(error)


@pytest.mark.parametrize(
    "name",
    ["a/../../../../../../api/v1/namespaces/kube-system/secrets/s", "run?x=1", "run#x", "..", "Run", "a%2f"],
)
def test_a_name_never_leaves_its_place_in_the_path(api: Api, name: str) -> None:
    for words in (("status", name), ("logs", name), ("delete", name), ("status", "run", "-n", name)):
        error = podtune(*words).exception
        assert isinstance(error, UserError), words
        assert (error.code, repr(name) in error.what) == (64, True)
    assert set(api.asked) <= {"/version"}


@pytest.mark.parametrize("words", [("status", "run"), ("watch", "run", "--once")])
def test_a_job_that_kueue_holds_back_says_why(api: Api, words: tuple[str, ...]) -> None:
    api.add("pytorchjobs", "run", **{QUEUE: "team"})
    api.objects["pytorchjobs"][0]["status"] = {"conditions": [{"type": "Suspended", "status": "True"}]}
    for name, of, message in (("a", "run", "insufficient quota for cpu"), ("b", "other", "another job's")):
        api.add("workloads", name, **{"kueue.x-k8s.io/job-uid": of})
        reserved = {"type": "QuotaReserved", "status": "False", "message": message}
        api.objects["workloads"][-1]["status"] = {"conditions": [reserved]}
    said = " ".join(podtune(*words).output.replace("│", " ").split())
    assert "waits in the queue team of Kueue: insufficient quota for cpu" in said
    assert "another job's" not in said


def test_without_the_right_to_see_kueues_objects_the_rest_is_shown(api: Api) -> None:
    api.add("pytorchjobs", "run", **{QUEUE: "team"})
    api.objects["pytorchjobs"][0]["status"] = {"conditions": [{"type": "Suspended", "status": "True"}]}
    api.objects["workloads"] = []
    ordinary = api.answer

    def answer(method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, bytes] | None:
        refused = path.endswith("/workloads")
        return (403, b'{"message": "no"}') if refused else ordinary(method, path, query, body)

    api.answer = answer  # type: ignore[method-assign]
    shown = podtune("status", "run")
    assert shown.exit_code == 0
    assert "Suspended" in shown.output


def test_a_status_says_what_each_pods_start_took(api: Api) -> None:
    api.add("pytorchjobs", "run")
    job = {"training.kubeflow.org/job-name": "run"}
    at = "2026-01-01T00:00:{:02}Z".format
    ended = {"terminated": {"startedAt": at(9), "finishedAt": at(21), "exitCode": 0}}
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(2)}
    metadata = {"name": "run-master-0", "labels": job, "creationTimestamp": at(0)}
    status = {"phase": "Running", "conditions": [scheduled]}
    status["initContainerStatuses"] = [{"name": "prepare", "state": ended}]
    status["containerStatuses"] = [{"name": "pytorch", "state": {"running": {"startedAt": at(22)}}}]
    api.objects["pods"] = [{"metadata": metadata, "spec": {}, "status": status}]
    expected = {"scheduled": 2, "images and volumes": 7, "prepare": 12, "started": 1}
    assert json.loads(podtune("status", "run", "--json").output)["pods"][0]["start_s"] == expected
    assert (
        "after 22 s: scheduled 2, images and volumes 7, prepare 12, started 1"
        in podtune("status", "run").output
    )
    status["containerStatuses"][0]["state"] = {"waiting": {"reason": "PodInitializing"}}
    del status["conditions"]
    assert json.loads(podtune("status", "run", "--json").output)["pods"][0]["start_s"]["prepare"] == 12
