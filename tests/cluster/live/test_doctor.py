"""What the doctor says of a cluster, against an API server of our own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.cluster_api import Serving

from podtune.cluster.live.client import connect
from podtune.cluster.live.facilities import network_policies


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
