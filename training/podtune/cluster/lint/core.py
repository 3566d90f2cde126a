"""Core/v1 as the API server validates it when the operator creates a pod: values, names, bounds and fields
that exclude each other. A job's own admission looks at none of this: the job is taken, and no pod is ever
created.

Read from k8s.io/kubernetes 1.34, pkg/apis/core/validation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from podtune.cluster.lint.quantity import quantity

Json = dict[str, Any]
Place = tuple[str | int, ...]

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # DNS-1123
SUBDOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL_VALUE = re.compile(r"(?=.{0,63}\Z)([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
QUALIFIED = re.compile(r"(?:(?P<domain>[^/]*)/)?(?=[^/]{1,63}\Z)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
PORT_NAME = re.compile(r"(?=.{1,15}\Z)(?=.*[a-z])(?!.*--)[a-z0-9]([a-z0-9-]*[a-z0-9])?")
ENV_NAME = re.compile(r"[ -<>-~]+")
STRICT_ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")  # before Kubernetes 1.32
RELAXED_ENV_NAMES_SINCE = 32
IMAGE = re.compile(
    r"(?:(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?)*|\[[a-fA-F0-9:]+\])"
    r"(?::[0-9]+)?/)?"
    r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*"
    r"(?::[\w][\w.-]{0,127})?(?:@[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,})?"
)
FIELD_PATH = re.compile(
    r"metadata\.(name|namespace|uid)|spec\.(nodeName|serviceAccountName)"
    r"|status\.(hostIP|hostIPs|podIP|podIPs)|metadata\.(labels|annotations)\['[^']+'\]"
)
RESOURCE_FIELD = re.compile(r"(limits|requests)\.(cpu|memory|ephemeral-storage|hugepages-.+)")
IN_SELECTOR = ("In", "NotIn", "Exists", "DoesNotExist")
POLICY = ("Honor", "Ignore")

#: (the key that holds the object, or its list; the field) -> the values that the API server takes
VALUES: dict[tuple[str, str], tuple[str, ...]] = {
    ("containers", "imagePullPolicy"): ("Always", "IfNotPresent", "Never"),
    ("containers", "terminationMessagePolicy"): ("File", "FallbackToLogsOnError"),
    ("containers", "restartPolicy"): ("Always", "OnFailure", "Never"),
    ("spec", "dnsPolicy"): ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    ("spec", "preemptionPolicy"): ("PreemptLowerPriority", "Never"),
    ("os", "name"): ("linux", "windows"),
    ("tolerations", "operator"): ("Exists", "Equal", "Lt", "Gt"),
    ("tolerations", "effect"): ("NoSchedule", "PreferNoSchedule", "NoExecute"),
    ("ports", "protocol"): ("TCP", "UDP", "SCTP"),
    ("volumeMounts", "mountPropagation"): ("None", "HostToContainer", "Bidirectional"),
    ("volumeMounts", "recursiveReadOnly"): ("Disabled", "IfPossible", "Enabled"),
    ("hostPath", "type"): (
        *("", "DirectoryOrCreate", "Directory", "FileOrCreate", "File"),
        *("Socket", "CharDevice", "BlockDevice"),
    ),
    ("seccompProfile", "type"): ("Unconfined", "RuntimeDefault", "Localhost"),
    ("appArmorProfile", "type"): ("Unconfined", "RuntimeDefault", "Localhost"),
    ("httpGet", "scheme"): ("HTTP", "HTTPS"),
    ("securityContext", "fsGroupChangePolicy"): ("OnRootMismatch", "Always"),
    ("securityContext", "supplementalGroupsPolicy"): ("Merge", "Strict"),
    ("securityContext", "procMount"): ("Default", "Unmasked"),
    ("topologySpreadConstraints", "whenUnsatisfiable"): ("DoNotSchedule", "ScheduleAnyway"),
    ("topologySpreadConstraints", "nodeAffinityPolicy"): POLICY,
    ("topologySpreadConstraints", "nodeTaintsPolicy"): POLICY,
    ("resizePolicy", "resourceName"): ("cpu", "memory"),
    ("resizePolicy", "restartPolicy"): ("NotRequired", "RestartContainer"),
    ("nodeSelectorTerms", "operator"): (*IN_SELECTOR, "Gt", "Lt"),
    ("preference", "operator"): (*IN_SELECTOR, "Gt", "Lt"),
    ("labelSelector", "operator"): IN_SELECTOR,
}
#: (the key that holds the object; the field) -> the smallest and the largest number
BOUNDS: dict[tuple[str, str], tuple[int, int | None]] = {
    ("ports", "containerPort"): (1, 65535),
    ("ports", "hostPort"): (0, 65535),
    ("spec", "activeDeadlineSeconds"): (1, None),
    ("topologySpreadConstraints", "maxSkew"): (1, None),
    ("topologySpreadConstraints", "minDomains"): (1, None),
    ("preferredDuringSchedulingIgnoredDuringExecution", "weight"): (1, 100),
    ("securityContext", "runAsUser"): (0, None),
    ("securityContext", "runAsGroup"): (0, None),
    ("securityContext", "fsGroup"): (0, None),
    **{(source, "defaultMode"): (0, 0o777) for source in ("secret", "configMap", "downwardAPI", "projected")},
    **{
        (probe, field): (0, None)
        for probe in ("livenessProbe", "readinessProbe", "startupProbe")
        for field in (
            *("initialDelaySeconds", "periodSeconds", "timeoutSeconds"),
            *("successThreshold", "failureThreshold"),
        )
    },
}
#: (the key that holds the object; the field) -> the name of another object
NAMES: dict[tuple[str, str], str] = {
    ("spec", "serviceAccountName"): "ServiceAccount",
    ("spec", "priorityClassName"): "PriorityClass",
    ("spec", "runtimeClassName"): "RuntimeClass",
    ("secret", "secretName"): "Secret",
    ("configMap", "name"): "ConfigMap",
    ("persistentVolumeClaim", "claimName"): "PersistentVolumeClaim",
    ("secretKeyRef", "name"): "Secret",
    ("configMapKeyRef", "name"): "ConfigMap",
    ("secretRef", "name"): "Secret",
    ("configMapRef", "name"): "ConfigMap",
    ("imagePullSecrets", "name"): "Secret",
}
#: objects of which a pod may set one field only, and has to set one
HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc", "sleep")
STANDARD_RESOURCES = ("cpu", "memory", "ephemeral-storage")


@dataclass(frozen=True)
class Refusal:
    """Something that the API server refuses in a pod.

    ``kind`` is "value", "name", "number" or "conflict".
    """

    kind: str
    path: Place
    message: str
    fix: str = ""


def refusals(pod: Json, path: Place, *, kubernetes: int) -> Iterator[Refusal]:
    """What the API server refuses in the pod spec ``pod``, which stands at ``path``."""
    yield from _walk(pod, path, "spec")
    yield from _volumes(pod, path)
    for key in ("initContainers", "containers"):
        for index, container in enumerate(pod.get(key) or []):
            yield from _container(container, (*path, key, index), kubernetes)
    yield from _pod(pod, path)


def _walk(node: Json, path: Place, holder: str) -> Iterator[Refusal]:
    """Every mapping below ``node``, held against the three tables."""
    for key, value in node.items():
        at = (holder, key)
        if isinstance(value, dict):
            if key in ("labelSelector", "namespaceSelector"):
                yield from labels(value.get("matchLabels") or {}, (*path, key, "matchLabels"))
            inside = holder if key in _SEE_THROUGH else key
            yield from _walk(value, (*path, key), inside)
        elif isinstance(value, list):
            inside = "containers" if key == "initContainers" else holder if key in _SEE_THROUGH else key
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    yield from _walk(item, (*path, key, index), inside)
        elif key == "topologyKey" and value == "":
            yield Refusal("name", (*path, key), "topologyKey is empty", "kubernetes.io/hostname, or a zone")
        elif at in _ALL:
            yield from _held_against(at, value, (*path, key))


_SEE_THROUGH = {"matchExpressions", "matchFields"}
_ALL = {*VALUES, *BOUNDS, *NAMES}


def _held_against(at: tuple[str, str], value: Any, path: Place) -> Iterator[Refusal]:
    field = at[1]
    if at in VALUES:
        optional = value == "" and field != "operator"
        if value not in VALUES[at] and not optional and not (value == "" and at[0] == "tolerations"):
            wanted = ", ".join(filter(None, VALUES[at]))
            yield Refusal("value", path, f"{field} is {value!r}, none of {wanted}", f"use one of {wanted}")
    elif at in BOUNDS:
        low, high = BOUNDS[at]
        if isinstance(value, int | float) and (value < low or (high is not None and value > high)):
            span = f"{low} to {high}" if high is not None else f"{low} or more"
            yield Refusal("number", path, f"{field} is {value}, it has to be {span}", f"use {span}")
    elif isinstance(value, str) and value and not SUBDOMAIN.fullmatch(value):
        message = f"{value!r} cannot be the name of a {NAMES[at]}"
        yield Refusal("name", path, message, "lower-case letters, digits, '-' and '.'")


def labels(mapping: Json, path: Place) -> Iterator[Refusal]:
    """Labels, or what selects by them: keys and values."""
    for key, value in mapping.items():
        yield from qualified(key, (*path, key), "label")
        if isinstance(value, str) and not LABEL_VALUE.fullmatch(value):
            length = f" ({len(value)} characters)" if len(value) > 63 else ""
            message = f"the label {key} cannot have the value {value[:70]!r}{length}"
            fix = "at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends"
            yield Refusal("name", (*path, key), message, fix)


def qualified(key: str, path: Place, what: str) -> Iterator[Refusal]:
    """The key of a label or an annotation: a name, or a domain, a slash and a name."""
    match = QUALIFIED.fullmatch(key)
    domain = match["domain"] if match else None
    if match is None or (
        domain is not None and not SUBDOMAIN.fullmatch(domain.lower() if what != "label" else domain)
    ):
        fix = (
            "a name of at most 63 letters, digits, '-', '_' and '.', before it a domain and a slash if needed"
        )
        yield Refusal("name", path, f"{key!r} cannot be the key of {_a(what)}", fix)


def _a(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _volumes(pod: Json, path: Place) -> Iterator[Refusal]:
    for index, volume in enumerate(pod.get("volumes") or []):
        at = (*path, "volumes", index)
        name = volume.get("name")
        if isinstance(name, str):
            yield from _dns_label(name, (*at, "name"), "volume")
        sources = [key for key in volume if key != "name"]
        if len(sources) > 1:
            message = f"the volume {name!r} has {len(sources)} sources, {' and '.join(sources)}"
            yield Refusal("conflict", at, message, "keep one")
        for source, field in (("configMap", "name"), ("secret", "secretName")):
            if isinstance(volume.get(source), dict) and not volume[source].get(field):
                message = f"the {source} of the volume {name!r} has no {field}"
                yield Refusal("conflict", (*at, source), message, f"give it {field}")
        empty = volume.get("emptyDir")
        medium = empty.get("medium") if isinstance(empty, dict) else None
        if isinstance(medium, str) and not re.fullmatch(r"|Memory|HugePages(-.+)?", medium):
            message = f"medium is {medium!r}, none of Memory, HugePages; no kubelet can mount it"
            yield Refusal("value", (*at, "emptyDir", "medium"), message, "medium: Memory")
        size = quantity(empty.get("sizeLimit")) if isinstance(empty, dict) else None
        if size is not None and size < 0:
            yield Refusal("number", (*at, "emptyDir", "sizeLimit"), "sizeLimit is below 0", "leave it out")


def _dns_label(name: str, path: Place, what: str) -> Iterator[Refusal]:
    if not LABEL.fullmatch(name):
        fix = "at most 63 lower-case letters, digits and '-', with a letter or digit at both ends"
        yield Refusal("name", path, f"{name!r} cannot be the name of a {what}", fix)


def _container(container: Json, path: Place, kubernetes: int) -> Iterator[Refusal]:
    name = container.get("name")
    if isinstance(name, str):
        yield from _dns_label(name, (*path, "name"), "container")
    yield from environment(container, path, kubernetes)
    seen: set[str] = set()
    for index, port in enumerate(container.get("ports") or []):
        label, at = port.get("name"), (*path, "ports", index, "name")
        if isinstance(label, str) and label and not PORT_NAME.fullmatch(label):
            fix = "at most 15 lower-case letters, digits and '-', one letter at least"
            yield Refusal("name", at, f"{label!r} cannot be the name of a port", fix)
        if label and label in seen:
            yield Refusal("conflict", at, f"two ports are named {label!r}", "rename one")
        seen.add(str(label))
    for index, mount in enumerate(container.get("volumeMounts") or []):
        at = (*path, "volumeMounts", index)
        target = mount.get("mountPath")
        if target == "" or (isinstance(target, str) and ":" in target):
            message = f"mountPath is {target!r}, it may not be empty or hold a colon"
            yield Refusal("name", (*at, "mountPath"), message, "name the folder in the container")
        sub = mount.get("subPath") or mount.get("subPathExpr") or ""
        if isinstance(sub, str) and (sub.startswith("/") or ".." in sub.split("/")):
            message = f"subPath is {sub!r}, it has to be relative, without .."
            yield Refusal("name", at, message, "name the folder inside the volume")
        if mount.get("subPath") and mount.get("subPathExpr"):
            yield Refusal("conflict", at, "subPath and subPathExpr are both set", "keep one")
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        if isinstance(container.get(probe), dict):
            yield from _probe(container[probe], probe, (*path, probe))
    security = container.get("securityContext") or {}
    if security.get("privileged") and security.get("allowPrivilegeEscalation") is False:
        message = "privileged: true and allowPrivilegeEscalation: false exclude each other"
        yield Refusal("conflict", (*path, "securityContext"), message, "drop one")


def _probe(probe: Json, name: str, path: Place) -> Iterator[Refusal]:
    handlers = [key for key in HANDLERS if probe.get(key) is not None]
    if len(handlers) != 1:
        message = (
            f"{name} has {' and '.join(handlers) or 'no handler'}, it needs one of {', '.join(HANDLERS[:4])}"
        )
        yield Refusal("conflict", path, message, "give it exactly one")
    if name != "readinessProbe" and probe.get("successThreshold") not in (None, 0, 1):
        message = f"successThreshold of {name} has to be 1"
        yield Refusal("number", (*path, "successThreshold"), message, "leave it out")


def environment(container: Json, path: Place, kubernetes: int) -> Iterator[Refusal]:
    """The variables of a container, or of a TrainJob's trainer."""
    pattern = ENV_NAME if kubernetes >= RELAXED_ENV_NAMES_SINCE else STRICT_ENV_NAME
    for index, entry in enumerate(container.get("env") or []):
        at = (*path, "env", index)
        name, source = entry.get("name"), entry.get("valueFrom")
        if isinstance(name, str) and not pattern.fullmatch(name):
            fix = "letters, digits and '_', no '='"
            yield Refusal("name", (*at, "name"), f"{name!r} cannot be the name of a variable", fix)
        if not isinstance(source, dict):
            continue
        if entry.get("value"):
            message = f"{name} has a value and a valueFrom"
            yield Refusal("conflict", at, message, "keep one of value and valueFrom")
        if len(source) != 1:
            message = f"valueFrom of {name} has {' and '.join(source) or 'no source'}, it needs exactly one"
            yield Refusal("conflict", (*at, "valueFrom"), message, "keep one source")
        yield from _sources(source, (*at, "valueFrom"))
    for index, entry in enumerate(container.get("envFrom") or []):
        sources = [key for key in ("configMapRef", "secretRef") if entry.get(key) is not None]
        if len(sources) != 1:
            message = (
                f"envFrom has {' and '.join(sources) or 'no source'}, it needs one of configMapRef, secretRef"
            )
            yield Refusal("conflict", (*path, "envFrom", index), message, "keep one")


