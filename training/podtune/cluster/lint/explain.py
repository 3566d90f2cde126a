"""The rules as documentation: one entry for ``podtune lint --explain``, all of them for docs/lint.md."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from podtune.cluster.lint import check
from podtune.cluster.lint.rules import RULES, SEVERITIES, Rule
from podtune.run.errors import UserError, near

Json = dict[str, Any]

YAML_RULE = (
    "PT001",
    "error",
    "not-yaml",
    "The file is not YAML, or gives a key twice; Kubernetes would refuse it or take the last.",
    "correct it",
)


@cache
def examples() -> Json:
    """The good base jobs and the changes for each rule."""
    found: Json = yaml.safe_load(Path(__file__).with_name("examples.yaml").read_text(encoding="utf-8"))
    return found


def example(code: str, which: str) -> str:
    """The whole manifest of a rule's bad or good example, as YAML."""
    entry = examples()[code]
    if isinstance(entry[which], str):
        return str(entry[which])
    kind = "trainjob" if code.startswith("PT5") else "base"
    job: Json = yaml.safe_load(examples()[kind])
    if "with" not in entry:
        return _dump([merged(job, entry[which])])
    return _dump([merged(entry["with"], entry[which]), merged(job, entry.get("job", {}))])


def merged(base: Any, change: Any) -> Any:
    """``base`` with ``change``: mappings by key, lists of named things by name; null removes."""
    if isinstance(base, dict) and isinstance(change, dict):
        result = copy.deepcopy(base)
        for key, value in change.items():
            if value is None:
                result.pop(key, None)
            elif key == "$rename":
                result["name"] = value
            else:
                result[key] = merged(result.get(key), value)
        return result
    if (
        isinstance(base, list)
        and isinstance(change, list)
        and all(isinstance(item, dict) and "name" in item for item in (*base, *change))
    ):
        key = "mountPath" if all("mountPath" in item for item in (*base, *change)) else "name"
        if key == "mountPath":
            return [*copy.deepcopy(base), *change]
        changes = {item["name"]: item for item in change}
        kept = [merged(item, changes.pop(item["name"], {})) for item in base]
        return [*kept, *changes.values()]
    return copy.deepcopy(change)


def explanation(code: str) -> str:
    """One rule: what it means, the fix, a bad and a good example."""
    known = [YAML_RULE[0], *(rule.code for rule in RULES)]
    if code not in known:
        raise UserError(
            (f"{code!r} is not a rule{near(code, known)}"), fix="see docs/lint.md for all of them", code=2
        )
    return _entry(code)


def reference() -> str:
    """docs/lint.md."""
    severity = (
        "error: the job is refused, hangs, never ends, trains something else, or leaks; warning: it costs "
        "GPU hours when things go wrong; "
    )
    lines = [
        "# What podtune lint finds",
        "",
        "Written by `python scripts/build_lint_docs.py` from the rules and their examples; do not edit.",
        "",
        f"Severities: {severity}note: it depends on the cluster. Errors make the exit code 65.",
        "Examples are changes to a good job (`training/podtune/cluster/lint/examples.yaml`); `podtune lint "
        "--explain CODE` prints one entry.",
        "",
        "| code | severity | rule |",
        "|---|---|---|",
    ]
    entries = sorted([YAML_RULE[:3], *((rule.code, rule.severity, rule.name) for rule in RULES)])
    lines += [
        (f"| [{code}](#{code.lower()}-{name}) | {severity} | {name} |") for code, severity, name in entries
    ]
    return "\n".join(lines) + "\n\n" + "\n\n".join(_entry(code) for code, _, _ in entries) + "\n"


def _entry(code: str) -> str:
    rule = next((rule for rule in RULES if rule.code == code), None)
    name, severity, summary, fix = _facts(rule)
    entry = examples()[code]
    lines = [f"## {code} {name}", "", f"{severity}. {summary}", "", f"Fix: {fix}."]
    if rule and rule.values:
        lines.append(f"In the chart's values: `{rule.values}`.")
    if "with" in entry:
        lines += ["", f"With a {entry['with']['kind']} that the job uses:"]
    for which in ("bad", "good"):
        content = entry[which] if isinstance(entry[which], str) else _dump([entry[which]])
        lines += ["", f"{which.capitalize()}:", "```yaml", content.strip(), "```"]
    return "\n".join(lines)


def _facts(rule: Rule | None) -> tuple[str, str, str, str]:
    if rule is None:
        _, severity, name, summary, fix = YAML_RULE
        return name, severity.capitalize(), summary, fix
    return rule.name, rule.severity.capitalize(), rule.summary, rule.fix.rstrip(".")


def _dump(documents: list[Json]) -> str:
    return yaml.safe_dump_all(documents, sort_keys=False, width=110)


__all__ = ["SEVERITIES", "check", "example", "examples", "explanation", "merged", "reference"]
