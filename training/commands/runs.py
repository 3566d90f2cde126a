"""``podtune runs``, ``podtune compare`` and ``podtune watch``: look at runs through their files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def runs(
    folders: Annotated[list[Path] | None, typer.Argument(help="Folders to look in, and below.", show_default="the current folder")] = None,
    where: Annotated[str, typer.Option("--where", help='For example "learning_rate>1e-5 and status=ok".')] = "",
    sort: Annotated[str, typer.Option("--sort", help="A field of the table or the record; -FIELD turns it round.")] = "age_s",
    as_json: Annotated[bool, typer.Option("--json", help="A JSON list on stdout.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values on stdout.")] = False,
) -> None:
    """List the runs below a folder, the newest first.

    \b
    Examples:
      podtune runs demo
      podtune runs /output --where "learning_rate>1e-5 and status=ok" --sort best_loss
      podtune runs . --where "status=died or status=running"
      podtune runs . --sort=-tokens_per_s --csv
    """
    import json
    import sys

    from training.report import listing
    from training.run.errors import NO_INPUT, UserError
    from training.run.follow import find_runs
    from training.run.record import finite

    roots = folders or [Path()]
    for root in roots:
        if not root.is_dir():
            raise UserError("no such folder", where=str(root), fix="give a folder with runs below it", code=NO_INPUT)
    rows, unreadable = listing.list_runs(list(dict.fromkeys(run_dir for root in roots for run_dir in find_runs(root))))
    if where:
        test = listing.where(where, rows)
        rows = [row for row in rows if test(row)]
    rows = listing.sort_rows(rows, sort)
    for line in [*unreadable, *(problem for row in rows for problem in row.problems)]:
        print(f"podtune: warning: {line}", file=sys.stderr)
    if as_json:
        print(json.dumps(finite([row.values for row in rows]), indent=2, ensure_ascii=False))
    elif as_csv:
        print(listing.csv_text(rows), end="")
    elif rows:
        print(listing.table(rows).text(width=_width()))
    else:
        print(f"no runs{' that match' if where else ''} in {', '.join(map(str, roots))}")


def compare(
    folders: Annotated[list[Path], typer.Argument(help="Two or more folders of runs.", metavar="RUN RUN...")],
    as_json: Annotated[bool, typer.Option("--json", help="The comparison as JSON on stdout.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Markdown on stdout.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write one self-contained page with curves.", metavar="FILE")] = None,
) -> None:
    """Compare runs: what differs, metrics at equal steps, tokens and time, and which is better.

    \b
    Examples:
      podtune compare demo/lr-1e-3 demo/lr-3e-4
      podtune compare runs/a runs/b runs/c --html compare.html
      podtune compare runs/a runs/b --json | jq .verdict.text
    """
    import json

    from training.report import compare as view
    from training.report.comparison import compare as compare_runs
    from training.report.runs import load_run
    from training.run.errors import CANNOT_CREATE, USAGE, UserError
    from training.run.record import finite

    if len(folders) < 2:
        raise UserError("one run cannot be compared", where=str(folders[0]), fix="give two or more: podtune compare RUN RUN", code=USAGE)
    loaded = [load_run(folder) for folder in folders]
    found = compare_runs(loaded)
    if html is not None:
        try:
            html.write_text(view.html_page(found, loaded), encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"cannot be written: {error.strerror}", where=str(html), fix="give a file in an existing folder", code=CANNOT_CREATE
            ) from None
    if as_json:
        print(json.dumps(finite(found), indent=2, ensure_ascii=False))
    elif as_markdown:
        print(view.markdown(found))
    else:
        print(view.text(found, width=_width()))
        if html is not None:
            print(f"\npage    {html}")


def watch(
    run_dir: Annotated[Path, typer.Argument(help="A run's folder.")],
    once: Annotated[bool, typer.Option("--once", help="Print the state once and end; so it does where stdout is no terminal.")] = False,
) -> None:
    """Watch a run while it trains: progress, time left, loss, speed, last evaluation, warnings. Ctrl-C leaves it running.

    \b
    Examples:
      podtune watch demo/run
      podtune watch demo/run --once
    """
    from training.report.watch import watch as watch_run

    raise typer.Exit(watch_run(run_dir, once=once))


def _width() -> int | None:
    """The terminal's width; no limit where stdout is a file or a pipe."""
    import os
    import sys

    return os.get_terminal_size().columns if sys.stdout.isatty() else None
