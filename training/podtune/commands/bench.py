"""podtune bench: plan (formulas, no run), run (a sweep of measured cases), report (tables and plots)."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from podtune.commands.bench_plan import plan
from podtune.commands.options import AsJson, Context, Namespace, Sets, Values
from podtune.commands.sweep import refuse_cluster_options, run_to_end
from podtune.plan.predicted_vs_measured import plans
from podtune.report.bench.report import report as write_report
from podtune.report.draw.tables import terminal_width
from podtune.run.errors import PEER_LOST, SOFTWARE, UNAVAILABLE, UsageError, printable, working
from podtune.run.record import finite
from podtune.run.world import in_pod, read_pod
from podtune.sweep import cases
from podtune.sweep.case_runner import CaseRunner
from podtune.sweep.cases import CaseSweep, preset_names
from podtune.sweep.runner import Running

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
    values: Values = None,
    sets: Sets = None,
    at_once: Annotated[int, typer.Option(min=1, help="So many jobs at a time, with --values.")] = 1,
    namespace: Namespace = "",
    context: Context = "",
    as_json: AsJson = False,
) -> None:
    """Measure models, strategies, world sizes and precisions.

    Everything is checked before any process is started. A case that runs out of memory, hangs or fails has a
    record too. In a pod records are printed between markers as well. Ctrl-C keeps what is done; the same
    command resumes, and measures again what was asked differently or by other code. Exit code 0: every case
    measured or out of memory; 70: a case failed (inside a job always 0).

    With --values each case is a job of the chart, of as many pods as it needs and at most as many as
    distributed.nodes says: created, waited for, its record collected, deleted. Ctrl-C leaves jobs to
    themselves; the same command comes back to them. The report follows at the end.

    \b
    Examples:
      podtune bench run --preset smoke --output results/smoke
      podtune bench run --sweep mine.yaml --output results/mine
      podtune bench run --preset node -f cluster.yaml --output results/node
      podtune bench report results/smoke
    """
    if bool(preset) == bool(sweep):
        names = " or ".join(cases.preset_names())
        raise UsageError("give --preset or --sweep, one of them", fix=f"--preset {names}, or --sweep FILE")
    if not values:
        refuse_cluster_options(sets, namespace, context, at_once)
    if values and in_job:
        raise UsageError("--in-job is for the pods of a job", fix="leave it or --values out")
    requested = cases.read_sweep(sweep or cases.preset(preset))
    if values:
        runner = _in_the_cluster(requested, output, values, sets or [], at_once, namespace, context)
    else:
        runner = _here(requested, output, in_job=in_job, emits=not as_json)
        if preflight and runner.pod:
            from podtune.commands.preflight import step_zero

            if code := step_zero(sweep, wait_s=wait):
                # final: only training has something to resume
                raise typer.Exit(UNAVAILABLE if code == PEER_LOST else code)
    states = run_to_end(runner, "cases", in_cluster=bool(values))
    failed = list(states.values()).count("error")
    if as_json:
        summary = {"cells": states, "impossible": runner.expansion.impossible, "output": str(output)}
        typer.echo(json.dumps(summary, indent=2))
    elif values:
        report(output)
    if runner.writes:
        typer.echo(f"{len(states)} cases, {failed} failed; next: podtune bench report {output}", err=True)
    if failed and runner.pod is None:
        # in a job a failed case is a result; an exit code would only restart the pod
        raise typer.Exit(SOFTWARE)


def _here(requested: CaseSweep, output: Path, *, in_job: bool, emits: bool) -> CaseRunner:
    """The runner of cases in processes of this machine, or in every pod of a job."""
    pod = read_pod() if in_job else None
    nodes, nproc_per_node = (pod.nnodes, pod.nproc_per_node) if pod else (1, None)
    expansion = cases.expand(requested, nodes=nodes, nproc_per_node=nproc_per_node)
    first = pod is None or pod.node_rank == 0
    return CaseRunner(
        requested, expansion, output, pod=pod, emit=sys.stdout if emits and in_pod() and first else None
    )


def _in_the_cluster(
    requested: CaseSweep,
    output: Path,
    values: list[Path],
    sets: list[str],
    at_once: int,
    namespace: str,
    context: str,
) -> CaseRunner:
    """The runner of cases as jobs of the chart.

    Raises:
        UserError: the chart, lint or the cluster would refuse one of them; nothing is created then.
    """
    # the cluster is loaded for a sweep in it alone
    from podtune.cluster.chart.render import effective_values, merged_values
    from podtune.commands.manifests import job_starter

    own = merged_values(values, sets)
    most = effective_values(own)["distributed"]
    # other values are another place: what was measured there is not kept
    place = json.dumps(own, sort_keys=True, default=str)
    expansion = cases.expand(requested, nodes=most["nodes"], nproc_per_node=most["nprocPerNode"], place=place)
    # by the key too: the job of a case that was measured otherwise may still be there
    jobs = {f"{case.name}-{case.key}": cases.values_of(case, own) for case in expansion.cases}
    start = job_starter(namespace, context, jobs, delete=True)

    def begin(case: cases.Case, folder: Path) -> Running:
        return start(f"{case.name}-{case.key}", folder)

    return CaseRunner(requested, expansion, output, begin, at_once=at_once)


def _presets() -> list[str]:
    return preset_names()


@app.command("report")
def report(
    folder: Annotated[
        Path, typer.Argument(help="What podtune bench run wrote, or podtune collect.", metavar="DIR")
    ],
    as_json: AsJson = False,
) -> None:
    """Compare the records below DIR: which strategy, and why.

    Prints a table of each comparison; writes report.html (one page, no network needed), report.md and
    report.csv into DIR.
    Records of different precision, batch, device or commit are never put into one comparison.

    \b
    Examples:
      podtune bench report results/smoke
      podtune collect --job my-bench --output results/job && podtune bench report results/job
    """
    with working("reading records, drawing plots"):
        said = write_report(
            folder,
            lambda records: [dataclasses.asdict(plan) if plan else None for plan in plans(list(records))],
        )
    if as_json:
        typer.echo(json.dumps(finite(said.as_json()), indent=2))
    else:
        typer.echo(printable(said.text(terminal_width())))
