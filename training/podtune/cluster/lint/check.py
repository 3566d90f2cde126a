"""Lint: documents in, findings out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

# Importing a file of rules declares them.
from podtune.cluster.lint import admission, launch, lifecycle, pods, trainjobs  # noqa: F401
from podtune.cluster.lint.documents import Document, read
from podtune.cluster.lint.job import Job
from podtune.cluster.lint.rules import RULES, SEVERITIES, Severity
from podtune.cluster.lint.schema import TRAINJOB_SCHEMA, Problem, check, pytorchjob_schema
from podtune.run.errors import near

KINDS = ("PyTorchJob", "TrainJob")
SCHEMA = "podtune.lint/1"


@dataclass(frozen=True)
class Finding:
    """One line of the verdict."""

    code: str
    severity: Severity
    source: str
    line: int
    job: str
    path: str
    message: str
    fix: str
    values: str = ""


@dataclass(frozen=True)
class Verdict:
    """All findings, in the order of the file, and the jobs that were looked at."""

    findings: list[Finding]
    jobs: list[str]

    def count(self, severity: Severity) -> int:
        """How many findings are of ``severity``."""
        return sum(finding.severity == severity for finding in self.findings)


def lint(sources: Iterable[tuple[str, str]]) -> Verdict:
    """Check all documents of ``sources``, pairs of a name and its text; claims and runtimes are looked up
    across them.
    """
    documents: list[Document] = []
    findings: list[Finding] = []
    for source, text in sources:
        found, errors = read(text, source)
        documents += found
        findings += [
            Finding("PT001", "error", error.source, error.line, "", "", error.message, error.fix)
            for error in errors
        ]
    jobs: list[str] = []
    for document in documents:
        if document.kind in KINDS:
            jobs.append(f"{document.kind} {document.name}")
            findings += _lint_job(document, [other for other in documents if other is not document])
        elif document.kind not in KINDS and document.kind.lower() in [kind.lower() for kind in KINDS]:
            fix, message = (
                "write the kind as it is spelt there",
                f"{document.kind!r} is not a kind{near(document.kind, KINDS)}",
            )
            findings.append(
                Finding(
                    "PT006",
                    "error",
                    document.source,
                    document.line(("kind",)),
                    document.name,
                    "kind",
                    message,
                    fix,
                )
            )
    findings.sort(key=lambda one: (one.source, one.line, one.code))
    return Verdict(findings, jobs)


def _lint_job(document: Document, others: list[Document]) -> list[Finding]:
    problems: list[Problem] = []
    content = check(
        document.content, pytorchjob_schema() if document.kind == "PyTorchJob" else TRAINJOB_SCHEMA, problems
    )
    job = Job(document, content, others, problems)
    name = f"{document.kind} {document.name}"
    found: list[Finding] = []
    for one in RULES:
        if document.kind not in one.kinds:
            continue
        for hit in one.check(job):
            severity, fix, line = hit.severity or one.severity, hit.fix or one.fix, document.line(hit.path)
            found.append(
                Finding(
                    one.code,
                    severity,
                    document.source,
                    line,
                    name,
                    dotted(hit.path),
                    hit.message,
                    fix,
                    one.values,
                )
            )
    return found


def dotted(path: Iterable[str | int]) -> str:
    """``spec.containers[0].env[1]``, as kubectl and jq write a path."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def as_text(verdict: Verdict) -> str:
    """For people: place, code, sentence; the fix below."""
    lines = []
    for one in verdict.findings:
        place = f"{one.source}:{one.line}"
        lines.append(
            f"{place}: {one.severity} {one.code}: {one.message}{f' [{one.path}]' if one.path else ''}"
        )
        lines.append(f"    fix: {one.fix}{f'  (chart values: {one.values})' if one.values else ''}")
    counts = ", ".join(
        (f"{verdict.count(severity)} {severity}{'' if verdict.count(severity) == 1 else 's'}")
        for severity in SEVERITIES
    )
    lines.append(f"{', '.join(verdict.jobs) or 'no PyTorchJob or TrainJob found'}: {counts}")
    return "\n".join(lines)


def as_json(verdict: Verdict) -> str:
    """For scripts."""
    content: dict[str, Any] = {"schema": SCHEMA, "jobs": verdict.jobs}
    content |= {f"{severity}s": verdict.count(severity) for severity in SEVERITIES}
    return json.dumps(content | {"findings": [asdict(finding) for finding in verdict.findings]}, indent=2)


def as_github(verdict: Verdict) -> str:
    """Workflow commands: GitHub shows them at the line of the pull request."""
    level = {"error": "error", "warning": "warning", "note": "notice"}
    return "\n".join(
        f"::{level[one.severity]} "
        f"file={_property(one.source)},line={one.line},title={one.code}"
        f"::{_data(f'{one.message}. Fix: {one.fix}')}"
        for one in verdict.findings
    )


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
