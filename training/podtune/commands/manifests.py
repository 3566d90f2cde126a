"""podtune lint and render: a job's manifest before a cluster sees it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from podtune.run.errors import DATA, NO_INPUT, USAGE, UserError


def lint(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE|-", help="manifests; - reads stdin")
    ] = None,
    format: Annotated[
        str, typer.Option("--format", help=("text, json or github (annotations in a pull request)"))
    ] = "text",
    explain: Annotated[str, typer.Option(help="a code: what it means, with a bad and a good example")] = "",
) -> None:
    """Check PyTorchJob and TrainJob manifests: the CRD, the operator's webhook, and the traps after them.

    Needs no cluster. Exit code 0 without findings of severity error, 65 with any.

    \b
    Examples:
      podtune lint job.yaml
      podtune render -f deploy/values/two-node.yaml | podtune lint -
      helm template charts/podtune | podtune lint - --format github
      podtune lint --explain PT104
    """
    from podtune.cluster.lint import check

    if explain:
        from podtune.cluster.lint.explain import explanation

        print(explanation(explain))
        return
    writers = {"text": check.as_text, "json": check.as_json, "github": check.as_github}
    if format not in writers:
        raise UserError(f"--format is {format!r}", fix="use text, json or github", code=2)
    if not files:
        raise UserError("nothing to lint", fix="podtune lint FILE, or - for stdin", code=USAGE)
    verdict = check.lint((name, _text(name)) for name in files)
    if output := writers[format](verdict):
        print(output)
    if not verdict.jobs and not verdict.findings:
        print(f"podtune lint: no PyTorchJob or TrainJob in {', '.join(files)}", file=sys.stderr)
    if verdict.count("error"):
        raise typer.Exit(DATA)


def render(
    values: Annotated[
        list[Path] | None, typer.Option("-f", "--values", help=("values for the chart; may be repeated"))
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="as helm's --set")
    ] = None,
    name: Annotated[str, typer.Option(help="the release, and so the run")] = "run",
    namespace: Annotated[str, typer.Option("-n", "--namespace")] = "default",
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


def _text(name: str) -> str:
    if name == "-":
        return sys.stdin.read()
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(
            f"cannot read it: {reason}", where=name, fix=("name a YAML file, or - for stdin"), code=NO_INPUT
        ) from error
