"""Podtune lint: jobs and runtimes before a cluster sees them."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from podtune.cluster.lint import check, output
from podtune.cluster.lint.explain import explanation
from podtune.cluster.lint.rules import find
from podtune.cluster.lint.sources import read_sources
from podtune.cluster.lint.targets import parse
from podtune.run.errors import DATA, UsageError


def lint(
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE|DIR|-", help="Manifests; - reads stdin.")
    ] = None,
    form: Annotated[
        Literal["text", "json", "github", "sarif"],
        typer.Option("--format", help="Of the verdict; github makes annotations of a pull request."),
    ] = "text",
    ignore: Annotated[
        str, typer.Option(metavar="CODES", help="Rules to leave out, for instance PT204,PT404.")
    ] = "",
    fail_on: Annotated[Literal["error", "warning", "never"], typer.Option(help="What fails.")] = "error",
    fail_if_none: Annotated[
        bool, typer.Option("--fail-if-none", help="No job or runtime in the files is a failure, too.")
    ] = False,
    target: Annotated[
        str,
        typer.Option(metavar="VERSIONS", help="operator=1.9,trainer=2.1; else any Trainer, 2.0 to 2.4."),
    ] = "",
    notes: Annotated[
        bool, typer.Option("--notes", help="Notes one by one; else those of a job share a line.")
    ] = False,
    explain: Annotated[
        str, typer.Option(metavar="CODE", help="A rule: what it means, with a bad and a good example.")
    ] = "",
) -> None:
    """Check PyTorchJob and TrainJob manifests and training runtimes.

    An error is refused by somebody, or certainly hangs or never ends whatever the script does. Exit code 65
    with errors (--fail-on), 66 for a file that cannot be read, else 0. A rule is silenced by --ignore, or by
    the annotation lint.podtune/ignore: "PT204: reason" on a job.

    \b
    Examples:
      podtune lint job.yaml deploy/ 'jobs/*.yaml'
      podtune render -f two-node | podtune lint -
      podtune lint deploy/ --format sarif --target trainer=2.3 > lint.sarif
      podtune lint --explain PT104
    """
    if explain:
        print(explanation(explain))
        return
    if not files:
        raise UsageError("nothing to lint", fix="podtune lint FILE, a directory, or - for stdin")
    codes = {find(code, "--ignore").code for code in ignore.split(",") if code.strip()}
    verdict = check.lint(read_sources(files), ignore=codes, target=parse(target))
    if text := output.FORMATS[form](verdict, notes=notes):
        print(text)
    if verdict.empty:
        names = output.printable(", ".join(files))
        print(
            f"podtune lint: no PyTorchJob, TrainJob, distributed Job or runtime in {names}", file=sys.stderr
        )
    failures = verdict.count("error") + (verdict.count("warning") if fail_on == "warning" else 0)
    if (verdict.empty and fail_if_none) or (failures and fail_on != "never"):
        raise typer.Exit(DATA)