def _sources(source: Json, path: Place) -> Iterator[Refusal]:
    for kind in ("secretKeyRef", "configMapKeyRef"):
        if isinstance(source.get(kind), dict) and not source[kind].get("name"):
            yield Refusal("conflict", (*path, kind), f"{kind} has no name", "give it name")
    field = (source.get("fieldRef") or {}).get("fieldPath")
    if isinstance(field, str) and not FIELD_PATH.fullmatch(field):
        message = f"{field!r} is not a field that a variable can be taken from"
        yield Refusal(
            "value", (*path, "fieldRef", "fieldPath"), message, "metadata.name, status.podIP and the like"
        )
    resource = (source.get("resourceFieldRef") or {}).get("resource")
    if isinstance(resource, str) and not RESOURCE_FIELD.fullmatch(resource):
        message = f"{resource!r} is not a resource that a variable can be taken from"
        yield Refusal(
            "value", (*path, "resourceFieldRef", "resource"), message, "limits.cpu, requests.memory ..."
        )


def _pod(pod: Json, path: Place) -> Iterator[Refusal]:
    yield from labels(pod.get("nodeSelector") or {}, (*path, "nodeSelector"))
    names: dict[str, Place] = {}
    for key in ("initContainers", "containers"):
        for index, container in enumerate(pod.get(key) or []):
            name, at = str(container.get("name")), (*path, key, index, "name")
            if name in names and names[name][-3] != key:
                message = f"a container and an init container are both named {name!r}"
                yield Refusal("conflict", at, message, "rename one")
            names[name] = at
    for index, toleration in enumerate(pod.get("tolerations") or []):
        yield from _toleration(toleration, (*path, "tolerations", index))
    if pod.get("dnsPolicy") == "None" and not (pod.get("dnsConfig") or {}).get("nameservers"):
        message = "dnsPolicy: None without dnsConfig.nameservers"
        yield Refusal("conflict", (*path, "dnsPolicy"), message, "name a server, or another dnsPolicy")
    if pod.get("hostPID") and pod.get("shareProcessNamespace"):
        message = "hostPID and shareProcessNamespace exclude each other"
        yield Refusal("conflict", (*path, "hostPID"), message, "drop one")
    for index, container in enumerate(pod.get("containers") or []):
        for number, port in enumerate(container.get("ports") or []):
            host = port.get("hostPort")
            if pod.get("hostNetwork") and host and host != port.get("containerPort"):
                message = (
                    f"with hostNetwork hostPort {host} has to be containerPort {port.get('containerPort')}"
                )
                at = (*path, "containers", index, "ports", number, "hostPort")
                yield Refusal("conflict", at, message, "leave hostPort out")
    for name in ("hostname", "subdomain"):
        value = pod.get(name)
        if isinstance(value, str) and value and not LABEL.fullmatch(value):
            yield from _dns_label(value, (*path, name), "host")


