"""The fields of a pod that core/v1 bounds, as tables.

They go by "HOLDER.FIELD": the key of the object, or of its list, and the field in it.
"""

from __future__ import annotations

from podtune.cluster.lint.names import LABEL, PORT_NAME, SUBDOMAIN

PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
FIELD_PATH = (
    r"metadata\.(name|namespace|uid)|spec\.(nodeName|serviceAccountName)"
    r"|status\.(hostIP|hostIPs|podIP|podIPs)|metadata\.(labels|annotations)\['[^']+'\]"
)
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
#: PT023: the smallest and the largest number
BOUNDS: dict[str, tuple[int, int | None]] = {
    "ports.containerPort": (1, 65535),
    "ports.hostPort": (0, 65535),
    "spec.activeDeadlineSeconds": (1, None),
    "topologySpreadConstraints.maxSkew": (1, None),
    "topologySpreadConstraints.minDomains": (1, None),
    "preferredDuringSchedulingIgnoredDuringExecution.weight": (1, 100),
    **{f"securityContext.{field}": (0, None) for field in ("runAsUser", "runAsGroup", "fsGroup")},
    **{f"{source}.defaultMode": (0, 0o777) for source in ("secret", "configMap", "projected")},
    **{
        f"{probe}.{field}Seconds": (0, None)
        for probe in PROBES
        for field in ("initialDelay", "period", "timeout")
    },
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
#: the code, the form of a text, what one of another form is, and the fix
FORMS = {
    "volumeMounts.mountPath": (
        *("PT021", "[^:]+", "it may not be empty or hold a colon"),
        "name the folder in the container",
    ),
    "volumeMounts.subPath": (
        *("PT021", r"(?!/)(?!(.*/)?\.\.(/|\Z)).*", "it has to be relative, without .."),
        "name the folder inside the volume",
    ),
    "emptyDir.medium": (
        *("PT020", "|Memory|HugePages(-.+)?", "none of Memory, HugePages; no kubelet can mount it"),
        "medium: Memory",
    ),
    "fieldRef.fieldPath": (
        *("PT020", FIELD_PATH, "not a field that a variable can be taken from"),
        "metadata.name, status.podIP and the like",
    ),
    "resourceFieldRef.resource": (
        *("PT020", r"(limits|requests)\..+", "not a resource that a variable can be taken from"),
        "limits.cpu, requests.memory ...",
    ),
    **dict.fromkeys(
        (
            "topologySpreadConstraints.topologyKey",
            "requiredDuringSchedulingIgnoredDuringExecution.topologyKey",
            "podAffinityTerm.topologyKey",
        ),
        ("PT021", ".+", "it may not be empty", "kubernetes.io/hostname, or a zone"),
    ),
}
NAMED = {field: (what, form) for what, form, fields in NAMES for field in fields.split()}
TEXTS = {field: set(values.split()) for field, values in VALUES.items()}
