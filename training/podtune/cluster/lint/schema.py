"""The strict check of a document against its CRD's schema (*.schema.json, made by
scripts/build_crd_schema.py).

A walker of the few keywords that a CRD uses, instead of the jsonschema library, whose import alone takes as
long as all of ``podtune lint`` may; a test holds it equal to the library.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Place = tuple[str | int, ...]

#: what envsubst, Katib or a template engine fills in before the API server sees it
VARIABLE = re.compile(r"\$\{[^}]*\}|^\$[A-Za-z_]\w*$|\{\{.*\}\}")


@dataclass(frozen=True)
class Violation:
    """One violation.

    ``kind`` is "unknown", "type", "missing", "pattern", "bound" or "duplicate"; ``expected`` depends on it.
    """

    kind: str
    path: Place
    value: Any
    expected: Any


@cache
def _roots(file: str) -> dict[str, Json]:
    content = json.loads(Path(__file__).with_name(f"{file}.schema.json").read_text(encoding="utf-8"))
    nodes = content["nodes"]
    for node in nodes:
        if "properties" in node:
            node["properties"] = {key: nodes[number] for key, number in node["properties"].items()}
        for key in ("items", "additionalProperties"):
            if type(node.get(key)) is int:
                node[key] = nodes[node[key]]
    return {name: nodes[number] for name, number in content["roots"].items()}


def schema(name: str) -> Json:
    """The schema of a whole document: ``pytorchjob-1.9``, ``trainjob-2.1``, ``runtime-2.3``."""
    return _roots("pytorchjob" if name.startswith("pytorchjob") else "trainer")[name]


def check(value: Any, schema: Json, violations: list[Violation], path: Place = ()) -> Any:
    """Append what is wrong with ``value`` to ``violations``; return it without the parts that are of a wrong
    type or null.

    Like the API server, it reads null as absent. What comes back is safe for the rules to walk. Where a
    number is wanted and a variable of a template stands, that is a violation of the kind "variable", and 1
    comes back.
    """
    kinds = schema.get("type")
    if kinds is not None and not _is(value, kinds):
        if isinstance(value, str) and VARIABLE.search(value):
            violations.append(Violation("variable", path, value, kinds))
            return 1 if kinds in ("integer", "number") else None
        violations.append(Violation("type", path, value, kinds))
        return None
    if isinstance(value, dict):
        return _check_object(value, schema, violations, path)
    if isinstance(value, list):
        _check_bounds(value, schema, violations, path)
        if "items" not in schema:
            return value
        if "x-kubernetes-list-map-keys" in schema:
            _check_keys(value, schema["x-kubernetes-list-map-keys"], violations, path)
        items = [check(item, schema["items"], violations, (*path, index)) for index, item in enumerate(value)]
        return [item for item in items if item is not None]
    if len(schema) > 1:
        _check_bounds(value, schema, violations, path)
    return value


def _check_object(value: Json, schema: Json, violations: list[Violation], path: Place) -> Json:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    required = schema.get("required", ())
    kept: Json = {}
    for key, item in value.items():
        if item is None and key not in required:
            continue
        if key in properties or isinstance(others, dict):
            part = properties.get(key, others)
            checked = check(item, part, violations, (*path, key)) if item is not None else None
            if checked is not None:
                kept[key] = checked
        elif others is False:
            violations.append(Violation("unknown", (*path, key), item, properties))
        else:
            kept[key] = item
    for key in required:
        if value.get(key) is None:
            violations.append(Violation("missing", (*path, key), None, key))
    return kept


def _check_bounds(value: Any, schema: Json, violations: list[Violation], path: Place) -> None:
    text = isinstance(value, str)
    pattern = schema.get("pattern") if text else None
    if pattern and not _pattern(pattern).search(value) and not VARIABLE.search(value):
        violations.append(Violation("pattern", path, value, pattern))
    size = len(value) if isinstance(value, str | list) else value
    low = schema.get("minLength" if text else "minItems" if isinstance(value, list) else "minimum")
    high = schema.get("maxLength" if text else "maxItems" if isinstance(value, list) else "maximum")
    unit = " characters" if text else " items" if isinstance(value, list) else ""
    if low is not None and size < low:
        violations.append(Violation("bound", path, value, f"at least {low}{unit}"))
    if high is not None and size > high:
        violations.append(Violation("bound", path, value, f"at most {high}{unit}"))
    if "enum" in schema and value not in schema["enum"]:
        wanted = ", ".join(str(value) for value in schema["enum"])
        violations.append(Violation("bound", path, value, f"one of {wanted}"))


@cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text.removesuffix("$") + r"\Z" if text.endswith("$") else text)


def _check_keys(items: list[Any], keys: list[str], violations: list[Violation], path: Place) -> None:
    """Lists that Kubernetes keeps as maps refuse two items with the same key: containers and env by name,
    mounts by path."""
    seen: set[tuple[str, ...]] = set()
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            continue
        identity = tuple(repr(item.get(key)) for key in keys)
        if identity in seen and any(item.get(key) is not None for key in keys):
            violations.append(Violation("duplicate", (*path, index), item, keys[0]))
        seen.add(identity)


def _is(value: Any, kinds: str | list[str]) -> bool:
    if kinds == "string":
        return isinstance(value, str)
    if kinds == "object":
        return isinstance(value, dict)
    if kinds == "array":
        return isinstance(value, list)
    if isinstance(kinds, list):
        return any(_is(value, kind) for kind in kinds)
    if isinstance(value, bool):
        return kinds == "boolean"
    if kinds == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return kinds == "number" and isinstance(value, int | float)


def type_name(value: Any) -> str:
    """How people call the YAML type of ``value``."""
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "a mapping",
        type(None): "empty",
    }
    return names.get(type(value), type(value).__name__)
