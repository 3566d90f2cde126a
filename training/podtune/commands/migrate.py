"""Podtune migrate: a PyTorchJob as a TrainJob with its runtime, or as an Indexed Job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
import yaml

from podtune.cluster.job.manifest import Json
from podtune.cluster.job.pytorchjob import LABEL
from podtune.cluster.lint.check import lint
from podtune.cluster.lint.documents import Document, read
from podtune.cluster.lint.sources import read_sources
from podtune.cluster.lint.targets import parse
from podtune.cluster.migrate.compare import compare, differences
from podtune.cluster.migrate.migrate import migrate as rewrite
from podtune.run.errors import DATA, DataError, printable


def migrate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Manifests with PyTorchJobs; - reads stdin.")],
    to: Annotated[
        Literal["trainjob", "job"],
        typer.Option(help="trainjob (Kubeflow Trainer 2.2 and later) or job (no operator)."),
    ] = "trainjob",
) -> None:
    """Rewrite a PyTorchJob as a TrainJob with its runtime, or as an Indexed Job with a Service, on stdout.

    The pods before and after are compared rank by rank: image, command, volumes, resources and every
    variable. What has no equal is named on stderr, and the exit code is 65. Other manifests of the file stay
    as they are.

    \b
    Examples:
      podtune migrate job.yaml > trainjob.yaml
      kubectl get pytorchjob my-run -o yaml | podtune migrate - --to job | kubectl apply -f -
    """
    documents, known = _read(file)
    written: list[Json] = []
    lost: list[str] = []
    for document in documents:
        if document.kind != "PyTorchJob":
            written.append(document.content)
            if LABEL in str(document.content):
                lost.append(f"{document.kind} {document.name} selects by {LABEL}..., which the new pods lack")
            continue
        result = rewrite(document.content, to)
        written += result.documents
        ranks = compare(document.content, result.documents)
        for one in ranks:
            equal = f"{one.variables} variables" + ("" if one.differences else " and all else")
            _say(f"{one.before} -> {one.after}: equal in {equal}")
        lost += [f"{document.name}: {what}" for what in (*result.lost, *differences(ranks))]
    text = yaml.safe_dump_all(written, sort_keys=False, width=110)
    print(text, end="")
    for version in ("2.2", "2.4"):
        for finding in lint([("-", text)], target=parse(f"trainer={version}")).findings:
            if finding.severity == "error" and finding.code not in known:
                lost.append(f"{finding.job}: {finding.message}")
    for what in dict.fromkeys(lost):
        _say(f"no equal: {what}")
    if lost:
        raise typer.Exit(DATA)


def _read(file: Path) -> tuple[list[Document], set[str]]:
    """The documents of ``file``, and the codes of what lint finds in them already."""
    (source,) = read_sources([str(file)])
    before = lint([source]).findings
    for finding in before:
        if finding.code < "PT010":  # not what the API server would read; PT008 is a variable left
            raise DataError(finding.message, where=f"{file}:{finding.line}", fix=finding.fix)
    documents = read(source[1], str(file))[0]
    jobs = [document for document in documents if document.kind == "PyTorchJob"]
    if not jobs or any(job.holder for job in jobs):
        what = f"the PyTorchJob is inside a {jobs[0].holder}" if jobs else "there is no PyTorchJob"
        raise DataError(what, where=str(file), fix="give a manifest of the PyTorchJob itself")
    return documents, {finding.code for finding in before}


def _say(text: str) -> None:
    print(f"podtune: {printable(text)}", file=sys.stderr)
