"""podtune render, and the manifests of the commands that run or create a job."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from podtune.cluster.chart.render import Values as ChartValues
from podtune.cluster.chart.render import effective_values, merged_values, rendered
from podtune.cluster.job.manifest import Json
from podtune.cluster.job.pods import one_job
from podtune.cluster.lint.check import lint
from podtune.cluster.lint.documents import read
from podtune.cluster.lint.output import as_text
from podtune.cluster.live import submit
from podtune.cluster.live.client import connect
from podtune.cluster.live.release import Release
from podtune.commands.options import ReleaseName, Sets, Values
from podtune.run.errors import DataError, printable, working
from podtune.sft.config.settings import check_yaml
from podtune.sweep.runner import to_stderr

NAME_LENGTH = 40  # of a job: its pods' names are longer, and end at 63


def render(
    values: Values = None,
    sets: Sets = None,
    name: ReleaseName = "run",
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
        UserError: as :func:`podtune.cluster.chart.render.rendered`, or an unknown key or a wrong value there.
    """
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
    verdict = lint([("manifest", text)])
    documents = [document.content for document in read(text, "manifest")[0] if not document.holder]
    if verdict.count("error") or (tell and verdict.count("warning")):
        print(as_text(verdict), file=sys.stderr)
    one_job(documents)
    if any(finding.refused for finding in verdict.findings):
        what, fix = "the cluster would refuse the job; nothing was created", "correct what is listed above"
        raise DataError(what, where="manifest", fix=fix)
    return documents


def job_name(name: str) -> str:
    """A name as Kubernetes allows it, without its beginning if it is long: its end is a hash."""
    short = re.sub(r"[^a-z0-9]+", "-", name.lower())[-NAME_LENGTH:].lstrip("-")
    return short if short[0].isalpha() else f"run-{short}"


def job_starter(
    namespace: str, context: str, jobs: Mapping[str, ChartValues], *, delete: bool = False
) -> Callable[[str, Path], Release]:
    """Check the jobs of a sweep, by name; return what starts one by its name, its record for a folder.

    Creates nothing yet. ``delete``: a job goes when it has ended.

    Raises:
        UserError: the chart, lint or the cluster would refuse one of them.
    """
    cluster = connect(namespace, context)
    documents: dict[str, list[Json]] = {}
    notes: dict[str, None] = {}
    with working(f"checking {len(jobs)} jobs"):
        for name, values in jobs.items():
            text = rendered(values, job_name(name), cluster.namespace)
            documents[name] = submit.installable(linted(text, tell=not documents))
            if not cluster.exists(documents[name][-1]):
                notes |= dict.fromkeys(submit.check(cluster, documents[name]))
    for each in notes:
        print(f"podtune: note: {printable(each)}", file=sys.stderr)

    def start(name: str, folder: Path) -> Release:
        return Release(cluster, documents[name], folder, to_stderr, delete=delete)

    return start
