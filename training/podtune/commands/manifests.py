"""podtune render: a job's manifests without helm and without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def render(
    values: Annotated[
        list[Path] | None, typer.Option("-f", "--values", help="Values for the chart; may be repeated.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As helm's --set.")
    ] = None,
    name: Annotated[str, typer.Option(help="The release, and so the run.")] = "run",
    namespace: Annotated[str, typer.Option("-n", "--namespace", help="Of the manifests.")] = "default",
) -> None:
    """Print the manifests that `helm install NAME charts/podtune` would create. Needs neither helm nor a
    cluster.

    \b
    Examples:
      podtune render -f deploy/values/two-node.yaml --name my-run
      podtune render -f deploy/values/two-node.yaml --set distributed.nodes=4 | kubectl apply -f -
    """
    from podtune.cluster.chart.render import render as run

    print(run(values or [], sets or [], name, namespace), end="")
