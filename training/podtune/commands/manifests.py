"""podtune render, and the manifests of the commands that run or create a job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from podtune.commands.options import Release, Sets, Values
from podtune.run.errors import DataError, NotFound


def render(
    values: Values = None,
    sets: Sets = None,
    name: Release = "run",
    namespace: Annotated[str, typer.Option("-n", "--namespace", help="Of the manifests.")] = "default",
) -> None:
    """Print the manifests that `helm install NAME charts/podtune` would create. Needs no cluster.

    \b
    Examples:
      podtune render -f deploy/values/two-node.yaml --name my-run
      podtune render -f deploy/values/two-node.yaml --set distributed.nodes=4 | kubectl apply -f -
    """
    from podtune.cluster.chart.render import render as run

    print(run(values or [], sets or [], name, namespace), end="")


def read_manifest(file: Path) -> str:
    """The text of a manifest.

    Raises:
        NotFound: it cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise NotFound(f"cannot be read: {error.strerror}", where=str(file)) from error


def linted(
    text: str, *, refuse: bool = True, tell: bool = True, fix: str = "correct what is listed above"
) -> list[dict[str, Any]]:
    """The documents of a manifest with one job.

    Args:
        refuse: raise for what the API server, the webhook or the operator would refuse.
        tell: print warnings too, not errors alone.

    Raises:
        DataError: no job, several jobs, or one that the cluster would refuse.
    """
    from podtune.cluster.job.pods import is_job, one_job
    from podtune.cluster.lint.check import lint
    from podtune.cluster.lint.documents import read
    from podtune.cluster.lint.output import as_text

    verdict = lint([("manifest", text)])
    documents = [document.content for document in read(text, "manifest")[0] if not document.holder]
    found = verdict.count("error") or (tell and verdict.count("warning"))
    if found or not any(map(is_job, documents)):
        print(as_text(verdict), file=sys.stderr)
    one_job(documents)
    if refuse and any(finding.refused for finding in verdict.findings):
        raise DataError("the cluster would refuse the job; nothing was created", where="manifest", fix=fix)
    return documents
