"""submit, status, logs and delete against a real API server: what goes well, and each thing that can be
missing or go wrong.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from podtune.cli import app
from podtune.run.errors import UserError, report

Json = dict[str, Any]
ROOT = Path(__file__).parents[3]
IMAGE = "localhost/kc-init:1"  # a shell is enough here
STEPS = "for i in 1 2 3; do echo step $i; sleep 0.3; done"
# The master's end ends the job, and cleanPodPolicy Running then deletes a worker that is not done.
PATIENT = STEPS + "; case $HOSTNAME in *master*) sleep 8;; esac"


def job(
    name: str,
    script: str,
    *,
    workers: int = 0,
    policy: str = "Never",
    container: Json | None = None,
    pod: Json | None = None,
) -> Json:
    main = {
        "name": "pytorch",
        "image": IMAGE,
        "command": ["sh", "-c", f"exec sh -c '{script}'"],
        **(container or {}),
    }
    main["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
    spec = {
        "containers": [main],
        "terminationGracePeriodSeconds": 31,
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        **(pod or {}),
    }
    replica = {"replicas": 1, "restartPolicy": policy, "template": {"spec": spec}}
    replicas = {"Master": replica} | ({"Worker": {**replica, "replicas": workers}} if workers else {})
    run_policy = {"cleanPodPolicy": "Running", "backoffLimit": 1}
    metadata = {"name": name, "labels": {"app.kubernetes.io/instance": name}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {"nprocPerNode": "1", "runPolicy": run_policy, "pytorchReplicaSpecs": replicas},
    }


def podtune(*words: str, kubeconfig: str = "") -> subprocess.CompletedProcess[str]:
    """The command in this process: importing the API client takes longer than most of what is tested here."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        if kubeconfig:
            patch.setenv("KUBECONFIG", kubeconfig)
        try:
            code = app(list(words), standalone_mode=False) or 0
        except UserError as error:
            code = report(error)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


@pytest.fixture
def submit(namespace: str, tmp_path: Path) -> Iterator[Any]:
    """Submits documents and deletes the job afterwards."""
    names = []

    def run(
        *documents: Json, words: tuple[str, ...] = (), **options: Any
    ) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump_all(documents))
        names.append(next(one["metadata"]["name"] for one in documents if one["kind"] == "PyTorchJob"))
        return podtune("submit", "--manifest", str(path), "-n", namespace, *words, **options)

    yield run
    for name in names:
        podtune("delete", name, "-n", namespace)


def test_a_job_is_submitted_followed_looked_at_and_deleted(submit: Any, namespace: str) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "good", "labels": {"app.kubernetes.io/instance": "good"}},
    }
    claim["spec"] = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Mi"}}}
    done = submit(job("good", PATIENT, workers=1), claim, words=("--follow",))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for pod in ("good-master-0", "good-worker-0"):
        assert [line for line in lines if line.startswith(pod)] == [f"{pod} | step {i}" for i in (1, 2, 3)]
    assert "--- Succeeded" in done.stdout
    status = json.loads(podtune("status", "good", "--json", "-n", namespace).stdout)
    assert (status["condition"], status["pods"][0]["phase"]) == ("Succeeded", "Succeeded")
    assert podtune("logs", "good", "-n", namespace).stdout.splitlines() == ["step 1", "step 2", "step 3"]
    again = submit(job("good", STEPS))
    assert (again.returncode, "already exists" in again.stderr) == (78, True)
    gone = podtune("delete", "good", "-n", namespace)
    assert gone.stdout.strip() == "deleted: PyTorchJob/good"
    missing = podtune("status", "good", "-n", namespace)
    assert (missing.returncode, "there is no job 'good'" in missing.stderr) == (66, True)


def test_a_failing_job_names_the_pod_the_code_and_the_message(submit: Any) -> None:
    fallback = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    done = submit(
        job("bad", ("echo one; echo the file is empty; exit 65"), container=fallback), words=("--follow",)
    )
    assert done.returncode == 1
    assert "bad-master-0: pytorch ended with exit code 65: one the file is empty" in done.stdout


