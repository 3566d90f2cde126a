"""podtune bench: plan (formulas, no run), run (a sweep of measured cases), report (tables and plots)."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from podtune.commands.bench_plan import plan
from podtune.commands.options import AsJson
from podtune.run.errors import PEER_LOST, SOFTWARE, UNAVAILABLE, UsageError, working
from podtune.run.record import Json, finite

app = typer.Typer(
    help="Measure and predict the cost of each way to distribute the work.", no_args_is_help=True
)

app.command("plan")(plan)


@app.command("run")
def run(
    output: Annotated[Path, typer.Option(help="Folder for the records; a sweep there is resumed.")],
    preset: Annotated[
        str, typer.Option(help="smoke, single-gpu, node, multi-node.", autocompletion=_presets)
    ] = "",
    sweep: Annotated[Path | None, typer.Option(help="A sweep of your own, in YAML.", metavar="FILE")] = None,
    in_job: Annotated[
        bool,
        typer.Option("--in-job", help="In every pod of a job: the cases one after another on all pods."),
    ] = False,
    preflight: Annotated[
        bool, typer.Option("--preflight", help="In a job: podtune preflight before the first case.")
    ] = False,
    wait: Annotated[float, typer.Option(help="Seconds that it waits for the other pods to arrive.")] = 900.0,
    as_json: AsJson = False,
) -> None:
    """Measure a sweep: models x strategies x world sizes x precisions, one record a case.

    Everything is checked before any process is started. A case that runs out of memory, hangs or fails has a
    record too. In a pod records are printed between markers as well. Ctrl-C keeps what is done; the same
    command resumes, and measures again what was asked differently or by other code. Exit code 0: every case
    measured or out of memory; 70: a case failed (inside a job always 0).

    \b
    Examples:
      podtune bench run --preset smoke --output results/smoke
      podtune bench run --sweep mine.yaml --output results/mine
      podtune bench report results/smoke
    """
    from podtune.commands.preflight import step_zero
    from podtune.run.world import in_pod, read_pod
    from podtune.sweep import cases
    from podtune.sweep.case_runner import CaseRunner
    from podtune.sweep.runner import SweepStopped

    if bool(preset) == bool(sweep):
        names = " or ".join(cases.preset_names())
        raise UsageError("give --preset or --sweep, one of them", fix=f"--preset {names}, or --sweep FILE")
    requested = cases.read_sweep(sweep or cases.preset(preset))
    pod = read_pod() if in_job else None
    if preflight and pod and (code := step_zero(sweep, wait_s=wait)):
        # final: only training has something to resume
        raise typer.Exit(UNAVAILABLE if code == PEER_LOST else code)
    nodes, nproc_per_node = (pod.nnodes, pod.nproc_per_node) if pod else (1, None)
    expansion = cases.expand(requested, nodes=nodes, nproc_per_node=nproc_per_node)
    first = pod is None or pod.node_rank == 0
    emit = sys.stdout if not as_json and in_pod() and first else None
    try:
        states = CaseRunner(requested, expansion, output, pod=pod, emit=emit).run()
    except SweepStopped as stopped:
        typer.echo(f"stopped; finished cases are in {output}, and the same command resumes", err=True)
        raise typer.Exit(stopped.code) from None
    failed = list(states.values()).count("error")
    if as_json:
        summary = {"cells": states, "impossible": expansion.impossible, "output": str(output)}
        typer.echo(json.dumps(summary, indent=2))
    if first:
        typer.echo(f"{len(states)} cases, {failed} failed; next: podtune bench report {output}", err=True)
    if failed and pod is None:  # in a job a failed case is a result; an exit code would only restart the pod
        raise typer.Exit(SOFTWARE)


def _presets() -> list[str]:
    from podtune.sweep.cases import preset_names

    return preset_names()


@app.command("report")
def report(
    folder: Annotated[
        Path, typer.Argument(help="What podtune bench run wrote, or logs of a job.", metavar="DIR")
    ],
    as_json: AsJson = False,
) -> None:
    """Compare the records below DIR: which strategy to use, why, and what cannot be compared.

    Prints a table of each comparison; writes report.html (one page, no network needed), report.md and
    report.csv into DIR.
    Records of different precision, batch, device or commit are never put into one comparison.

    \b
    Examples:
      podtune bench report results/smoke
      kubectl logs my-bench-master-0 > results/job/pod.log && podtune bench report results/job
    """
    from collections.abc import Iterable

    from podtune.plan.predicted_vs_measured import plans
    from podtune.report.bench.report import report as write_report
    from podtune.report.bench.report import terminal_table
    from podtune.report.draw.tables import terminal_width
    from podtune.run.errors import printable

    def planner(records: Iterable[Json]) -> list[Json | None]:
        return [None if each is None else dataclasses.asdict(each) for each in plans(list(records))]

    working("reading records, drawing plots")
    said = write_report(folder, planner)
    if as_json:
        typer.echo(json.dumps(finite(said), indent=2))
        return
    for comparison in said["comparisons"]:
        sentences = [f"  {text}" for text in comparison["advice"] + comparison["cautions"]]
        typer.echo(printable("\n".join([comparison["title"], *sentences, ""])))
        if (table := terminal_table(comparison["cells"])).rows:
            typer.echo(f"{table.text(width=terminal_width())}\n")
    for text in [
        *said["not_compared"],
        *said["damaged"],
        *(f"{name}: {why}" for name, why in said["failed"].items()),
    ]:
        typer.echo(printable(text))
    typer.echo("\n".join(said["files"]))
