"""``podtune aim-sync``: build or follow the Aim view of runs from their files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def aim_sync(
    run_dir: Annotated[Path, typer.Argument(help="A run's folder, or a folder with runs below it.")],
    repo: Annotated[
        str,
        typer.Option(
            "--repo", envvar="AIM_REPO", help=("Aim repo: a folder (made if absent) or aim://host:port.")
        ),
    ],
    follow: Annotated[
        bool,
        typer.Option("--follow", help=("Go on until the run ends; for a folder of runs, until stopped.")),
    ] = False,
    forever: Annotated[
        bool,
        typer.Option(
            "--forever", help=("With --follow: stay after the run ended, for a pod that serves one volume.")
        ),
    ] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help=("Write every point again, from the top of the files."))
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a run on stdout.")] = False,
) -> None:
    """Show runs in Aim, from run.json and metrics.jsonl. Repeating it adds nothing twice.

    \b
    Examples:
      podtune aim-sync demo/run --repo demo/aim            # after a run, or after a tracker was lost
      podtune aim-sync demo/run --repo demo/aim --follow   # while it trains
      podtune aim-sync /outputs --repo /aim --follow        # every run of a volume, the only writer of the
      repo podtune aim-sync demo/run --repo aim://aim:53800     # to an Aim server
    """
    from podtune.run.aim.sync import sync

    raise typer.Exit(sync(run_dir, repo, follow=follow, forever=forever, rebuild=rebuild, as_json=as_json))
