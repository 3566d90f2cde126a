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
from podtune.cluster.lint.core_fields import BOUNDS, FORMS, PROBES
from podtune.cluster.lint.diagnostic import Diagnostic, Place
from podtune.cluster.lint.names import labels, qualified
from podtune.cluster.lint.quantity import quantity

ENV_NAME = re.compile(r"[ -<>-~]+")
HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc")
STANDARD_RESOURCES = ("cpu", "memory", "ephemeral-storage")
GPU_FIX = "a whole number; shares of a GPU are MIG slices or time slicing"
DEVICE_FIX = "nvidia.com/gpu, or the name under which the nodes offer it"
#: keys whose fields are of the object around them, and one that is checked as another
SAME_AS = {"matchExpressions": "", "matchFields": "", "initContainers": "containers"}


def refusals(node: Json, path: Place, holder: str) -> Iterator[Diagnostic]:
    """Refusals of the object at ``path``, which ``holder`` holds, under the codes PT020 to PT023.

    Every field is held against the tables, and every object below against its own check.
    """
    if holder in OBJECTS:
        yield from OBJECTS[holder](node, path)
    for key, value in node.items():
        inside = SAME_AS.get(key, key) or holder
        # whose spec is a claim's, not a pod's
        if isinstance(value, dict) and key != "volumeClaimTemplate":
            yield from refusals(value, (*path, key), inside)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    yield from refusals(item, (*path, key, index), inside)
        else:
            yield from _field(f"{holder}.{key}", value, (*path, key))


def _field(field: str, value: Any, path: Place) -> Iterator[Diagnostic]:
    form, (low, high) = FORMS.get(field), BOUNDS.get(field, (None, 0))
    if form and isinstance(value, str) and not form.pattern.fullmatch(value):
        message = f"{path[-1]} is {value!r}, {form.problem}"
        yield Diagnostic(path, message, fix=form.fix, by=form.by, code=form.code)
    elif low is not None and isinstance(value, int | float) and not low <= value <= high:
        span = f"{low} to {high}" if high < float("inf") else f"{low} or more"
        message = f"{path[-1]} is {value}, it has to be {span}"
        yield Diagnostic(path, message, fix=f"use {span}", code="PT023")


def _conflict(path: Place, message: str, fix: str) -> Diagnostic:
    return Diagnostic(path, message, fix=fix, code="PT022")


def _pod(spec: Json, path: Place) -> Iterator[Diagnostic]:
    names = {container.get("name") for container in spec.get("initContainers") or []}
    for index, container in enumerate(spec.get("containers") or []):
        if (name := container.get("name")) in names:
            message = f"a container and an init container are both named {name!r}"
            yield _conflict((*path, "containers", index, "name"), message, "rename one")
    if spec.get("dnsPolicy") == "None" and not dig(spec, "dnsConfig").get("nameservers"):
        fix = "name a server, or another dnsPolicy"
        yield _conflict((*path, "dnsPolicy"), "dnsPolicy: None without dnsConfig.nameservers", fix)


def _variable(entry: Json, path: Place) -> Iterator[Diagnostic]:
    name, source = entry.get("name"), entry.get("valueFrom")
    if isinstance(name, str) and not ENV_NAME.fullmatch(name):
        message, fix = f"{name!r} cannot be the name of a variable", "letters, digits and '_', no '='"
        yield Diagnostic((*path, "name"), message, fix=fix, code="PT021")
    if source is not None and entry.get("value"):
        yield _conflict(path, f"{name} has a value and a valueFrom", "keep one of value and valueFrom")


def _container(container: Json, path: Place) -> Iterator[Diagnostic]:
    names = [port.get("name") for port in container.get("ports") or []]
    for index, name in enumerate(names):
        if name and name in names[:index]:
            yield _conflict((*path, "ports", index, "name"), f"two ports are named {name!r}", "rename one")
    security = dig(container, "securityContext")
    if security.get("privileged") and security.get("allowPrivilegeEscalation") is False:
        message = "privileged: true and allowPrivilegeEscalation: false exclude each other"
        yield _conflict((*path, "securityContext"), message, "drop one")


