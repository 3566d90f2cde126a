"""Lint: documents in, findings out."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

# Importing a file of rules declares them.
from podtune.cluster.lint import admission, launch, lifecycle, pods, trainjobs  # noqa: F401
from podtune.cluster.lint.documents import JOBS, KINDS, RUNTIMES, Document, read
from podtune.cluster.lint.job import Job, Place, Surroundings
from podtune.cluster.lint.rules import REFUSING, RULES, By, Hit, Rule, Severity
from podtune.cluster.lint.schema import VARIABLE, Violation, check, schema
from podtune.cluster.lint.targets import TRAINERS, Target
from podtune.run.errors import near

SCHEMA = "podtune.lint/1"
IGNORE = "lint.podtune/ignore"  # the annotation of an object or a pod template
OLD_SELECTOR = "'pytorch-job-name'"
SELECTING = ("NetworkPolicy", "Service", "PodMonitor", "PodDisruptionBudget")
#: kinds of the operators that lint knows nothing of
OTHERS = (
    "TFJob",
    "MPIJob",
    "XGBoostJob",
    "PaddleJob",
    "JAXJob",
    "Experiment",
    "Notebook",
    "InferenceService",
)


@dataclass(frozen=True)
class Finding:
    """One line of the verdict.

    ``by`` says who refuses an error: api, webhook, operator, or hang.
    """

    code: str
    severity: Severity
    source: str
    line: int
    job: str
    path: str
    message: str
    fix: str
    values: str = ""
    by: By = ""

    @property
    def refused(self) -> bool:
        """Whether the API server, the webhook or the operator refuses it."""
        return self.severity == "error" and self.by in REFUSING


@dataclass(frozen=True)
class Verdict:
    """All findings, in the order of the file, and what was looked at."""

    findings: list[Finding]
    jobs: list[str]
    runtimes: list[str] = field(default_factory=list)
    ignored: int = 0

    def count(self, severity: Severity) -> int:
        """How many findings are of ``severity``."""
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def empty(self) -> bool:
        """Whether nothing was there to look at."""
        return not self.jobs and not self.runtimes


def lint(
    sources: Iterable[tuple[str, str]], *, ignore: Iterable[str] = (), target: Target | None = None
) -> Verdict:
    """Check all documents of ``sources``, pairs of a name and its text, but for the rules of ``ignore``;
    claims and runtimes are looked up across the sources."""
    collecting = gc.isenabled()
    gc.disable()  # nothing here becomes garbage before the end, and looking for it takes half the time
    try:
        return _lint(sources, set(ignore), target or Target())
    finally:
        if collecting:
            gc.enable()


def _lint(sources: Iterable[tuple[str, str]], ignored: set[str], target: Target) -> Verdict:
    documents: list[Document] = []
    findings: list[Finding] = []
    for source, text in sources:
        objects, errors = read(text, source)
        documents += objects
        findings += [
            Finding("PT001", "error", error.source, error.line, "", "", error.message, error.fix, by="api")
            for error in errors
        ]
    jobs = [(document, *_cleaned(document, target)) for document in documents if document.kind in KINDS]
    around = _surroundings(documents, jobs)
    count = 0
    for document, content, violations, trainer in jobs:
        job = Job(document, content, around, violations, target, trainer)
        kept = [finding for finding in _findings(job) if finding.code not in ignored]
        ours, silenced = _without_annotated(job, kept)
        findings += ours
        count += silenced
    findings += [finding for finding in _around_jobs(documents) if finding.code not in ignored]
    findings = [finding for finding in findings if finding.code not in ignored]
    findings.sort(key=lambda finding: (finding.source, finding.line, finding.code))
    names = [(document.kind, f"{document.kind} {document.name}") for document, *_ in jobs]
    return Verdict(
        findings,
        [name for kind, name in names if kind in JOBS],
        [name for kind, name in names if kind in RUNTIMES],
        count,
    )


def _cleaned(document: Document, target: Target) -> tuple[Any, list[Violation], str]:
    """The content without values of a wrong type, what the CRD says of it, and the version of Trainer that
    fits best, the newest of them."""
    best: tuple[Any, list[Violation], str] | None = None
    if document.kind == "PyTorchJob":
        names = [f"pytorchjob-{target.operator}"]
    else:
        kind = "trainjob" if document.kind == "TrainJob" else "runtime"
        versions = [target.trainer] if target.trainer else reversed(TRAINERS)
        names = [f"{kind}-{version}" for version in versions]
    for name in names:
        violations: list[Violation] = []
        content = check(document.content, schema(name), violations)
        if best is None or len(violations) < len(best[1]):
            best = (content, violations, name.partition("-")[2])
        if not violations:
            break
    assert best is not None
    return best


def _surroundings(
    documents: list[Document], jobs: list[tuple[Document, Any, list[Violation], str]]
) -> Surroundings:
    around = Surroundings()
    for document, content, _, _ in jobs:
        if document.kind in RUNTIMES:
            around.runtimes[document.kind, document.name] = content
    for document in documents:
        if document.kind == "PersistentVolumeClaim":
            spec = document.content.get("spec")
            modes = (spec if isinstance(spec, dict) else {}).get("accessModes")
            modes = [str(mode) for mode in modes] if isinstance(modes, list) else []
            around.claims.setdefault(document.name, []).append((document.namespace, modes))
        elif document.kind in SELECTING and OLD_SELECTOR in str(document.content):
            around.selectors.append(document)
    return around


@cache
def _rules_for(kind: str) -> list[Rule]:
    return [rule for rule in RULES if kind in rule.kinds]


def _findings(job: Job) -> Iterator[Finding]:
    """What the rules find, with one finding for Master and Worker alike."""
    document = job.document
    name = f"{document.kind} {document.name}"
    chart = str((job.metadata.get("labels") or {}).get("helm.sh/chart") or "").startswith("podtune-")
    for rule in _rules_for(document.kind):
        merged: dict[tuple[Any, ...], tuple[Hit, list[str]]] = {}
        for hit in rule.check(job):
            key = (hit.message, hit.severity, hit.fix, _without_role(hit.path))
            roles = merged.setdefault(key, (hit, []))[1]
            role = hit.role or _role(hit.path)
            if role and role not in roles:
                roles.append(role)
        for hit, roles in merged.values():
            severity = hit.severity or rule.severity
            if severity == "error" and VARIABLE.search(document.text(hit.path) or ""):
                continue  # what stands there is not what the cluster sees
            by = (rule.by if hit.by is None else hit.by) if severity == "error" else ""
            message = hit.message.replace("{role}", roles[0] if roles else "the pod")
            if len(roles) > 1:
                message += f" (so in {' and '.join(roles[1:])})"
            yield Finding(
                rule.code,
                severity,
                document.source,
                document.line(hit.path),
                name,
                dotted(hit.path),
                message,
                hit.fix or rule.fix,
                rule.values if chart else "",
                by,
            )


def _without_role(path: Place) -> Place:
    return (*path[:2], "*", *path[3:]) if path[1:2] == ("pytorchReplicaSpecs",) else path


def _role(path: Place) -> str:
    return str(path[2]) if path[1:2] == ("pytorchReplicaSpecs",) and len(path) > 2 else ""


def _without_annotated(job: Job, findings: list[Finding]) -> tuple[list[Finding], int]:
    """The findings that no annotation of the object, or of the pod template that they are in, silences."""
    places: list[tuple[str, set[str]]] = [("", _codes(job.metadata))]
    if job.kind != "TrainJob":
        places += [(dotted(template.path), _codes(template.metadata)) for template in job.templates]
    places = [(path, codes) for path, codes in places if codes]
    if not places:
        return findings, 0
    kept = [
        finding
        for finding in findings
        if not any(finding.code in codes and finding.path.startswith(path) for path, codes in places)
    ]
    return kept, len(findings) - len(kept)


def _codes(metadata: dict[str, Any]) -> set[str]:
    """``PT204: reason, PT404`` -> the codes."""
    text = str((metadata.get("annotations") or {}).get(IGNORE) or "")
    return {code.upper() for code in re.findall(r"(?:^|[,;\n])\s*(PT\d{3})\b", text, re.IGNORECASE)}


def _around_jobs(documents: list[Document]) -> Iterator[Finding]:
    """Misspelt kinds, which nobody else would look at, and secrets in ConfigMaps."""
    for document in documents:
        kind = document.kind
        if kind not in KINDS and (wanted := _meant(document)):
            fix, message = (
                "write the kind as it is spelt there",
                f"{kind!r} is not a kind{near(kind, [wanted])}",
            )
            place = (document.source, document.line(("kind",)), f"{kind} {document.name}")
            yield Finding("PT006", "error", *place, "kind", message, fix, by="api")
        if kind == "ConfigMap" and isinstance(document.content.get("data"), dict):
            for key, value in document.content["data"].items():
                for name in _secrets(str(key), str(value)):
                    fix = "put it into a Secret and refer to it"
                    place = (document.source, document.line(("data", key)), f"ConfigMap {document.name}")
                    message = f"{name} holds a secret in plain text"
                    yield Finding("PT403", "warning", *place, f"data.{key}", message, fix)


def _meant(document: Document) -> str:
    """The kind that a misspelt one stands for, or ""."""
    if document.kind in OTHERS or document.kind.endswith("List"):
        return ""
    lower = {kind.lower(): kind for kind in KINDS}
    close = document.kind.lower()
    group = str(document.content.get("apiVersion") or "").partition("/")[0]
    if close in lower or close.removesuffix("s") in lower:
        return lower.get(close) or lower[close.removesuffix("s")]
    if group in ("kubeflow.org", "trainer.kubeflow.org"):
        guess = near(document.kind, list(KINDS))
        return next((kind for kind in KINDS if f"'{kind}'" in guess), "")
    return ""


def _secrets(key: str, text: str) -> Iterator[str]:
    """Names of the secrets written into one entry of a ConfigMap, itself or a file of ``name: value``
    lines."""
    if "\n" not in text and pods.secret(key, text):
        yield key
        return
    for match in re.finditer(
        r"^\s*(?:export\s+)?[\"']?([\w.-]+)[\"']?\s*[:=]\s*[\"']?([^\"'\s#]+)", text, re.MULTILINE
    ):
        if pods.secret(match[1], match[2]):
            yield match[1]


def dotted(path: Iterable[str | int]) -> str:
    """``spec.containers[0].env[1]``, as kubectl and jq write a path."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text
