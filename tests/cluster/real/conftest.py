"""A namespace on the cluster that KUBECONFIG names, gone after the tests. Without a cluster every test here
is skipped, with the reason.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.real_cluster import VOLUMES, Cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def api() -> Any:
    """The ``kubernetes.client`` module, set up for the cluster."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG is not set: these tests need a Kubernetes cluster with the training operator")
    kubernetes = pytest.importorskip("kubernetes")
    kubernetes.config.load_kube_config()
    try:
        kubernetes.client.VersionApi().get_code(_request_timeout=5)
    except Exception as error:
        pytest.skip(
            f"the cluster of KUBECONFIG={os.environ['KUBECONFIG']} does not answer: {type(error).__name__}"
        )
    return kubernetes.client


@pytest.fixture(scope="module")
def namespace(api: Any) -> Iterator[str]:
    """A namespace of this test file's own."""
    name = f"podtune-test-{secrets.token_hex(3)}"
    core = api.CoreV1Api()
    core.create_namespace({"metadata": {"name": name}})
    yield name
    core.delete_namespace(name)


@pytest.fixture(scope="module")
def cluster(api: Any, namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """The namespace after ``helm install first``: suspended, so that its volumes are there and no pod is."""
    image = os.environ.get("IMAGE", "")
    if not image:
        pytest.skip(
            "IMAGE is not set: these tests need an image made by scripts/build_image.sh that the "
            "nodes can get"
        )
    if not shutil.which("helm"):
        pytest.skip("helm is not on PATH")
    made = Cluster(api, namespace, image, tmp_path_factory.mktemp("values"))
    classes = {"storageClass": os.environ.get("STORAGE_CLASS", ""), "accessModes": ["ReadWriteMany"]}
    made.install("first", persistence=dict.fromkeys(VOLUMES, classes), runPolicy={"suspend": True})
    made.until("the volumes", lambda: len(made.claims("Bound")) == 3, 60)
    # Where a class does not honour fsGroup (hostPath, some NFS), its folders are root's.
    made.run_pod("own", "chown", "1000:0", *(f"/{volume}" for volume in VOLUMES), user=0)
    return made
