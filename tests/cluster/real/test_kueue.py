"""Kueue beside the operator: jobs wait for quota, give way to a higher priority, and lose nothing by it.

    tests/cluster/real/kueue.sh up

starts a controller where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.real_cluster import LONG, Cluster, config

from podtune.cluster.chart.render import CHART

GROUP = "kueue.x-k8s.io"
SHORT = config(max_steps=6, eval_strategy="no", save_steps=6)

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def queue(cluster: Cluster) -> Iterator[str]:
    """A LocalQueue with room for one job of two pods, in which a job of higher priority preempts."""
    try:
        groups = {group.name: group for group in cluster.api.ApisApi().get_api_versions().groups}
        version = groups[GROUP].preferred_version.version
    except KeyError:
        pytest.skip("Kueue is not installed: tests/cluster/real/kueue.sh up")
    name = cluster.namespace
    cluster.core.patch_namespace(name, {"metadata": {"labels": {"kueue": "true"}}})  # as kueue.sh asks for
    room = {"cpu": "1200m", "memory": "64Gi"}
    flavor = {"name": name, "resources": [{"name": key, "nominalQuota": room[key]} for key in room]}
    spec = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
        "preemption": {"withinClusterQueue": "LowerPriority"},
        "resourceGroups": [{"coveredResources": list(room), "flavors": [flavor]}],
    }
    of_the_cluster: list[tuple[str, str, dict[str, Any]]] = [
        ("ResourceFlavor", "resourceflavors", {}),
        ("WorkloadPriorityClass", "workloadpriorityclasses", {"value": 1000}),
        ("ClusterQueue", "clusterqueues", {"spec": spec}),
    ]
    for kind, plural, body in of_the_cluster:
        made = {"apiVersion": f"{GROUP}/{version}", "kind": kind, "metadata": {"name": name}, **body}
        cluster.custom.create_cluster_custom_object(GROUP, version, plural, made)
    local = {"apiVersion": f"{GROUP}/{version}", "kind": "LocalQueue", "metadata": {"name": "queue"}}
    cluster.custom.create_namespaced_custom_object(
        GROUP, version, name, "localqueues", local | {"spec": {"clusterQueue": name}}
    )
    yield "queue"
    for _, plural, _ in reversed(of_the_cluster):
        cluster.custom.delete_cluster_custom_object(GROUP, version, plural, name)


def test_preempted_by_one_of_higher_priority_a_run_saves_waits_and_ends_at_the_same_loss(
    cluster: Cluster, queue: str
) -> None:
    of_two = {"nodes": 2, "strategy": "ddp"}
    for name in ("whole", "gives-way"):
        cluster.install(name, distributed=of_two, config=config(**LONG), kueue={"queueName": queue})
    cluster.started("whole")
    # the pods of one fit, at 500m each for their preparation, and those of two do not
    assert "Suspended" in cluster.conditions("gives-way")
    assert cluster.pods("gives-way") == []
    cluster.ended("whole")

    cluster.started("gives-way")
    urgent = {"queueName": queue, "priorityClass": cluster.namespace}
    cluster.install("urgent", distributed=of_two, config=SHORT, kueue=urgent)
    cluster.until("gives-way to be suspended", lambda: "Suspended" in cluster.conditions("gives-way"))
    cluster.until("its pods to save and go", lambda: not cluster.pods("gives-way"), 120)
    left = cluster.read("gives-way/run.json")
    assert left["status"] == "preempted"
    cluster.ended("urgent")
    cluster.ended("gives-way")
    record = cluster.read("gives-way/run.json")
    assert (record["status"], len(record["attempts"])) == ("ok", 2)
    assert record["attempts"][1]["from_step"] == left["measurements"]["steps"] > 0
    assert cluster.losses("gives-way") == cluster.losses("whole")


def test_an_upgrade_leaves_the_queues_decision_alone(cluster: Cluster, queue: str) -> None:
    """Kueue suspends and resumes a job by the field that runPolicy.suspend sets."""
    for name in ("admitted", "waiting"):
        cluster.install(name, distributed={"nodes": 2}, config=SHORT, kueue={"queueName": queue})

    def suspended(name: str) -> bool:
        return bool(cluster.job(name)["spec"]["runPolicy"].get("suspend"))

    cluster.until("one to be admitted", lambda: not suspended("admitted"))
    for name in ("admitted", "waiting"):
        cluster.helm("upgrade", name, str(CHART), "--reuse-values", "--set", "commonLabels.seen=twice")
    # Helm takes the field away that Kueue's webhook had set in its name, and Kueue sets it again.
    cluster.until("the other to wait", lambda: suspended("waiting"), 20)
    assert not suspended("admitted")
    for name in ("admitted", "waiting"):
        cluster.ended(name)
