"""Refusals of the chart's schema and templates as errors that name the value."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from podtune.run.errors import ConfigError, UserError, near

Values = dict[Any, Any]


def explained(message: str, values: Values, chart: Path) -> UserError:
    """Helm's message as an error with the path of the value, what is wrong and the fix.

    ``values`` are the effective ones, the chart's defaults included.
    """
    # WHERE: WHAT | fix: FIX, as the templates say it
    form = r"execution error at \([^)]*\): ([^:]+): ([^|\n]+?)(?: \| fix: ([^\n]+))?$"
    if refusal := re.search(form, message, re.MULTILINE):
        return ConfigError(refusal[2], where=refusal[1], fix=refusal[3] or "")
    schema = "schema" in message or "- at '" in message
    found = _schema_error(values, chart) if schema else None
    return found or ConfigError(" ".join(message.split())[:600], where="values" if schema else "chart")


def _schema_error(values: Values, chart: Path) -> UserError | None:
    """The first refusal of the schema, found again by jsonschema, which names the place better than Helm."""
    try:
        import jsonschema
    except ImportError:
        return None
    schema = json.loads((chart / "values.schema.json").read_text(encoding="utf-8"))
    # An unknown key explains most of the others, a forbidden combination none.
    errors = sorted(
        jsonschema.Draft7Validator(schema).iter_errors(values),
        key=lambda error: (
            "allOf" in error.absolute_schema_path,
            error.validator != "additionalProperties",
            list(map(str, error.path)),
        ),
    )
    if not errors:
        return None
    error, path = errors[0], errors[0].json_path.removeprefix("$").lstrip(".")
    if error.validator == "additionalProperties":
        keys = error.schema["properties"]
        unknown = sorted(set(error.instance) - set(keys))[0]
        fix = f"{near(unknown, keys).removeprefix('; ')} known here: {', '.join(sorted(keys))}".strip()
        return ConfigError("unknown key in the values", where=f"{path}.{unknown}".lstrip("."), fix=fix)
    what, fix = error.message, "charts/podtune/README.md says what each value means"
    if error.absolute_schema_path[0] == "allOf":  # a combination, which the schema describes
        what, _, fix = schema["allOf"][error.absolute_schema_path[1]]["description"].partition("; ")
    elif path == "config":
        fix = "write it as a text block: config: |"
    return ConfigError(what[:400], where=path or "values", fix=fix)
