"""A repository's settings of lint: ``.podtune-lint.yaml``, and the flags above it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podtune.cluster.lint.documents import read
from podtune.cluster.lint.rules import find
from podtune.cluster.lint.sources import read_sources
from podtune.cluster.lint.targets import Target, parse
from podtune.run.errors import ConfigError, near

FILE = ".podtune-lint.yaml"
KEYS = ("ignore", "fail-on", "fail-if-none", "target")
FAIL_ON = ("error", "warning", "never")


@dataclass
class LintSettings:
    """The rules to leave out, and when to fail."""

    ignore: set[str] = field(default_factory=set)
    fail_on: str = "error"
    fail_if_none: bool = False
    target: Target = field(default_factory=Target)


def settings(file: str = "") -> LintSettings:
    """The settings of ``file``, or of the nearest ``.podtune-lint.yaml`` up to the repository's root.

    Raises:
        UserError: a key or value that is not known.
    """
    path = file or _nearest()
    if not path:
        return LintSettings()
    sources = read_sources([path])
    if sources.problems:
        raise sources.problems[0]
    documents, errors = read(sources.texts[0][1], path) if sources.texts else ([], [])
    if errors:
        raise ConfigError(errors[0].message, where=f"{path}:{errors[0].line}", fix=errors[0].fix)
    return _of(documents[0].content if documents else {}, path)


def _nearest() -> str:
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / FILE).is_file():
            return str(folder / FILE)
        if (folder / ".git").exists():
            return ""
    return ""


def _of(content: dict[str, Any], path: str) -> LintSettings:
    chosen = LintSettings()
    for key, value in content.items():
        if key == "ignore":
            # a list of codes, or code: reason
            chosen.ignore = codes(list(value) if isinstance(value, list | dict) else [str(value)], path)
        elif key == "fail-on" and value in FAIL_ON:
            chosen.fail_on = value
        elif key == "fail-if-none" and isinstance(value, bool):
            chosen.fail_if_none = value
        elif key == "target":
            pairs = (
                [f"{name}={version}" for name, version in value.items()]
                if isinstance(value, dict)
                else [value]
            )
            chosen.target = parse(",".join(map(str, pairs)))
        else:
            fix = f"use {', '.join(FAIL_ON if key == 'fail-on' else KEYS)}"
            raise ConfigError(f"{key}: {value!r} is not known{near(key, KEYS)}", where=path, fix=fix)
    return chosen


def codes(values: list[Any], where: str) -> set[str]:
    """Codes of rules, from ``PT204,PT404`` or a list."""
    wanted = sorted({part for value in values for part in str(value).split(",") if part.strip()})
    return {find(code, where).code for code in wanted}
