"""podtune doctor --cluster on a real API server: what is there, and what a user without rights is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def doctor(namespace: str, **env: str) -> tuple[int, dict[str, dict[str, str]]]:
    command = [
        sys.executable,
        "-m",
        "podtune.cli",
        "doctor",
        "--cluster",
        "--json",
        "-n",
        namespace,
        "--output-dir",
        "/tmp",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **env},
        timeout=120,
    )
    return done.returncode, {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_a_cluster_with_operator_and_rights_passes(namespace: str) -> None:
    code, found = doctor(namespace)
    for name in ("cluster", "namespace", "PyTorchJob", "permissions"):
        assert found[name]["state"] == "ok", found[name]
    assert code == 0
    assert found["shared volumes"]["found"]
    assert found["cluster GPUs"]["found"]


def test_a_namespace_that_is_not_there_is_said(namespace: str) -> None:
    code, found = doctor(namespace + "-gone")
    assert found["namespace"]["state"] == "fail"
    assert "kubectl create namespace" in found["namespace"]["fix"]
    assert code == 69


def test_missing_rights_are_named_one_by_one(api: Any, namespace: str, tmp_path: Path) -> None:
    """A ServiceAccount with the documented Role passes; without it every right is listed."""
    core, rbac = api.CoreV1Api(), api.RbacAuthorizationV1Api()
    core.create_namespaced_service_account(namespace, {"metadata": {"name": "trainee"}})
    token = core.create_namespaced_service_account_token(
        "trainee", namespace, {"spec": {"expirationSeconds": 600}}
    ).status.token
    configuration = api.Configuration.get_default_copy()
    cluster = {"server": configuration.host}
    if configuration.ssl_ca_cert:
        cluster["certificate-authority"] = configuration.ssl_ca_cert
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
        "current-context": "x",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(kubeconfig))
    code, found = doctor(namespace, KUBECONFIG=str(path))
    assert code == 69
    assert found["permissions"]["state"] == "fail"
    for right in ("create pytorchjobs", "get pods/log", "patch configmaps"):
        assert right in found["permissions"]["found"]
    role = documented_role()
    rbac.create_namespaced_role(namespace, role)
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role["metadata"]["name"]}
    subjects = [{"kind": "ServiceAccount", "name": "trainee", "namespace": namespace}]
    rbac.create_namespaced_role_binding(
        namespace, {"metadata": {"name": "trainee"}, "roleRef": reference, "subjects": subjects}
    )
    _, found = doctor(namespace, KUBECONFIG=str(path))
    assert found["permissions"]["state"] == "ok", found["permissions"]


def documented_role() -> dict[str, Any]:
    """The Role in docs/cluster.md."""
    import yaml

    page = (ROOT / "docs" / "cluster.md").read_text()
    role: dict[str, Any] = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    return role
