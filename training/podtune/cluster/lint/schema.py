"""The strict check of a document against the CRD's schema (pytorchjob.schema.json, made by
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

Path_ = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """One violation. ``kind`` is "unknown", "type", "missing", "pattern" or "duplicate"; ``expected`` depends
    on it.
    """

    kind: str
    path: Path_
    value: Any
    expected: Any


@cache
def pytorchjob_schema() -> dict[str, Any]:
    """The schema of a whole PyTorchJob document."""
    schema: dict[str, Any] = json.loads(
        Path(__file__).with_name("pytorchjob.schema.json").read_text(encoding="utf-8")
    )
    return schema


_WORDS = {"type": "array", "items": {"type": "string"}}
_ENV = {
    "type": "array",
    "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
}
_AMOUNTS = {"type": "object", "additionalProperties": {"type": ["integer", "string"]}}
#: the parts of a TrainJob that the rules read; other fields are the API server's business
TRAINJOB_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "metadata": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
        "spec": {
            "type": "object",
            "required": ["runtimeRef"],
            "properties": {
                "runtimeRef": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string"}, "kind": {"type": "string"}},
                },
                "podSpecOverrides": {"type": "array", "items": {"type": "object"}},
                "trainer": {
                    "type": "object",
                    "properties": {
                        "numNodes": {"type": "integer"},
                        "numProcPerNode": {"type": ["integer", "string"]},
                        "image": {"type": "string"},
                        "command": _WORDS,
                        "args": _WORDS,
                        "env": _ENV,
                        "resourcesPerNode": {
                            "type": "object",
                            "properties": {"limits": _AMOUNTS, "requests": _AMOUNTS},
                        },
                    },
                },
            },
        },
    },
}


def check(value: Any, schema: dict[str, Any], problems: list[Problem], path: Path_ = ()) -> Any:
    """Append what is wrong with ``value`` to ``problems``; return it without the parts that are of a wrong
    type or null.

    Like the API server, it reads null as absent. What comes back is safe for the other rules to walk.
    """
    kinds = schema.get("type")
    if kinds is not None and not _is(value, kinds):
        problems.append(Problem("type", path, value, kinds))
        return None
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        problems.append(Problem("pattern", path, value, schema["pattern"]))
    if isinstance(value, dict):
        return _check_object(value, schema, problems, path)
    if isinstance(value, list) and "items" in schema:
        _check_keys(value, schema.get("x-kubernetes-list-map-keys", ()), problems, path)
        items = [check(item, schema["items"], problems, (*path, index)) for index, item in enumerate(value)]
        return [item for item in items if item is not None]
    return value


def _check_object(
    value: dict[Any, Any], schema: dict[str, Any], problems: list[Problem], path: Path_
) -> dict[str, Any]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    kept: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            problems.append(Problem("type", (*path, str(key)), key, "string as a key"))
        elif item is None and key not in schema.get("required", ()):
            continue
        elif key in known or isinstance(others, dict):
            checked = (
                check(item, known.get(key, others), problems, (*path, key)) if item is not None else None
            )
            if checked is not None:
                kept[key] = checked
        elif others is False:
            problems.append(Problem("unknown", (*path, key), item, known))
        else:
            kept[key] = item
    for key in schema.get("required", ()):
        if value.get(key) is None:
            problems.append(Problem("missing", (*path, key), None, key))
    return kept


def _check_keys(items: list[Any], keys: list[str], problems: list[Problem], path: Path_) -> None:
    """Lists that Kubernetes keeps as maps refuse two items with the same key: containers and env by name,
    mounts by path.
    """
    seen: list[list[Any]] = []
    for index, item in enumerate(items):
        identity = [item.get(key) for key in keys] if isinstance(item, dict) else []
        if any(part is not None for part in identity):
            if identity in seen:
                problems.append(Problem("duplicate", (*path, index), item, keys[0]))
            seen.append(identity)


def _is(value: Any, kinds: str | list[str]) -> bool:
    if isinstance(kinds, list):
        return any(_is(value, kind) for kind in kinds)
    match kinds:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return (isinstance(value, int) and not isinstance(value, bool)) or (
                isinstance(value, float) and value.is_integer()
            )
        case _:
            return isinstance(value, int | float) and not isinstance(value, bool)


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
