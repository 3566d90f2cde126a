"""The small API server, for every test of this room."""

from __future__ import annotations

import pytest
from support.cluster_api import Serving
from support.cluster_api import serving as serving
from support.cluster_jobs import Api


@pytest.fixture
def api(serving: Serving) -> Api:
    """An API server on a port of its own, and a kubeconfig that names it."""
    found = Api()
    serving(lambda method, path, query, body: found.answer(path, query))
    return found
