"""Lint: documents in, diagnostics out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

# Importing a file of rules declares them.
from podtune.cluster.lint import (  # noqa: F401
    admission,
    exposure,
    indexed_jobs,
    launch,
    lifecycle,
    pods,
    replicas,
    torchrun,
    trainjobs,
)
from podtune.cluster.lint.diagnostic import Diagnostic, Place, Severity
from podtune.cluster.lint.documents import JOBS, KINDS, OPERATED, RUNTIMES, Document, read
from podtune.cluster.lint.job import Job, LintContext
from podtune.cluster.lint.rules import RULES
from podtune.cluster.lint.schema import VARIABLE, Schema, SchemaCheck, schema
from podtune.cluster.lint.sources import STDIN, WORTH
from podtune.cluster.lint.targets import SAME_SCHEMA, TRAINERS, Target

IGNORE = "lint.podtune/ignore"  # the annotation of an object
OLD_SELECTOR = "'pytorch-job-name'"
SELECTING = ("NetworkPolicy", "Service", "PodMonitor", "PodDisruptionBudget")


@dataclass(frozen=True)
class Verdict:
    """All findings, in the order of the file, and what was looked at."""

    findings: list[Diagnostic]
    jobs: list[str]
    runtimes: list[str]
    ignored: int

    def count(self, severity: Severity) -> int:
        """The number of findings of ``severity``."""
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def empty(self) -> bool:
        """True if the documents hold no job and no runtime."""
        return not self.jobs and not self.runtimes


def lint(
    sources: Iterable[tuple[str, str]], *, ignore: Iterable[str] = (), target: Target | None = None
) -> Verdict:
    """Check all documents of ``sources``, pairs of a name and its text, but for the rules of ``ignore``.

    Claims and runtimes are looked up across the sources.
    """
    documents: list[Document] = []
    findings: list[Diagnostic] = []
    for source, text in sources:
        objects, errors = read(text, source)
        documents += objects
        # else the file is another program's: tags of its own, comments in JSON
        findings += errors if source == STDIN or WORTH.search(text) else []
    ours = [document for document in documents if document.is_linted]
    jobs = [_job(document, target or Target()) for document in ours]
    context = _context(documents, jobs)
    for job in jobs:
        job.context = context
        findings += _findings(job)
    for document in documents:
        for found in _around_jobs(document):
            line = document.line(found.place)
            findings.append(replace(found, source=document.source, line=line, job=document.title))
    left_out = set(ignore)
    findings = [finding for finding in findings if finding.code not in left_out]
    annotated = {(document.source, document.title): _annotated(document) for document in ours}
    kept = [one for one in findings if one.code not in annotated.get((one.source, one.job), ())]
    kept.sort(key=lambda finding: (finding.source, finding.line, finding.code))
    titles = {kinds: [one.title for one in ours if one.kind in kinds] for kinds in (JOBS, RUNTIMES)}
    return Verdict(kept, titles[JOBS], titles[RUNTIMES], len(findings) - len(kept))


def _annotated(document: Document) -> set[str]:
    """The codes in the annotation ``lint.podtune/ignore: "PT204: reason, PT404"``."""
    annotations = document.metadata.get("annotations")
    text = str(annotations.get(IGNORE)) if isinstance(annotations, dict) else ""
    return {code.upper() for code in re.findall(r"(?:^|[,;\n])\s*(PT\d{3})\b", text, re.IGNORECASE)}


def _job(document: Document, target: Target) -> Job:
    """The job by the version of Trainer that fits best, the newest of them."""
    # the newest first: of versions with as few violations min() takes the first
    versions = [target.trainer] if target.trainer else list(reversed(TRAINERS))
    jobs: list[Job] = []
    for version in {"PyTorchJob": [target.operator], "Job": [""]}.get(document.kind, versions):
        checked = SchemaCheck(document.text)
        content = checked.mapping(document.content, _schema(document.kind, version))
        found = [*checked.found, *trainjobs.long_step_names(content, version)]
        found = [one for one in found if not _given_around(document, one)]
        jobs.append(Job(document, content, violations=found, target=target, trainer=version))
        if not found:
            break
    return min(jobs, key=lambda job: len(job.violations))


def _schema(kind: str, version: str) -> Schema:
    if kind == "Job":
        return indexed_jobs.schema()
    family = {"PyTorchJob": "pytorchjob", "TrainJob": "trainjob"}.get(kind, "runtime")
    return schema(f"{family}-{SAME_SCHEMA.get(version, version)}")


def _given_around(document: Document, found: Diagnostic) -> bool:
    """True for what is absent as the object around it fills it in, and for a name, which PT010 looks at."""
    if found.code == "PT004":
        return found.place == ("metadata", "name") or (found.place == ("metadata",) and bool(document.holder))
    return found.code == "PT008" and bool(document.holder)


def _context(documents: list[Document], jobs: list[Job]) -> LintContext:
    context = LintContext(
        {(job.kind, job.document.name): job.content for job in jobs if job.kind in RUNTIMES}
    )
    for document in documents:
        data, spec = document.content.get("data"), document.content.get("spec")
        if document.kind == "PersistentVolumeClaim" and isinstance(spec, dict):
            modes = spec.get("accessModes")
            namespace = str(document.metadata.get("namespace") or "")
            claims = context.claims.setdefault(document.name, [])
            claims.append((namespace, list(map(str, modes)) if isinstance(modes, list) else []))
        elif document.kind == "ConfigMap" and isinstance(data, dict):
            context.configmaps[document.name] = data
        elif document.kind in SELECTING and OLD_SELECTOR in str(document.content):
            context.selectors.append(document)
    return context


def _findings(job: Job) -> Iterator[Diagnostic]:
    """Findings of all rules, with one for Master and Worker alike."""
    for rule in RULES:
        if job.kind not in rule.kinds:
            continue
        merged: dict[tuple[Any, ...], tuple[Diagnostic, list[str]]] = {}
        for found in (*job.collected.get(rule.code, ()), *rule.check(job)):
            key = (found.message, found.severity, found.fix, _without_role(found.place))
            roles = merged.setdefault(key, (found, []))[1]
            role = job.role_at(found.place)
            if role and role not in roles:
                roles.append(role)
        for found, roles in merged.values():
            severity = found.severity or rule.severity
            if severity == "error" and VARIABLE.search(job.document.text(found.place) or ""):
                continue  # what stands there is not what the cluster sees
            message = found.message.replace("{role}", roles[0] if roles else "the pod")
            if len(roles) > 1:
                message += f" (so in {' and '.join(roles[1:])})"
            by = found.by or rule.by
            if job.kind == "Job" and by in ("operator", "webhook"):
                by = "api"  # which checks a Job's pods with it
            yield replace(
                found,
                code=rule.code,
                severity=severity,
                message=message,
                fix=found.fix or rule.fix,
                by=by if severity == "error" else "",
                source=job.document.source,
                line=job.document.line(found.place),
                job=job.document.title,
            )


def _without_role(place: Place) -> Place:
    return (*place[:2], "*", *place[3:]) if place[1:2] == ("pytorchReplicaSpecs",) else place


def _around_jobs(document: Document) -> Iterator[Diagnostic]:
    """A misspelt kind, which nobody else would look at, and secrets in a ConfigMap."""
    if meant := _meant(document):
        message = f"{document.kind!r} is not a kind; did you mean {meant!r}?"
        yield Diagnostic(("kind",), message, "error", "write the kind as it is spelt there", "api", "PT006")
    data = document.content.get("data")
    for key, value in data.items() if document.kind == "ConfigMap" and isinstance(data, dict) else ():
        for name in _secrets(str(key), str(value)):
            message, fix = f"{name} holds a secret in plain text", "put it into a Secret and refer to it"
            yield Diagnostic(("data", key), message, "warning", fix, code="PT403")


def _meant(document: Document) -> str:
    """The kind that a misspelt one stands for, or ""."""
    kinds = {kind.lower(): kind for kind in (*OPERATED, *RUNTIMES)}  # many programs have a kind "job"
    if document.kind in KINDS or document.kind.endswith("List") or document.is_foreign:
        return ""
    # as close as no other kind of the group is: TFJob, PaddleJob
    close = difflib.get_close_matches(document.kind.lower(), kinds, n=1, cutoff=0.85)
    return kinds[close[0]] if close else ""


def _secrets(key: str, text: str) -> Iterator[str]:
    """Names of the secrets in an entry of a ConfigMap, itself or a file of ``name: value`` lines."""
    if "\n" not in text and exposure.secret(key, text):
        yield key
        return
    line = r"^\s*(?:export\s+)?[\"']?([\w.-]+)[\"']?\s*[:=]\s*[\"']?([^\"'\s#]+)"
    for match in re.finditer(line, text, re.MULTILINE):
        if exposure.secret(match[1], match[2]):
            yield match[1]
