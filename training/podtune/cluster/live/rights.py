"""Rights that podtune's cluster commands need; docs/cluster.md and the chart have them as a Role."""

from __future__ import annotations

from typing import Any, NamedTuple

from podtune.cluster.live.kinds import JOB_KINDS, plural_of


class Right(NamedTuple):
    """Verbs that are needed on a kind, or on a subresource of it."""

    version: str
    kind: str
    subresource: str
    verbs: tuple[str, ...]

    @property
    def group(self) -> str:
        """The API group, empty for the core's."""
        return self.version.rpartition("/")[0]


_PARTS = ("ConfigMap", "ServiceAccount", "Service", "PersistentVolumeClaim")
_READ, _EDIT = ("get", "list"), ("get", "list", "create", "patch", "delete")
RIGHTS = (
    *(Right(job.version, kind, "", ("get", "list", "create", "delete")) for kind, job in JOB_KINDS.items()),
    *(Right("v1", kind, "", _EDIT) for kind in _PARTS),
    Right("networking.k8s.io/v1", "NetworkPolicy", "", _EDIT),
    *(Right("v1", kind, part, _READ) for kind, part in (("Pod", ""), ("Pod", "log"), ("Event", ""))),
    *(Right("kueue.x-k8s.io/v1beta2", kind, "", _READ) for kind in ("LocalQueue", "Workload")),
)


def rules() -> list[dict[str, Any]]:
    """The rights as the rules of a Role."""
    by_verbs: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for right in RIGHTS:
        resource = plural_of(right.kind) + (f"/{right.subresource}" if right.subresource else "")
        by_verbs.setdefault((right.group, right.verbs), []).append(resource)
    return [
        {"apiGroups": [group], "resources": resources, "verbs": list(verbs)}
        for (group, verbs), resources in by_verbs.items()
    ]
