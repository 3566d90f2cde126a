"""The ``# --`` comments of the chart's values.yaml, which refusals quote and its README has as a table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class DocumentedValue:
    """One documented value."""

    path: str
    default: Any
    text: str


def documented(values_file: Path) -> list[DocumentedValue]:
    """The documented values in the order of the file.

    A comment belongs to the key below it, with everything inside that key.
    """
    text = values_file.read_text(encoding="utf-8")
    defaults = yaml.safe_load(text)
    rows: list[DocumentedValue] = []
    parents: list[tuple[int, str]] = []
    comment: list[str] = []
    covered = -1  # indentation of a documented mapping, whose children need no row
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            if stripped.startswith("# -- "):
                comment = [stripped[5:]]
            elif comment:
                comment.append(stripped.lstrip("# "))
            continue
        key_line = re.match(r"^( *)([A-Za-z]\w*):", line)
        if not key_line or (0 <= covered < len(key_line[1])):
            continue
        indent, key = len(key_line[1]), key_line[2]
        covered = -1
        parents = [parent for parent in parents if parent[0] < indent] + [(indent, key)]
        if comment:
            path = [name for _, name in parents]
            value: Any = defaults
            for name in path:
                value = value[name]
            rows.append(DocumentedValue(".".join(path), value, " ".join(comment)))
            covered, comment = indent, []
    return rows
