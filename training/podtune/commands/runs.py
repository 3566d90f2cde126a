"""``podtune runs``, ``compare`` and ``watch``: runs by their files, or by their jobs' logs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podtune.commands.options import Context, Namespace
from podtune.run.errors import CannotCreate, NotFound, UsageError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from podtune.report.runs.runs import Run


def runs(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders to look in, and below.", show_default="the current folder"),
    ] = None,
    sort: Annotated[
        str, typer.Option("--sort", help="A field of --json, as best_loss; -FIELD turns it round.")
    ] = "age_s",
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list on stdout.")] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="The jobs of a namespace instead, by their pods' logs.")
    ] = False,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """List the runs below folders (a mounted volume is a folder), or the jobs of a namespace; the newest
    first.

    \b
    Examples:
      podtune runs demo
      podtune runs --cluster -n team-a
      podtune runs /outputs --sort best_loss
      podtune runs . --json | jq '.[] | select(.status == "ok" and .loss < 1)'
    """
    import json
    from dataclasses import asdict

    from podtune.report.draw.tables import terminal_width
    from podtune.report.runs import listing
    from podtune.run.errors import warn
    from podtune.run.record import finite

    if folders and cluster:
        raise UsageError(
            "give folders, or --cluster", where="runs", fix="two commands: the views have different sources"
        )
    found, unreadable, places = _of_jobs(namespace, context) if cluster else _below(folders or [Path()])
    rows = listing.sort_rows(listing.list_runs(found), sort)
    for line in [*unreadable, *(problem for run in found for problem in run.problems)]:
        warn(line)
    if as_json:
        print(json.dumps(finite([asdict(row) for row in rows]), indent=2))
    elif rows:
        print(listing.table(rows).text(width=terminal_width()))
    else:
        print(f"no {'jobs' if cluster else 'runs'} in {places}")


def _below(roots: list[Path]) -> tuple[list[Run], list[str], str]:
    """The runs below ``roots``, what could not be read, and the places."""
    from podtune.report.runs.listing import read_runs
    from podtune.run.follow import find_runs

    for root in roots:
        if not root.is_dir():
            raise NotFound("no such folder", where=str(root), fix="give a folder with runs below it")
    run_dirs = dict.fromkeys(run_dir for root in roots for run_dir in find_runs(root))
    return *read_runs(list(run_dirs)), ", ".join(map(str, roots))


def _of_jobs(namespace: str, context: str) -> tuple[list[Run], list[str], str]:
    """The same of a namespace's jobs."""
    from podtune.cluster.live.client import connect
    from podtune.cluster.live.job_log import snapshots
    from podtune.report.runs.job import job_runs

    there = connect(namespace, context)
    found: list[Run] = [run for snapshot in snapshots(there) for run in job_runs(snapshot)]
    return found, [], f"the namespace {there.namespace}"


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
    import json

    from podtune.report.compare import page, view
    from podtune.report.compare.comparison import compare as compare_runs
    from podtune.report.draw.tables import terminal_width
    from podtune.report.runs.runs import load_run
    from podtune.run.errors import printable
    from podtune.run.record import finite

    if len(folders) < 2:
        raise UsageError(
            "one run cannot be compared",
            where=str(folders[0]),
            fix="give two or more: podtune compare RUN RUN",
        )
    loaded = [load_run(folder) for folder in folders]
    comparison = compare_runs(loaded)
    if html is not None:
        try:
            html.write_text(page.html_page(comparison), encoding="utf-8")
        except OSError as error:
            raise CannotCreate(
                f"cannot be written: {error.strerror}",
                where=str(html),
                fix="give a file in an existing folder",
            ) from None
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

    A job is watched through its conditions and its pods' logs: no volume has to be mounted, and nothing runs
    in the pods.

    \b
    Examples:
      podtune watch demo/run
      podtune watch demo/run --once
      podtune watch my-run -n team-a
    """
    import sys

    from podtune.report.runs.watch import watch as watch_run

    is_folder = (Path(run).exists() or "/" in run) and not (namespace or context)
    try:
        look = _look_at_folder(Path(run)) if is_folder else _look_at_job(run, namespace, context)
        watch_run(look, once=once)
    except KeyboardInterrupt:
        what = "run" if is_folder else "job"
        print(f"\nno longer watching; the {what} continues. Come back: podtune watch {run}", file=sys.stderr)
        raise typer.Exit(130) from None
    except UserError as error:
        if not is_folder:  # it may be a mistyped folder
            error.what = f"there is no folder {run!r} here, and as a job: {error.what}"
        raise


def _look_at_folder(folder: Path) -> Callable[[], Run]:
    from podtune.report.runs.runs import load_run

    return lambda: load_run(folder, curves=False)


def _look_at_job(name: str, namespace: str, context: str) -> Callable[[], Run]:
    from podtune.cluster.live.client import connect
    from podtune.cluster.live.job_log import JobWatch
    from podtune.report.runs.job import job_runs

    job = JobWatch(connect(namespace, context), name)
    return lambda: job_runs(job.look())[-1]