def test_out_of_memory_is_told_apart(submit: Any) -> None:
    limited = {
        "resources": {"limits": {"memory": "16Mi"}},
        "command": ["awk", 'BEGIN { s = "x"; while (1) s = s s }'],
    }
    done = submit(job("oom", "", container=limited), words=("--follow",))
    assert (done.returncode, "used" in done.stdout or "using more memory than its limit" in done.stdout) == (
        1,
        True,
    ), done.stdout


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("nogpu", {"container": {"resources": {"limits": {"nvidia.com/gpu": 64}}}}, "nvidia.com/gpu"),
        (
            "noimage",
            {"container": {"image": "localhost/none:1", "imagePullPolicy": "IfNotPresent"}},
            "localhost/none:1",
        ),
        (
            "nokey",
            {
                "container": {
                    "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "empty", "key": "token"}}}]
                }
            },
            "token",
        ),
    ],
)
def test_a_pod_that_cannot_start_is_explained(
    name: str, change: Json, told: str, submit: Any, api: Any, namespace: str
) -> None:
    with contextlib.suppress(api.ApiException):
        api.CoreV1Api().create_namespaced_secret(namespace, {"metadata": {"name": "empty"}})
    assert submit(job(name, STEPS, **change)).returncode == 0
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        status = json.loads(podtune("status", name, "--json", "-n", namespace).stdout)
        if any(told in problem["text"] for problem in status["problems"]):
            break
    assert [problem["pod"] for problem in status["problems"]][:1] == [f"{name}-master-0"], status
    assert any(told in problem["text"] and problem["fix"] for problem in status["problems"]), status


def test_nothing_is_created_when_a_secret_or_the_namespace_is_missing(
    submit: Any, namespace: str, tmp_path: Path
) -> None:
    env = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}]
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "left"}, "data": {}}
    done = submit(config, job("secret", STEPS, container={"env": env}))
    assert (done.returncode, "the Secret 'hf' does not exist" in done.stderr) == (66, True)
    left = podtune("submit", "--manifest", str(tmp_path / "job.yaml"), "-n", "no-such-namespace")
    assert left.returncode == 66
    assert podtune("status", "-n", namespace).stdout.strip() == f"no jobs in the namespace {namespace}"


def test_what_the_webhook_refuses_is_refused_before_the_rest_is_created(
    submit: Any, api: Any, namespace: str
) -> None:
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "rest"}, "data": {}}
    bad = job("webhook", STEPS)
    bad["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["name"] = "trainer"
    done = submit(config, bad)
    assert (done.returncode, "the cluster would refuse the job" in done.stderr) == (65, True)
    with pytest.raises(api.ApiException):
        api.CoreV1Api().read_namespaced_config_map("rest", namespace)


def test_a_kind_that_the_cluster_does_not_know_says_which_operator_is_missing(
    tmp_path: Path, namespace: str, api: Any
) -> None:
    if any(group.name == "trainer.kubeflow.org" for group in api.ApisApi().get_api_versions().groups):
        pytest.skip("Kubeflow Trainer is installed here")
    path = tmp_path / "t.yaml"
    trainer = {"numNodes": 1, "numProcPerNode": 1, "image": "i:1", "command": ["torchrun", "x.py"]}
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "trainer.kubeflow.org/v1alpha1",
                "kind": "TrainJob",
                "metadata": {"name": "t"},
                "spec": spec,
            }
        )
    )
    done = podtune("submit", "--manifest", str(path), "-n", namespace)
    assert (done.returncode, ("does not know the kind TrainJob") in done.stderr, "fix:" in done.stderr) == (
        69,
        True,
        True,
    )


