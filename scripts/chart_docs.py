"""Write the values table of charts/podtune/README.md, the rules of its Role and the manifests of
deploy/rendered; tests hold them equal.

python scripts/chart_docs.py             # after a change of the chart
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from podtune.cluster.chart import render
from podtune.cluster.chart.render import CHART
from podtune.cluster.live.rights import rules

DEPLOY = CHART.parents[1] / "deploy"
USER_RULES = CHART / "files" / "user-rules.yaml"
RENDERED = ("single-gpu", "two-node", "cpu-smoke")
BEGIN, END = "<!-- values: python scripts/chart_docs.py -->\n", "<!-- end of values -->\n"


class DocumentedValue(NamedTuple):
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


def table(values_file: Path) -> str:
    """The values as a Markdown table."""
    lines = ["| value | default | meaning |", "|---|---|---|"]
    for row in documented(values_file):
        default = "empty" if row.default in ("", [], {}) else f"`{json.dumps(row.default)}`"
        default = "a small demo run" if row.path == "config" else default
        text = row.text.replace("|", "\\|")
        lines.append(f"| `{row.path}` | {default} | {text} |")
    return "\n".join(lines) + "\n"


def readme() -> str:
    """The chart's README with the table of today."""
    before, _, rest = (CHART / "README.md").read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "\n" + table(CHART / "values.yaml") + "\n" + END + rest.partition(END)[2]


def rendered(profile: str) -> str:
    """The manifests of a profile, for people without helm; the run has the profile's name. Test hooks are
    left out.
    """
    head = (
        "# Generated: python scripts/chart_docs.py. The same as: podtune render -f "
        f"deploy/values/{profile}.yaml --name {profile}\n"
    )
    values = render.merged_values([DEPLOY / "values" / f"{profile}.yaml"], [])
    documents = render.rendered(values, profile).split("---\n")
    return (
        head + "---\n" + "---\n".join(text for text in documents if text and "/templates/tests/" not in text)
    )


def user_rules() -> str:
    """The rules of the chart's optional Role: what podtune's cluster commands do."""
    return "# Generated: python scripts/chart_docs.py\n" + yaml.safe_dump(
        rules(), default_flow_style=None, sort_keys=False, width=120
    )


if __name__ == "__main__":
    (CHART / "README.md").write_text(readme(), encoding="utf-8")
    USER_RULES.write_text(user_rules(), encoding="utf-8")
    for name in RENDERED:
        target: Path = DEPLOY / "rendered" / f"{name}.yaml"
        target.parent.mkdir(exist_ok=True)
        target.write_text(rendered(name), encoding="utf-8")
