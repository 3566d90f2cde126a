"""``podtune runs``, ``compare`` and ``watch``: runs by their files; ``watch`` also takes a job."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from podtune.commands.options import Context, Namespace
from podtune.report.compare import page, view
from podtune.report.compare.comparison import compare as compare_runs
from podtune.report.draw.tables import terminal_width
from podtune.report.runs import listing
from podtune.report.runs.runs import load_run
from podtune.report.runs.watch import watch as watch_run
from podtune.run.errors import NotFound, UsageError, UserError, creating, printable, warn
from podtune.run.follow import find_runs
from podtune.run.record import finite


def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders to look in, and below.", show_default="the current folder"),
    ] = None,
    sort: Annotated[
        str, typer.Option("--sort", help="A field of --json, as best_loss; -FIELD turns it round.")
    ] = "age_s",
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list on stdout.")] = False,
) -> None:
    """List the runs below folders (a mounted volume is a folder), the newest first.

    \b
    Examples:
      podtune runs demo
      podtune runs /outputs --sort best_loss
      podtune runs . --json | jq '.[] | select(.status == "ok" and .loss < 1)'
    """
    roots = folders or [Path()]
    for root in roots:
        if not root.is_dir():
            raise NotFound("no such folder", where=str(root), fix="give a folder with runs below it")
    run_dirs = dict.fromkeys(run_dir for root in roots for run_dir in find_runs(root))
    found, unreadable = listing.read_runs(list(run_dirs))
    rows = listing.sort_rows(listing.list_runs(found), sort)
    for line in [*unreadable, *(problem for run in found for problem in run.problems)]:
        warn(line)
    if as_json:
        print(json.dumps(finite([asdict(row) for row in rows]), indent=2))
    elif rows:
        print(listing.table(rows).text(width=terminal_width()))
    else:
        print(f"no runs in {', '.join(map(str, roots))}")


def compare(
    folders: Annotated[list[Path], typer.Argument(help="Two or more folders of runs.", metavar="RUN RUN...")],
    as_json: Annotated[bool, typer.Option("--json", help="The comparison as JSON on stdout.")] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write one self-contained page with curves.", metavar="FILE"),
    ] = None,
) -> None:
    """Compare runs: what differs, metrics at equal steps, tokens and time, and which is better.

    \b
    Examples:
      podtune compare demo/lr-1e-3 demo/lr-3e-4
      podtune compare runs/a runs/b runs/c --html compare.html
      podtune compare runs/a runs/b --json | jq .verdict.text
    """
    if len(folders) < 2:
        raise UsageError(
            "one run cannot be compared",
            where=str(folders[0]),
            fix="give two or more: podtune compare RUN RUN",
        )
    loaded = [load_run(folder) for folder in folders]
    comparison = compare_runs(loaded)
    if html is not None:
        with creating(html, fix="give a file in an existing folder"):
            html.write_text(page.html_page(comparison), encoding="utf-8")
    if as_json:
        print(json.dumps(finite(comparison.as_json()), indent=2))
    else:
        print(printable(view.text(comparison, width=terminal_width())))
        if html is not None:
            print(f"\npage    {html}")


def watch(
    run: Annotated[
        str,
        typer.Argument(help="A run's folder, or the name of a job in the cluster.", metavar="RUN_DIR|JOB"),
    ],
    once: Annotated[
        bool,
        typer.Option("--once", help="Print the state once and end; so it does where stdout is no terminal."),
    ] = False,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Watch a run while it trains: progress, time left, loss, speed, use of each pod, last evaluation,
    warnings. Ctrl-C leaves it running.

    Of a job conditions, problems and the logs of all pods are printed as they come: no volume has to be
    mounted, and nothing runs in the pods.

    \b
    Examples:
      podtune watch demo/run
      podtune watch demo/run --once
      podtune watch my-run -n team-a
    """
    if (Path(run).exists() or "/" in run) and not (namespace or context):
        _watch_folder(Path(run), once=once)
        return
    # a list of runs need not load what speaks with a cluster
    from podtune.cluster.live.client import connect
    from podtune.commands.jobs import follow_job, print_status

    try:
        cluster = connect(namespace, context)
        job = cluster.job(run)
    except UserError as error:  # it may be a mistyped folder
        error.what = f"there is no folder {run!r} here, and as a job: {error.what}"
        raise
    if once or not sys.stdout.isatty():
        print_status(cluster, job)
    else:
        follow_job(cluster, run)


def _watch_folder(folder: Path, *, once: bool) -> None:
    try:
        watch_run(lambda: load_run(folder, curves=False), once=once)
    except KeyboardInterrupt:
        back = f"Come back: podtune watch {folder}"
        print(f"\nno longer watching; the run continues. {back}", file=sys.stderr)
        raise typer.Exit(130) from None