def _one_of(*options: str) -> Callable[[Json, Place], Iterator[Diagnostic]]:
    """A check of an object that sets exactly one of ``options``, or any one field where none are named."""

    def check(node: Json, path: Place) -> Iterator[Diagnostic]:
        given = [key for key in options or node if node.get(key) is not None]
        if len(given) != 1:
            name = next(key for key in reversed(path) if isinstance(key, str))
            has, wanted = " and ".join(given) or "none", ", ".join(options) or "its sources"
            yield _conflict(path, f"{name} has {has}, it needs one of {wanted}", "keep one")

    return check


def _reference(node: Json, path: Place) -> Iterator[Diagnostic]:
    if not (node.get("name") or node.get("secretName")):
        yield _conflict(path, f"{path[-1]} has no name", "name the object that it refers to")


def _requirement(node: Json, path: Place) -> Iterator[Diagnostic]:
    """Check an expression of a selector: In and NotIn have values, Exists and DoesNotExist none."""
    operator, values = node.get("operator"), node.get("values") or []
    if operator in ("Exists", "DoesNotExist") and values:
        yield _conflict(path, f"{operator} takes no values", "leave values out, or operator: In")
    elif operator in ("In", "NotIn") and not values:
        yield _conflict(path, f"{operator} has no values", "name a value, or operator: Exists")


def _affinity(node: Json, path: Place) -> Iterator[Diagnostic]:
    if node.get("nodeSelectorTerms") == []:
        yield _conflict((*path, "nodeSelectorTerms"), "nodeSelectorTerms is empty", "name a term")


def _volume(volume: Json, path: Place) -> Iterator[Diagnostic]:
    sources = [key for key in volume if key != "name"]
    if len(sources) > 1:
        message = f"the volume {volume.get('name')!r} has {len(sources)} sources, {' and '.join(sources)}"
        yield _conflict(path, message, "keep one")


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
    if key:
        yield from qualified(key, (*path, "key"), "label")


def _amounts(amounts: Json, path: Place) -> Iterator[Diagnostic]:
    """Names of ``limits`` or ``requests``, amounts below 0 and parts of a device."""
    for name, value in amounts.items():
        at, number = (*path, name), quantity(value) or 0
        if "/" in name:
            yield from qualified(name, at, "resource")
        elif name not in STANDARD_RESOURCES and not name.startswith("hugepages-"):
            fix = DEVICE_FIX if "gpu" in name.lower() else f"one of {', '.join(STANDARD_RESOURCES)}"
            yield Diagnostic(at, f"{name!r} is not a resource of a container", fix=fix, code="PT021")
        if number < 0:
            yield Diagnostic(at, f"{name} is {value}, below 0", fix="give an amount", code="PT023")
        # extended resources are counted in whole devices
        elif "/" in name and "kubernetes.io/" not in name and number != int(number):
            message = f"{name} is {value!r}: a device cannot be shared out, it has to be a whole number"
            yield Diagnostic(at, message, fix=GPU_FIX, code="PT023")


#: the key that holds an object, or its list -> the check of the object
OBJECTS: dict[str, Callable[[Json, Place], Iterator[Diagnostic]]] = {
    "spec": _pod,
    "containers": _container,
    "env": _variable,
    "valueFrom": _one_of(),
    "volumes": _volume,
    "tolerations": _toleration,
    "requiredDuringSchedulingIgnoredDuringExecution": _affinity,
    **dict.fromkeys(("nodeSelectorTerms", "preference", "labelSelector"), _requirement),
    **dict.fromkeys(("nodeSelector", "matchLabels"), labels),
    **dict.fromkeys(("limits", "requests"), _amounts),
    "envFrom": _one_of("configMapRef", "secretRef"),
    **dict.fromkeys(PROBES, _one_of(*HANDLERS)),
    **dict.fromkeys(("secretKeyRef", "configMapKeyRef", "configMap", "secret"), _reference),
}