def test_an_api_server_that_does_not_answer_is_named_within_seconds(tmp_path: Path) -> None:
    path = tmp_path / "config"
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection and never says a word
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        config = {
            "clusters": [{"name": "c", "cluster": {"server": f"https://{address}"}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path.write_text(yaml.safe_dump(config))
        started = time.monotonic()
        done = podtune("status", kubeconfig=str(path))
        took = time.monotonic() - started
    assert (done.returncode, f"{address} does not answer" in done.stderr) == (69, True), done.stderr
    assert took < 10  # the promise is 5 s on a machine that does nothing else


def test_ctrl_c_detaches_and_the_job_goes_on(submit: Any, namespace: str, tmp_path: Path) -> None:
    assert submit(job("detach", "echo begun; exec sleep 60")).returncode == 0
    words = [sys.executable, "-m", "podtune.cli", "logs", "detach", "--follow", "-n", namespace]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as following:
        assert following.stdout is not None
        assert next(line for line in following.stdout if "begun" in line)
        following.send_signal(signal.SIGINT)
        _, told = following.communicate(timeout=30)
    assert (following.returncode, "podtune logs detach --follow" in told) == (130, True)
    assert json.loads(podtune("status", "detach", "--json", "-n", namespace).stdout)["condition"] == "Running"


def test_following_survives_a_broken_connection_and_repeats_no_line(
    submit: Any, namespace: str, tmp_path: Path
) -> None:
    assert submit(job("broken", "for i in 1 2 3 4 5 6 7 8; do echo step $i; sleep 0.7; done")).returncode == 0
    config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    host, port = re.match(r"https://(.+):(\d+)", config["clusters"][0]["cluster"]["server"]).groups()  # type: ignore[union-attr]
    with Proxy(host, int(port)) as proxy:
        config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{proxy.port}"
        path = tmp_path / "config"
        path.write_text(yaml.safe_dump(config))
        words = [sys.executable, "-m", "podtune.cli", "logs", "broken", "--follow", "-n", namespace]
        env = {**os.environ, "KUBECONFIG": str(path)}
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env) as following:
            assert following.stdout is not None
            lines = []
            for line in following.stdout:
                lines.append(line.strip())
                if line.strip().endswith("step 3"):
                    proxy.cut()
        assert following.returncode == 0, lines
    assert [line for line in lines if "step" in line] == [f"broken-master-0 | step {i}" for i in range(1, 9)]


class Proxy:
    """Passes TCP on to the API server, until ``cut`` breaks every connection that it has."""

    def __init__(self, host: str, port: int) -> None:
        self._target, self._pairs, self._server = (
            (host, port),
            list[socket.socket](),
            socket.create_server(("127.0.0.1", 0)),
        )
        self.port = self._server.getsockname()[1]

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        for one in self._pairs:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                inner, _ = self._server.accept()
                outer = socket.create_connection(self._target)
                self._pairs += [inner, outer]
                for a, b in ((inner, outer), (outer, inner)):
                    threading.Thread(target=self._pass, args=(a, b), daemon=True).start()

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def kubeconfig_of(api: Any, namespace: str, name: str, rules: list[Json], path: Path) -> str:
    """A kubeconfig for a ServiceAccount that has these rules and no others."""
    core, rbac = api.CoreV1Api(), api.RbacAuthorizationV1Api()
    core.create_namespaced_service_account(namespace, {"metadata": {"name": name}})
    rbac.create_namespaced_role(namespace, {"metadata": {"name": name}, "rules": rules})
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    rbac.create_namespaced_role_binding(
        namespace, {"metadata": {"name": name}, "roleRef": reference, "subjects": [subject]}
    )
    token = core.create_namespaced_service_account_token(
        name, namespace, {"spec": {"expirationSeconds": 3600}}
    ).status.token
    config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    config["users"] = [{"name": config["contexts"][0]["context"]["user"], "user": {"token": token}}]
    path.write_text(yaml.safe_dump(config))
    return str(path)


def documented_rules() -> list[Json]:
    block = re.search(r"```yaml\n(apiVersion: rbac.*?)```", (ROOT / "docs/cluster.md").read_text(), re.DOTALL)
    assert block
    rules: list[Json] = yaml.safe_load(block[1])["rules"]
    return rules


def test_the_documented_role_is_enough_for_everything(
    submit: Any, api: Any, namespace: str, tmp_path: Path
) -> None:
    user = kubeconfig_of(api, namespace, "user", documented_rules(), tmp_path / "user")
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "mine", "labels": {"app.kubernetes.io/instance": "mine"}},
        "data": {},
    }
    done = submit(config, job("mine", STEPS), words=("--follow",), kubeconfig=user)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Succeeded" in podtune("status", "mine", "-n", namespace, kubeconfig=user).stdout
    assert "step 3" in podtune("logs", "mine", "--all", "-n", namespace, kubeconfig=user).stdout
    gone = podtune("delete", "mine", "-n", namespace, kubeconfig=user)
    assert gone.stdout.strip() == "deleted: PyTorchJob/mine, ConfigMap/mine", gone.stderr


def test_a_missing_permission_is_named_before_anything_is_created(
    submit: Any, api: Any, namespace: str, tmp_path: Path
) -> None:
    rules = [rule for rule in documented_rules() if rule["apiGroups"] != ["kubeflow.org"]]
    user = kubeconfig_of(api, namespace, "weak", rules, tmp_path / "weak")
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "weak"}, "data": {}}
    done = submit(config, job("weak", STEPS), kubeconfig=user)
    assert (done.returncode, "cannot create resource" in done.stderr) == (77, True), done.stderr
    with pytest.raises(api.ApiException):
        api.CoreV1Api().read_namespaced_config_map("weak", namespace)
