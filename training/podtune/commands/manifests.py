"""podtune render, and the manifests of the commands that run or create a job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podtune.commands.options import Release, Sets, Values
from podtune.run.errors import DataError

if TYPE_CHECKING:
    from podtune.cluster.job.manifest import Json


def render(
    values: Values = None,
    sets: Sets = None,
    name: Release = "run",
    namespace: Annotated[
        str, typer.Option("-n", "--namespace", help="Namespace of the manifests.")
    ] = "default",
) -> None:
    """Print the manifests that `helm install NAME charts/podtune` would create. Needs no cluster.

    \b
    Examples:
      podtune render -f deploy/values/two-node.yaml --name my-run
      podtune render -f deploy/values/two-node.yaml --set distributed.nodes=4 | kubectl apply -f -
    """
    print(chart_manifests(values or [], sets or [], name, namespace), end="")


def chart_manifests(values: list[Path], sets: list[str], name: str, namespace: str = "default") -> str:
    """The manifests of podtune's chart, of which the training YAML in ``config`` was checked, too.

    Raises:
        UserError: as :func:`podtune.cluster.chart.render.render`, or an unknown key or a wrong value there.
    """
    from podtune.cluster.chart.render import effective_values, merged_values, rendered
    from podtune.sft.config.settings import check_yaml

    own = merged_values(values, sets)
    text, effective = rendered(own, name, namespace), effective_values(own)
    if effective.get("mode") == "sft":
        check_yaml(effective.get("config") or "", "config of the values")
    return text


def linted(text: str, *, tell: bool = True) -> list[Json]:
    """The documents of a manifest with one job; what lint finds is printed, warnings only with ``tell``.

    Raises:
        DataError: no job or several, or one that the cluster would refuse.
    """
    from podtune.cluster.job.pods import one_job
    from podtune.cluster.lint.check import lint
    from podtune.cluster.lint.documents import read
    from podtune.cluster.lint.output import as_text

    verdict = lint([("manifest", text)])
    documents = [document.content for document in read(text, "manifest")[0] if not document.holder]
    if verdict.count("error") or (tell and verdict.count("warning")):
        print(as_text(verdict), file=sys.stderr)
    one_job(documents)
    if any(finding.refused for finding in verdict.findings):
        what, fix = "the cluster would refuse the job; nothing was created", "correct what is listed above"
        raise DataError(what, where="manifest", fix=fix)
    return documents
