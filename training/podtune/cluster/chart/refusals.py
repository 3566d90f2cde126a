"""Refusals of the chart's schema and templates as errors that name the value."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from podtune.cluster.chart.values import documented
from podtune.run.errors import ConfigError, UserError, near

Values = dict[Any, Any]


def explained(message: str, values: Values, chart: Path) -> UserError:
    """Helm's message as an error with the path of the value, what is wrong and the fix.

    ``values`` are the effective ones, the chart's defaults included.
    """
    refusal = re.search(
        r"execution error at \([^)]*\): ([^:]+): ([^|\n]+?)(?: \| fix: ([^\n]+))?$", message, re.M
    )
    if refusal:
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
        return _unknown_key(error, path)
    structural = isinstance(error.instance, dict) or error.validator in ("pattern", "not")
    value = "" if structural else f"is {json.dumps(error.instance, ensure_ascii=False)}, but "
    if error.absolute_schema_path[0] == "allOf":
        what, _, fix = schema["allOf"][error.absolute_schema_path[1]]["description"].partition("; ")
        return ConfigError(f"{value}{what}", where=path, fix=fix)
    comment = next((row.text for row in documented(chart / "values.yaml") if row.path == path), "")
    fix = f"{path}: {comment}" if comment else ""
    return ConfigError(f"{value}{_expected(error)}", where=path or "values", fix=fix)


def _unknown_key(error: Any, path: str) -> ConfigError:
    keys = error.schema["properties"]
    unknown = sorted(set(error.instance) - set(keys))[0]
    hint = near(unknown, keys).removeprefix("; ")
    fix = f"{hint} known here: {', '.join(sorted(keys))}".strip()
    return ConfigError("unknown key in the values", where=f"{path}.{unknown}".lstrip("."), fix=fix)


def _expected(error: Any) -> str:
    """The schema's demand at this place, in words."""
    limit = error.validator_value
    match error.validator:
        case "enum":
            return f"must be one of {', '.join(repr(value) for value in limit)}".replace("''", "'' (empty)")
        case "type":
            block = (
                " (write it as a text block: config: |)" if list(error.absolute_path) == ["config"] else ""
            )
            return f"must be {' or '.join(limit) if isinstance(limit, list) else limit}{block}"
        case "minimum" | "maximum":
            return f"must be {'at least' if error.validator == 'minimum' else 'at most'} {limit}"
        case "minLength" | "minItems":
            return "must not be empty"
        case "not":
            return f"must not be {json.dumps(limit.get('const'))}"
        case "required":
            return str(error.message).replace("is a required property", "is missing")
        case _:
            return f"{str(error.message).split(' does not match ')[0]} does not have the form {limit}"
