"""A verdict as text, JSON, annotations of GitHub and SARIF."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from podtune.cluster.lint.check import Verdict
from podtune.cluster.lint.diagnostic import SEVERITIES, Diagnostic
from podtune.cluster.lint.rules import RULES
from podtune.cluster.lint.sources import STDIN

SCHEMA = "podtune.lint/1"
FIELDS = ("code", "severity", "source", "line", "job", "path", "message", "fix", "by")


def printable(text: str) -> str:
    """``text`` with escapes for what a terminal or a log would obey: escape sequences, line breaks."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def as_text(verdict: Verdict, *, notes: bool = False) -> str:
    """For people: place, code, sentence; the fix below.

    Notes of a job share one line unless ``notes``.
    """
    lines: list[str] = []
    shared: dict[tuple[str, str], list[Diagnostic]] = {}
    for finding in verdict.findings:
        if finding.severity == "note" and not notes:
            shared.setdefault((finding.source, finding.job), []).append(finding)
            continue
        place = f" [{finding.path}]" if finding.path else ""
        where = f"{finding.source}:{finding.line}: {finding.severity} {finding.code}"
        lines += [f"{where}: {finding.message}{place}", f"    fix: {finding.fix}"]
    names = {rule.code: rule.name for rule in RULES}
    for (source, job), findings in shared.items():
        codes = dict.fromkeys(f"{finding.code} {names.get(finding.code, '')}" for finding in findings)
        lines.append(f"{source}: notes on {job}: {', '.join(codes)} (--notes shows them)")
    return "\n".join(map(printable, [*lines, summary(verdict)]))


def summary(verdict: Verdict) -> str:
    """The jobs and runtimes, and the number of findings of each severity."""
    counts = [(verdict.count(severity), severity) for severity in SEVERITIES]
    counted = ", ".join(f"{count} {severity}{'s' * (count != 1)}" for count, severity in counts)
    ignored = f", {verdict.ignored} ignored by annotation" if verdict.ignored else ""
    names = [*verdict.jobs, *verdict.runtimes]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{shown or 'no PyTorchJob, TrainJob, distributed Job or runtime found'}: {counted}{ignored}"


def as_json(verdict: Verdict, *, notes: bool = False) -> str:
    """For scripts."""
    content: dict[str, Any] = {"schema": SCHEMA, "jobs": verdict.jobs, "runtimes": verdict.runtimes}
    content |= {f"{severity}s": verdict.count(severity) for severity in SEVERITIES}
    content |= {"ignored": verdict.ignored}
    content["findings"] = [{name: getattr(finding, name) for name in FIELDS} for finding in verdict.findings]
    return json.dumps(content, indent=2)


def as_github(verdict: Verdict, *, notes: bool = False) -> str:
    """Workflow commands: GitHub shows them at the line of the pull request, ten of a step.

    Notes are left out unless ``notes``.
    """
    level = {"error": "error", "warning": "warning", "note": "notice"}
    lines = []
    for finding in verdict.findings:
        place = f"file={_property(finding.source)},line={finding.line}," if finding.source != STDIN else ""
        data = f"{finding.message}. Fix: {finding.fix}"
        if notes or finding.severity != "note":
            lines.append(f"::{level[finding.severity]} {place}title={finding.code}::{_data(data)}")
    return "\n".join(lines)


def _data(text: str) -> str:
    return printable(text.replace("%", "%25"))


def _property(text: str) -> str:
    # a property of a workflow command ends at these
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def as_sarif(verdict: Verdict, *, notes: bool = False) -> str:
    """SARIF 2.1.0, which code scanning reads."""
    results = [
        {
            "ruleId": finding.code,
            "level": finding.severity,
            "message": {"text": f"{finding.message}. Fix: {finding.fix}"},
            "locations": [
                {
                    "physicalLocation": {
                        # a SARIF file needs a path, and stdin has none
                        "artifactLocation": {"uri": "stdin" if finding.source == STDIN else finding.source},
                        "region": {"startLine": finding.line},
                    },
                    "logicalLocations": [{"fullyQualifiedName": f"{finding.job} {finding.path}".strip()}],
                }
            ],
        }
        for finding in verdict.findings
    ]
    rules = [
        {
            "id": rule.code,
            "name": rule.name,
            "shortDescription": {"text": rule.summary},
            "help": {"text": rule.fix},
            "defaultConfiguration": {"level": rule.severity},
        }
        for rule in RULES
    ]
    content = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": {"name": "podtune lint", "rules": rules}}, "results": results}],
    }
    return json.dumps(content, indent=2)


FORMATS: dict[str, Callable[..., str]] = {
    "text": as_text,
    "json": as_json,
    "github": as_github,
    "sarif": as_sarif,
}
