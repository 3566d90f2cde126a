"""The fields of a pod that core/v1 bounds, as tables.

They go by "HOLDER.FIELD": the key of the object, or of its list, and the field in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from podtune.cluster.lint.diagnostic import By
from podtune.cluster.lint.names import LABEL, PORT_NAME, SUBDOMAIN

PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


@dataclass(frozen=True)
class Form:
    """The form of a text, and the sentence for one of another form: ``FIELD is VALUE, PROBLEM``."""

    code: str
    pattern: re.Pattern[str]
    problem: str
    fix: str
    by: By = ""


#: PT023: the smallest and the largest number
BOUNDS: dict[str, tuple[int, float]] = {
    "ports.containerPort": (1, 65535),
    "ports.hostPort": (0, 65535),
    "spec.activeDeadlineSeconds": (1, float("inf")),
    "topologySpreadConstraints.maxSkew": (1, float("inf")),
    "topologySpreadConstraints.minDomains": (1, float("inf")),
    "preferredDuringSchedulingIgnoredDuringExecution.weight": (1, 100),
    **{f"securityContext.{field}": (0, float("inf")) for field in ("runAsUser", "runAsGroup", "fsGroup")},
    **{f"{source}.defaultMode": (0, 0o777) for source in ("secret", "configMap", "projected")},
    **{
        f"{probe}.{field}Seconds": (0, float("inf"))
        for probe in PROBES
        for field in ("initialDelay", "period", "timeout")
    },
}
#: PT020: the values that the API server takes
VALUES = {
    "containers.imagePullPolicy": "Always IfNotPresent Never",
    "containers.terminationMessagePolicy": "File FallbackToLogsOnError",
    "containers.restartPolicy": "Always OnFailure Never",
    "spec.dnsPolicy": "ClusterFirst ClusterFirstWithHostNet Default None",
    "spec.preemptionPolicy": "PreemptLowerPriority Never",
    "tolerations.operator": "Exists Equal Lt Gt",
    "tolerations.effect": "NoSchedule PreferNoSchedule NoExecute",
    "ports.protocol": "TCP UDP SCTP",
    "volumeMounts.mountPropagation": "None HostToContainer Bidirectional",
    "hostPath.type": "DirectoryOrCreate Directory FileOrCreate File Socket CharDevice BlockDevice",
    "seccompProfile.type": "Unconfined RuntimeDefault Localhost",
    "appArmorProfile.type": "Unconfined RuntimeDefault Localhost",
    "httpGet.scheme": "HTTP HTTPS",
    "securityContext.fsGroupChangePolicy": "OnRootMismatch Always",
    "topologySpreadConstraints.whenUnsatisfiable": "DoNotSchedule ScheduleAnyway",
    "topologySpreadConstraints.nodeAffinityPolicy": "Honor Ignore",
    "topologySpreadConstraints.nodeTaintsPolicy": "Honor Ignore",
    "nodeSelectorTerms.operator": "In NotIn Exists DoesNotExist Gt Lt",
    "preference.operator": "In NotIn Exists DoesNotExist Gt Lt",
    "labelSelector.operator": "In NotIn Exists DoesNotExist",
}
#: PT021: what a name names, its form, and the fields that hold one
NAMES = (
    ("container", LABEL, "containers.name"),
    ("volume", LABEL, "volumes.name"),
    ("host", LABEL, "spec.hostname spec.subdomain"),
    ("port", PORT_NAME, "ports.name"),
    ("ServiceAccount", SUBDOMAIN, "spec.serviceAccountName"),
    ("PriorityClass", SUBDOMAIN, "spec.priorityClassName"),
    ("RuntimeClass", SUBDOMAIN, "spec.runtimeClassName"),
    ("PersistentVolumeClaim", SUBDOMAIN, "persistentVolumeClaim.claimName"),
    ("ConfigMap", SUBDOMAIN, "configMap.name configMapKeyRef.name configMapRef.name"),
    ("Secret", SUBDOMAIN, "secret.secretName secretKeyRef.name secretRef.name imagePullSecrets.name"),
)
NAME_FIXES = {
    LABEL: "at most 63 lower-case letters, digits and '-', with a letter or digit at both ends",
    PORT_NAME: "at most 15 lower-case letters, digits and '-', one letter at least",
    SUBDOMAIN: "lower-case letters, digits, '-' and '.'",
}
FIELD_PATH = (
    r"metadata\.(name|namespace|uid)|spec\.(nodeName|serviceAccountName)"
    r"|status\.(hostIP|hostIPs|podIP|podIPs)|metadata\.(labels|annotations)\['[^']+'\]"
)


def _form(code: str, pattern: str, problem: str, fix: str, by: By = "") -> Form:
    return Form(code, re.compile(pattern), problem, fix, by)


def _value(field: str, values: str) -> Form:
    # an empty one is the default, but for a selector, which has none
    default = "" if field.startswith(("nodeSelector", "preference", "labelSelector")) else "|"
    wanted = ", ".join(values.split())
    return _form("PT020", default + "|".join(values.split()), f"none of {wanted}", f"use one of {wanted}")


def _name(what: str, form: re.Pattern[str]) -> Form:
    default = "" if what in ("container", "volume") else "|"
    # the API server takes any name of a claim; the pod then waits for one that cannot exist
    by: By = "hang" if what == "PersistentVolumeClaim" else ""
    problem = f"which cannot be the name of a {what}"
    return _form("PT021", default + form.pattern, problem, NAME_FIXES[form], by)


TOPOLOGY_KEY = _form("PT021", ".+", "it may not be empty", "kubernetes.io/hostname, or a zone")
FORMS = {
    **{field: _value(field, values) for field, values in VALUES.items()},
    **{field: _name(what, form) for what, form, fields in NAMES for field in fields.split()},
    "topologySpreadConstraints.topologyKey": TOPOLOGY_KEY,
    "requiredDuringSchedulingIgnoredDuringExecution.topologyKey": TOPOLOGY_KEY,
    "podAffinityTerm.topologyKey": TOPOLOGY_KEY,
    "emptyDir.medium": _form(
        "PT020", "|Memory|HugePages(-.+)?", "none of Memory, HugePages", "medium: Memory"
    ),
    "volumeMounts.mountPath": _form("PT021", "[^:]+", "it may not be empty or hold a colon", "name a folder"),
    "volumeMounts.subPath": _form(
        "PT021", r"(?!/)(?!(.*/)?\.\.(/|\Z)).*", "it has to be relative, without ..", "name a folder in it"
    ),
    "fieldRef.fieldPath": _form("PT020", FIELD_PATH, "not a field of the pod", "metadata.name or the like"),
    "resourceFieldRef.resource": _form(
        "PT020", r"(limits|requests)\..+", "not a resource of the container", "limits.cpu or the like"
    ),
}
