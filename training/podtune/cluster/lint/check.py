"""Lint: documents in, diagnostics out."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from podtune.cluster.job.manifest import Json

# Importing a file of rules declares them.
from podtune.cluster.lint import (  # noqa: F401
    admission,
    exposure,
    launch,
    lifecycle,
    pod_admission,
    pods,
    replicas,
    torchrun,
    trainjobs,
)
from podtune.cluster.lint.diagnostic import Diagnostic, Place, Severity, dotted
from podtune.cluster.lint.documents import GROUPS, JOBS, KINDS, RUNTIMES, Document, is_foreign, read
from podtune.cluster.lint.job import Job, LintContext
from podtune.cluster.lint.rules import CHART_VALUES, RULES, Rule
from podtune.cluster.lint.schema import VARIABLE, SchemaCheck, schema
from podtune.cluster.lint.sources import STDIN, WORTH
from podtune.cluster.lint.targets import SAME_SCHEMA, TRAINERS, Target
from podtune.run.errors import near

IGNORE = "lint.podtune/ignore"  # the annotation of an object or a pod template
OLD_SELECTOR = "'pytorch-job-name'"
SELECTING = ("NetworkPolicy", "Service", "PodMonitor", "PodDisruptionBudget")
#: kinds of the same group that lint has no rules for
OTHERS = (
    *("TFJob", "MPIJob", "XGBoostJob", "PaddleJob", "JAXJob"),
    *("Experiment", "Notebook", "InferenceService"),
)


@dataclass(frozen=True)
class Verdict:
    """All findings, in the order of the file, and what was looked at."""

    findings: list[Diagnostic]
    jobs: list[str]
    runtimes: list[str] = field(default_factory=list)
    ignored: int = 0

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
    collecting = gc.isenabled()
    gc.disable()  # nothing here becomes garbage before the end, and looking for it takes half the time
    try:
        return _lint(sources, set(ignore), target or Target())
    finally:
        if collecting:
            gc.enable()


def _lint(sources: Iterable[tuple[str, str]], ignored: set[str], target: Target) -> Verdict:
    documents: list[Document] = []
    findings: list[Diagnostic] = []
    for source, text in sources:
        objects, errors = read(text, source)
        documents += objects
        if source == STDIN or WORTH.search(
            text
        ):  # else of another program: tags of its own, comments in JSON
            findings += errors
    ours = [document for document in documents if document.kind in KINDS and not is_foreign(document)]
    jobs = [_job(document, target) for document in ours]
    context = _context(documents, jobs)
    silenced = 0
    for job in jobs:
        job.context = context
        found = [finding for finding in _findings(job) if finding.code not in ignored]
        kept = _without_annotated(job, found)
        findings += kept
        silenced += len(found) - len(kept)
    findings += _around_jobs(documents)
    findings = [finding for finding in findings if finding.code not in ignored]
    findings.sort(key=lambda finding: (finding.source, finding.line, finding.code))
    return Verdict(
        findings,
        [_title(document) for document in ours if document.kind in JOBS],
        [_title(document) for document in ours if document.kind in RUNTIMES],
        silenced,
    )


def _title(document: Document) -> str:
    return f"{document.kind} {document.name}"


def _job(document: Document, target: Target) -> Job:
    """The job by the version of Trainer that fits best, the newest of them."""
    if document.kind == "PyTorchJob":
        names = [f"pytorchjob-{target.operator}"]
    else:
        kind = "trainjob" if document.kind == "TrainJob" else "runtime"
        versions = [target.trainer] if target.trainer else reversed(TRAINERS)
        names = [f"{kind}-{version}" for version in versions]
    jobs: list[Job] = []
    for name in names:
        checked = SchemaCheck(document.text)
        family, _, version = name.partition("-")
        content = checked.cleaned(document.content, schema(f"{family}-{SAME_SCHEMA.get(version, version)}"))
        checked.found += trainjobs.long_step_names(content, version)
        checked.found = [one for one in checked.found if not _given_around(document, one)]
        jobs.append(Job(document, content, violations=checked.found, target=target, trainer=version))
        if not checked.found:
            break
    return min(jobs, key=lambda job: len(job.violations))


def _given_around(document: Document, found: Diagnostic) -> bool:
    """True for what is absent as the object around it fills it in, and for a name, which PT010 looks at."""
    if found.code == "PT008":
        return bool(document.holder)
    named = found.place == ("metadata",) and bool(document.holder)
    return found.code == "PT004" and (found.place == ("metadata", "name") or named)


def _context(documents: list[Document], jobs: list[Job]) -> LintContext:
    context = LintContext()
    for job in jobs:
        if job.kind in RUNTIMES:
            context.runtimes[job.kind, job.document.name] = job.content
    for document in documents:
        if document.kind == "PersistentVolumeClaim":
            spec = document.content.get("spec")
            modes = (spec if isinstance(spec, dict) else {}).get("accessModes")
            modes = [str(mode) for mode in modes] if isinstance(modes, list) else []
            context.claims.setdefault(document.name, []).append((document.namespace, modes))
        elif document.kind == "ConfigMap" and isinstance(document.content.get("data"), dict):
            context.configmaps[document.name] = document.content["data"]
        elif document.kind in SELECTING and OLD_SELECTOR in str(document.content):
            context.selectors.append(document)
    return context


@cache
def _rules_for(kind: str) -> list[Rule]:
    return [rule for rule in RULES if kind in rule.kinds]


def _findings(job: Job) -> Iterator[Diagnostic]:
    """Findings of all rules, with one for Master and Worker alike."""
    chart = str((job.metadata.get("labels") or {}).get("helm.sh/chart") or "").startswith("podtune-")
    for rule in _rules_for(job.kind):
        merged: dict[tuple[Any, ...], tuple[Diagnostic, list[str]]] = {}
        for found in (*job.collected.get(rule.code, ()), *rule.check(job)):
            key = (found.message, found.severity, found.fix, _without_role(found.place))
            roles = merged.setdefault(key, (found, []))[1]
            role = found.role or job.role_at(found.place)
            if role and role not in roles:
                roles.append(role)
        for found, roles in merged.values():
            severity = found.severity or rule.severity
            if severity == "error" and VARIABLE.search(job.document.text(found.place) or ""):
                continue  # what stands there is not what the cluster sees
            message = found.message.replace("{role}", roles[0] if roles else "the pod")
            if len(roles) > 1:
                message += f" (so in {' and '.join(roles[1:])})"
            yield replace(
                found,
                code=rule.code,
                severity=severity,
                message=message,
                fix=found.fix or rule.fix,
                by=(found.by or rule.by) if severity == "error" else "",
                source=job.document.source,
                line=job.document.line(found.place),
                job=_title(job.document),
                values=CHART_VALUES.get(rule.code, "") if chart else "",
            )


def _without_role(place: Place) -> Place:
    return (*place[:2], "*", *place[3:]) if place[1:2] == ("pytorchReplicaSpecs",) else place


def _without_annotated(job: Job, findings: list[Diagnostic]) -> list[Diagnostic]:
    """``findings`` but for those that an annotation of the object, or of their pod template, silences."""
    places = [("", _codes(job.metadata))]
    places += [(dotted(template.path), _codes(template.metadata)) for template in job.own_templates]
    places = [(path, codes) for path, codes in places if codes]
    if not places:
        return findings
    return [
        finding
        for finding in findings
        if not any(finding.code in codes and finding.path.startswith(path) for path, codes in places)
    ]


def _codes(metadata: Json) -> set[str]:
    """The codes in ``PT204: reason, PT404``."""
    text = str((metadata.get("annotations") or {}).get(IGNORE) or "")
    return {code.upper() for code in re.findall(r"(?:^|[,;\n])\s*(PT\d{3})\b", text, re.IGNORECASE)}


def _around_jobs(documents: list[Document]) -> Iterator[Diagnostic]:
    """Misspelt kinds, which nobody else would look at, and secrets in ConfigMaps."""
    for document in documents:
        kind, data = document.kind, document.content.get("data")
        if kind not in KINDS and (meant := _meant(document)):
            message, fix = (
                f"{kind!r} is not a kind{near(kind, [meant])}",
                "write the kind as it is spelt there",
            )
            yield _of_document(document, ("kind",), message, "error", fix, "PT006")
        if kind == "ConfigMap" and isinstance(data, dict):
            for key, value in data.items():
                for name in _secrets(str(key), str(value)):
                    message, fix = (
                        f"{name} holds a secret in plain text",
                        "put it into a Secret and refer to it",
                    )
                    yield _of_document(document, ("data", key), message, "warning", fix, "PT403")


def _of_document(
    document: Document, place: Place, message: str, severity: Severity, fix: str, code: str
) -> Diagnostic:
    return Diagnostic(
        place,
        message,
        severity,
        fix,
        "api" if severity == "error" else "",
        code,
        source=document.source,
        line=document.line(place),
        job=_title(document),
    )


def _meant(document: Document) -> str:
    """The kind that a misspelt one stands for, or ""."""
    if document.kind in OTHERS or document.kind.endswith("List") or is_foreign(document):
        return ""
    lower = {kind.lower(): kind for kind in KINDS}
    close = document.kind.lower()
    if close in lower or close.removesuffix("s") in lower:
        return lower.get(close) or lower[close.removesuffix("s")]
    guess = near(document.kind, list(KINDS)) if document.group in GROUPS else ""
    return next((kind for kind in KINDS if f"'{kind}'" in guess), "")


def _secrets(key: str, text: str) -> Iterator[str]:
    """Names of the secrets in an entry of a ConfigMap, itself or a file of ``name: value`` lines."""
    if "\n" not in text and exposure.secret(key, text):
        yield key
        return
    for match in re.finditer(
        r"^\s*(?:export\s+)?[\"']?([\w.-]+)[\"']?\s*[:=]\s*[\"']?([^\"'\s#]+)", text, re.MULTILINE
    ):
        if exposure.secret(match[1], match[2]):
            yield match[1]
