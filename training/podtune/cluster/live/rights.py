"""Rights that podtune's cluster commands need; docs/cluster.md and the chart have them as a Role."""

from __future__ import annotations

from podtune.cluster.job.manifest import Json
from podtune.cluster.live.kinds import JOB_KINDS

_READ, _EDIT = ("get", "list"), ("get", "list", "create", "patch", "delete")
_JOBS = ("get", "list", "create", "delete")
_PARTS = ("configmaps", "serviceaccounts", "services", "persistentvolumeclaims")
#: API group, resources, verbs
RIGHTS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    *((job.version.partition("/")[0], (job.plural,), _JOBS) for job in JOB_KINDS.values()),
    ("", _PARTS, _EDIT),
    ("networking.k8s.io", ("networkpolicies",), _EDIT),
    ("", ("pods", "pods/log", "events"), _READ),
    ("kueue.x-k8s.io", ("localqueues", "workloads"), _READ),
)


def rules() -> list[Json]:
    """The rights as the rules of a Role."""
    return [
        {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}
        for group, resources, verbs in RIGHTS
    ]