def _toleration(toleration: Json, path: Place) -> Iterator[Refusal]:
    operator, key, value = (toleration.get(field) for field in ("operator", "key", "value"))
    if operator == "Exists" and value:
        message = f"a toleration with operator Exists has the value {value!r}"
        yield Refusal("conflict", path, message, "leave value out, or operator: Equal")
    if not key and operator != "Exists":
        message = "a toleration without key needs operator: Exists"
        yield Refusal("conflict", path, message, "name the key, or operator: Exists")
    if toleration.get("tolerationSeconds") is not None and toleration.get("effect") != "NoExecute":
        message = "tolerationSeconds needs effect: NoExecute"
        yield Refusal("conflict", path, message, "effect: NoExecute, or drop tolerationSeconds")
    if isinstance(key, str) and key:
        yield from qualified(key, (*path, "key"), "label")


def image_problem(image: str) -> str:
    """Why no kubelet can pull an image of this name, or ""."""
    if image != image.strip():
        return "begins or ends with a blank"
    if re.search(r"\s", image):
        return "holds a blank"
    if "://" in image:
        return "begins with a scheme, which a registry's name does not have"
    name = image.partition("@")[0]
    path = name.rpartition(":")[0] if ":" in name.rsplit("/", 1)[-1] else name
    parts = path.split("/")
    repository = parts[1:] if len(parts) > 1 and re.search(r"[.:]|^localhost$|[A-Z]", parts[0]) else parts
    if any(re.search("[A-Z]", part) for part in repository):
        return "has capital letters, which only a tag may have"
    return "" if IMAGE.fullmatch(image) else "is not a name that a registry can have"


def resources(amounts: Json, kind: str, path: Place) -> Iterator[Refusal]:
    """``limits`` or ``requests``: names, and amounts below 0 or of a part of a device."""
    for name, value in amounts.items():
        at, number = (*path, kind, name), quantity(value)
        if "/" not in name and name not in STANDARD_RESOURCES and not name.startswith("hugepages-"):
            fix = (
                "nvidia.com/gpu, or the name under which the nodes offer it" if "gpu" in name.lower() else ""
            )
            message = f"{name!r} is no resource of a container"
            yield Refusal(
                "name", at, message, fix or f"one of {', '.join(STANDARD_RESOURCES)}, or a domain/name"
            )
        elif "/" in name and not QUALIFIED.fullmatch(name):
            yield from qualified(name, at, "resource")
        if number is None:
            continue
        if number < 0:
            yield Refusal("number", at, f"{name} is {value}, below 0", "give an amount")
        elif "/" in name and "kubernetes.io/" not in name and number != int(number):
            message = f"{name} is {value!r}: a device cannot be shared out, it has to be a whole number"
            yield Refusal(
                "number", at, message, "a whole number; shares of a GPU are MIG slices or time slicing"
            )
