"""Core/v1 as the API server validates it when the operator creates a pod.

A job's own admission looks at none of this: the job is taken, and no pod is ever created. Nor does the
published OpenAPI hold it, which has types alone: values, names, bounds and fields that exclude each other are
Go code (k8s.io/kubernetes 1.34, pkg/apis/core/validation).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from podtune.cluster.job.manifest import Json, dig
from podtune.cluster.lint.core_fields import BOUNDS, FORMS, NAME_FIXES, NAMED, PROBES, TEXTS, VALUES
from podtune.cluster.lint.diagnostic import By, Diagnostic, Place
from podtune.cluster.lint.names import labels, qualified
from podtune.cluster.lint.quantity import quantity

ENV_NAME = re.compile(r"[ -<>-~]+")
HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc")
STANDARD_RESOURCES = ("cpu", "memory", "ephemeral-storage")
GPU_FIX = "a whole number; shares of a GPU are MIG slices or time slicing"

SEE_THROUGH = {"matchExpressions", "matchFields"}  # their fields are of the object around them


def pod(spec: Json, path: Place) -> Iterator[Diagnostic]:
    """Refusals of the pod spec that stands at ``path``, under the codes PT020 to PT023."""
    yield from _below(spec, path, "spec")
    names: set[str] = {str(container.get("name")) for container in spec.get("initContainers") or []}
    for index, container in enumerate(spec.get("containers") or []):
        if (name := str(container.get("name"))) in names:
            message = f"a container and an init container are both named {name!r}"
            yield _conflict((*path, "containers", index, "name"), message, "rename one")
    if spec.get("dnsPolicy") == "None" and not dig(spec, "dnsConfig").get("nameservers"):
        fix = "name a server, or another dnsPolicy"
        yield _conflict((*path, "dnsPolicy"), "dnsPolicy: None without dnsConfig.nameservers", fix)


def trainer(spec: Json, path: Place) -> Iterator[Diagnostic]:
    """Refusals of what a TrainJob's spec.trainer hands on to its container."""
    own: Json = {key: spec[key] for key in ("env", "resourcesPerNode") if key in spec}
    yield from _below(own, path, "containers")


def _below(node: Json, path: Place, holder: str) -> Iterator[Diagnostic]:
    """Hold every field below ``node`` against the tables, and every object against its own check."""
    for key, value in node.items():
        at, inside = (*path, key), holder if key in SEE_THROUGH else key
        if isinstance(value, dict):
            yield from _object(value, at, inside)
        elif isinstance(value, list):
            inside = "containers" if key == "initContainers" else inside
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    yield from _object(item, (*at, index), inside)
        else:
            yield from _field(f"{holder}.{key}", value, at)


def _object(node: Json, path: Place, holder: str) -> Iterator[Diagnostic]:
    if holder == "volumeClaimTemplate":
        return
    if holder == "env":
        yield from _variable(node, path)
    elif holder in OBJECTS:
        yield from OBJECTS[holder](node, path)
    yield from _below(node, path, holder)


def _field(field: str, value: Any, path: Place) -> Iterator[Diagnostic]:
    name = path[-1]
    if field in TEXTS:
        if value not in TEXTS[field] and (value != "" or "Selector" in field or "preference" in field):
            wanted = ", ".join(VALUES[field].split())
            message = f"{name} is {value!r}, none of {wanted}"
            yield Diagnostic(path, message, fix=f"use one of {wanted}", code="PT020")
    elif field in BOUNDS:
        low, high = BOUNDS[field]
        if isinstance(value, int | float) and (value < low or (high is not None and value > high)):
            span = f"{low} to {high}" if high is not None else f"{low} or more"
            message = f"{name} is {value}, it has to be {span}"
            yield Diagnostic(path, message, fix=f"use {span}", code="PT023")
    elif field in NAMED:
        what, form = NAMED[field]
        if (
            isinstance(value, str)
            and not form.fullmatch(value)
            and (value or what in ("container", "volume"))
        ):
            message = f"{value!r} cannot be the name of a {what}"
            # the API server takes any name of a claim; the pod then waits for one that cannot exist
            by: By = "hang" if name == "claimName" else ""
            yield Diagnostic(path, message, fix=NAME_FIXES[form], code="PT021", by=by)
    elif field in FORMS:
        code, pattern, problem, fix = FORMS[field]
        if isinstance(value, str) and not re.fullmatch(pattern, value, re.DOTALL):
            yield Diagnostic(path, f"{name} is {value!r}, {problem}", fix=fix, code=code)


def _conflict(path: Place, message: str, fix: str) -> Diagnostic:
    return Diagnostic(path, message, fix=fix, code="PT022")


def _variable(entry: Json, path: Place) -> Iterator[Diagnostic]:
    name, source = entry.get("name"), entry.get("valueFrom")
    if isinstance(name, str) and not ENV_NAME.fullmatch(name):
        message, fix = f"{name!r} cannot be the name of a variable", "letters, digits and '_', no '='"
        yield Diagnostic((*path, "name"), message, fix=fix, code="PT021")
    if isinstance(source, dict) and entry.get("value"):
        yield _conflict(path, f"{name} has a value and a valueFrom", "keep one of value and valueFrom")
    if isinstance(source, dict) and len(source) != 1:
        message = f"valueFrom of {name} has {' and '.join(source) or 'no source'}, it needs exactly one"
        yield _conflict((*path, "valueFrom"), message, "keep one source")


