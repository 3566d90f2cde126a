"""The strict check of a document against its CRD's schema.

The schemas (*.schema.json) are made by scripts/build_crd_schema.py. A walker of the few keywords that a CRD
uses, instead of the jsonschema library, since it also gives back the document without what is wrong in it; a
test holds it equal to the library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from podtune.cluster.job.manifest import Json
from podtune.cluster.lint.diagnostic import Diagnostic, Place
from podtune.run.errors import near

Schema = dict[str, Any]  # JSON Schema, of the keywords that a CRD uses
#: what envsubst, Katib or a template engine fills in before the API server sees it
VARIABLE = re.compile(r"\$\{[^}]*\}|^\$[A-Za-z_]\w*$|\{\{.*\}\}")
TYPES: dict[str, type | tuple[type, ...]] = {
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "string": str,
    "array": list,
    "object": dict,
}
TYPE_NAMES: dict[type, str] = {
    int: "a number",
    float: "a number",
    bool: "a boolean",
    str: "a string",
    list: "a list",
    dict: "a mapping",
    type(None): "empty",
}
#: fields that people put into spec.trainer, and what to do instead
POD_FIELDS = ("volumeMounts", "volumes", "nodeSelector", "tolerations")
OF_THE_POD = "a TrainJob sets it in podTemplateOverrides (Trainer 2.1), runtimePatches (2.2), or the runtime"
#: the keywords for the smallest and the largest of a type, and the unit
BOUNDS: dict[type, tuple[str, str, str]] = {
    str: ("minLength", "maxLength", " characters"),
    list: ("minItems", "maxItems", " items"),
}


@cache
def _roots(file: str) -> dict[str, Schema]:
    content = json.loads(Path(__file__).with_name(f"{file}.schema.json").read_text(encoding="utf-8"))
    nodes = content["nodes"]
    for node in nodes:
        if "properties" in node:
            node["properties"] = {key: nodes[number] for key, number in node["properties"].items()}
        for key in ("items", "additionalProperties"):
            if type(node.get(key)) is int:
                node[key] = nodes[node[key]]
    return {name: nodes[number] for name, number in content["roots"].items()}


def schema(name: str) -> Schema:
    """The schema of a whole document: ``pytorchjob-1.9``, ``trainjob-2.1``, ``runtime-2.3``."""
    return _roots("pytorchjob" if name.startswith("pytorchjob") else "trainer")[name]


class SchemaCheck:
    """A check of one document; ``found`` has what it violates, under the codes PT002 to PT008.

    Args:
        text_at: the scalar at a place as it is written, for the fix.
    """

    def __init__(self, text_at: Callable[[Place], str | None] = lambda place: None) -> None:
        self.text_at = text_at
        self.found: list[Diagnostic] = []

    def cleaned(self, value: object, schema: Schema, path: Place = ()) -> object:
        """``value`` without the parts that are of a wrong type or null, safe for the rules to walk.

        Like the API server, it reads null as absent. A variable of a template where a number is wanted
        becomes 1.
        """
        kinds = schema.get("type", [])
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if kinds and not any(_is(value, kind) for kind in kinds):
            if isinstance(value, str) and VARIABLE.search(value):
                self._add("PT008", path, f"{_last(path)} is the variable {value}")
                return 1 if kinds[0] in ("integer", "number") and len(kinds) == 1 else None
            self._wrong_type(value, " or ".join(kinds), path)
            return None
        if isinstance(value, dict):
            return self.mapping(value, schema, path)
        self._bounds(value, schema, path)
        if isinstance(value, list) and "items" in schema:
            self._unique(value, schema.get("x-kubernetes-list-map-keys", []), path)
            items = [self.cleaned(item, schema["items"], (*path, index)) for index, item in enumerate(value)]
            return [item for item in items if item is not None]
        return value

    def _add(self, code: str, path: Place, message: str, fix: str = "") -> None:
        self.found.append(Diagnostic(path, message, fix=fix, code=code))

    def mapping(self, value: Json, schema: Schema, path: Place = ()) -> dict[str, object]:
        """:meth:`cleaned` of a whole document, or of a mapping in it."""
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        required = schema.get("required", ())
        kept: dict[str, object] = {}
        for key, item in value.items():
            if key not in properties and others is False and item is not None:
                fix = OF_THE_POD if path == ("spec", "trainer") and key in POD_FIELDS else ""
                self._add("PT002", (*path, key), f"{key!r} is not a field here{near(key, properties)}", fix)
            elif item is None and "/" in key and _last(path) in ("limits", "requests"):
                message, fix = f"{key} has no number", "write how many"
                self.found.append(Diagnostic((*path, key), message, "warning", fix, code="PT308"))
            elif item is not None:
                part = properties.get(key, others if isinstance(others, dict) else {})
                checked = self.cleaned(item, part, (*path, key))
                kept |= {key: checked} if checked is not None else {}
        for key in required:
            if value.get(key) is None:
                self._add("PT004", (*path, key), f"{key!r} is required here")
        return kept

    def _bounds(self, value: Any, schema: Schema, path: Place) -> None:
        pattern = schema.get("pattern")
        text = isinstance(value, str) and not VARIABLE.search(value)
        # search, not match: a pattern of JSON Schema is not anchored
        if pattern and text and not re.search(pattern, value):
            quantity = "numkMGTPE" in pattern
            problem = "is not a quantity" if quantity else f"does not fit {pattern}"
            fix = "write it as Kubernetes does: 2, 500m, 16Gi" if quantity else "correct it"
            self._add("PT005", path, f"{value!r} {problem}", fix)
        low, high, unit = BOUNDS.get(type(value), ("minimum", "maximum", ""))
        size = len(value) if unit else value
        wanted = ""
        if low in schema and size < schema[low]:
            wanted = f"at least {schema[low]}{unit}"
        elif high in schema and size > schema[high]:
            wanted = f"at most {schema[high]}{unit}"
        elif "enum" in schema and value not in schema["enum"]:
            wanted = "one of " + ", ".join(map(str, schema["enum"]))
        if wanted:
            self._add("PT005", path, f"{_last(path)} has to be {wanted}", "correct it")

    def _unique(self, items: list[Any], keys: list[str], path: Place) -> None:
        """Refuse a second item of one key in a list that Kubernetes keeps as a map: env by name."""
        seen: set[str] = set()
        for index, item in enumerate(items):
            values = [item.get(key) for key in keys] if isinstance(item, dict) else []
            if repr(values) in seen and any(value is not None for value in values):
                self._add("PT007", (*path, index), f"{_last(path)} has {keys[0]} {values[0]!r} twice")
            seen.add(repr(values))

    def _wrong_type(self, value: Any, wanted: str, path: Place) -> None:
        last = _last(path)
        name = f"{path[-2]}[{last}]" if isinstance(last, int) else last or "the document"
        is_a = TYPE_NAMES.get(type(value), type(value).__name__)
        message = f"{name} is {is_a}, the schema wants {wanted}"
        self._add("PT003", path, message, self._correction(value, wanted, path))

    def _correction(self, value: Any, wanted: str, path: Place) -> str:
        text, name = self.text_at(path), _last(path)
        before = f"{name}:" if isinstance(name, str) else "-"
        if wanted == "array":
            return "write it as a list: [...]"
        if wanted == "integer or string" and isinstance(value, float) and "/" in str(name):
            return "a whole number; shares of a GPU are MIG slices or time slicing"
        if text and "string" in wanted and isinstance(value, int | float | bool):
            return f'quote it: {before} "{text}"'
        if text and (wanted, text.lower()) in (("boolean", "true"), ("boolean", "false")):
            return f"without quotes: {before} {text.lower()}"
        return f"without quotes: {before} {text}" if text and wanted == "integer" and text.isdigit() else ""


def _last(path: Place) -> str | int:
    return path[-1] if path else ""


def _is(value: Any, kind: str) -> bool:
    # a bool is an int to Python, not to JSON
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, TYPES[kind])
