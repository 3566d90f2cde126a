"""A JSON Schema of the training YAML, for editors: names, types and bounds of every key. Needs no torch.

Only what can be said of one key alone; contradictions between keys are :mod:`podtune.sft.config.settings`'s.
"""

from __future__ import annotations

from typing import Any

from podtune.sft.config.keys import known_keys
from podtune.sft.config.settings import RENAMED

# YAML 1.1 takes 2e-5 without a point for text, and the reader takes it for the number that it is
_TYPES = {
    "bool": ["boolean", "null"],
    "int": ["integer", "null"],
    "float": ["number", "string", "null"],
    "list": ["array", "string", "null"],
}


def json_schema() -> dict[str, Any]:
    """The schema, as data."""
    properties = {name: _property(spec) for name, spec in known_keys().items()}
    properties["env"] = {"type": "object", "description": "environment variables to set first"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "podtune: a fine-tune",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "not": {"anyOf": [{"required": [name]} for name in RENAMED if name not in properties]},
    }


def _property(spec: dict[str, Any]) -> dict[str, Any]:
    about: dict[str, Any] = {"default": spec["default"]}
    if help_text := spec.get("help"):
        about["description"] = help_text
    if choices := spec.get("choices"):
        about["enum"] = [*choices, None]
    elif types := _TYPES.get(spec["type"]):
        about["type"] = types
    if "at_least" in spec:
        about["minimum"] = spec["at_least"]
    if "above" in spec:
        about["exclusiveMinimum"] = spec["above"]
    return about