def _container(container: Json, path: Place) -> Iterator[Diagnostic]:
    seen: set[str] = set()
    for index, port in enumerate(container.get("ports") or []):
        if (name := str(port.get("name") or "")) and name in seen:
            yield _conflict((*path, "ports", index, "name"), f"two ports are named {name!r}", "rename one")
        seen.add(name)
    security = dig(container, "securityContext")
    if security.get("privileged") and security.get("allowPrivilegeEscalation") is False:
        message = "privileged: true and allowPrivilegeEscalation: false exclude each other"
        yield _conflict((*path, "securityContext"), message, "drop one")


def _one_of(options: tuple[str, ...]) -> Callable[[Json, Place], Iterator[Diagnostic]]:
    """A check of an object that sets exactly one of ``options``."""

    def check(node: Json, path: Place) -> Iterator[Diagnostic]:
        given = [key for key in options if node.get(key) is not None]
        if len(given) != 1:
            name = next(key for key in reversed(path) if isinstance(key, str))
            has = " and ".join(given) or "none"
            yield _conflict(path, f"{name} has {has}, it needs one of {', '.join(options)}", "keep one")

    return check


def _reference(field: str) -> Callable[[Json, Place], Iterator[Diagnostic]]:
    """A check of an object that refers to another by the name in ``field``."""

    def check(node: Json, path: Place) -> Iterator[Diagnostic]:
        if not node.get(field):
            yield _conflict(path, f"{path[-1]} has no {field}", f"give it {field}")

    return check


def _node_affinity(node: Json, path: Place) -> Iterator[Diagnostic]:
    if node.get("nodeSelectorTerms") == []:
        yield _conflict((*path, "nodeSelectorTerms"), "nodeSelectorTerms is empty", "name a term")


def _requirement(node: Json, path: Place) -> Iterator[Diagnostic]:
    """Check an expression of a selector: In and NotIn have values, Exists and DoesNotExist none."""
    operator, values = node.get("operator"), node.get("values") or []
    if operator in ("Exists", "DoesNotExist") and values:
        yield _conflict(path, f"{operator} takes no values", "leave values out, or operator: In")
    elif operator in ("In", "NotIn") and not values:
        yield _conflict(path, f"{operator} has no values", "name a value, or operator: Exists")


def _volume(volume: Json, path: Place) -> Iterator[Diagnostic]:
    sources = [key for key in volume if key != "name"]
    if len(sources) > 1:
        message = f"the volume {volume.get('name')!r} has {len(sources)} sources, {' and '.join(sources)}"
        yield _conflict(path, message, "keep one")
    for source, field in (("configMap", "name"), ("secret", "secretName")):
        if isinstance(volume.get(source), dict):
            yield from _reference(field)(volume[source], (*path, source))
    size = quantity(dig(volume, "emptyDir").get("sizeLimit"))
    if size is not None and size < 0:
        place = (*path, "emptyDir", "sizeLimit")
        yield Diagnostic(place, "sizeLimit is below 0", fix="leave it out", code="PT023")


def _toleration(toleration: Json, path: Place) -> Iterator[Diagnostic]:
    operator, key, value = (toleration.get(field) for field in ("operator", "key", "value"))
    if operator == "Exists" and value:
        message = f"a toleration with operator Exists has the value {value!r}"
        yield _conflict(path, message, "leave value out, or operator: Equal")
    if not key and operator != "Exists":
        message = "a toleration without key needs operator: Exists"
        yield _conflict(path, message, "name the key, or operator: Exists")
    if toleration.get("tolerationSeconds") is not None and toleration.get("effect") != "NoExecute":
        fix = "effect: NoExecute, or drop tolerationSeconds"
        yield _conflict(path, "tolerationSeconds needs effect: NoExecute", fix)
    if isinstance(key, str) and key:
        yield from qualified(key, (*path, "key"), "label")


def _amounts(amounts: Json, path: Place) -> Iterator[Diagnostic]:
    """Names of ``limits`` or ``requests``, amounts below 0 and parts of a device."""
    for name, value in amounts.items():
        at, number = (*path, name), quantity(value)
        if "/" not in name and name not in STANDARD_RESOURCES and not name.startswith("hugepages-"):
            fix = f"one of {', '.join(STANDARD_RESOURCES)}, or a domain/name"
            fix = (
                "nvidia.com/gpu, or the name under which the nodes offer it" if "gpu" in name.lower() else fix
            )
            yield Diagnostic(at, f"{name!r} is not a resource of a container", fix=fix, code="PT021")
        elif "/" in name:
            yield from qualified(name, at, "resource")
        if number is None:
            continue
        if number < 0:
            yield Diagnostic(at, f"{name} is {value}, below 0", fix="give an amount", code="PT023")
        elif "/" in name and "kubernetes.io/" not in name and number != int(number):
            message = f"{name} is {value!r}: a device cannot be shared out, it has to be a whole number"
            yield Diagnostic(at, message, fix=GPU_FIX, code="PT023")


#: the key that holds an object, or its list -> the check of the object
OBJECTS: dict[str, Callable[[Json, Place], Iterator[Diagnostic]]] = {
    "containers": _container,
    "volumes": _volume,
    "tolerations": _toleration,
    "requiredDuringSchedulingIgnoredDuringExecution": _node_affinity,
    **dict.fromkeys(("nodeSelectorTerms", "preference", "labelSelector"), _requirement),
    "nodeSelector": labels,
    "matchLabels": labels,
    "limits": _amounts,
    "requests": _amounts,
    "envFrom": _one_of(("configMapRef", "secretRef")),
    **dict.fromkeys(PROBES, _one_of(HANDLERS)),
    **dict.fromkeys(("secretKeyRef", "configMapKeyRef"), _reference("name")),
}
