"""podtune aim-sync and aim-ui: the Aim view of runs, made from their files, and its page."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from podtune.run.aim.sync import sync
from podtune.run.aim.ui import serve
from podtune.run.errors import NotFound, Unavailable, working


def aim_sync(
    run_dir: Annotated[Path, typer.Argument(help="A run's folder, or a folder with runs below it.")],
    repo: Annotated[
        str,
        typer.Option(
            "--repo", envvar="AIM_REPO", help="Aim repo: a folder (made if absent) or aim://host:port."
        ),
    ],
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Continue until the run ends; for a folder of runs, until stopped."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a run on stdout.")] = False,
) -> None:
    """Show runs in Aim, from run.json and metrics.jsonl. Repeating it adds nothing twice.

    \b
    Examples:
      podtune aim-sync demo/run --repo demo/aim            # after a run, or after a tracker was lost
      podtune aim-sync demo/run --repo demo/aim --follow   # while it trains
      podtune aim-sync /outputs --repo /aim --follow       # every run of a volume; the repo's only writer
      podtune aim-sync demo/run --repo aim://aim:53800     # to an Aim server
    """
    with working("opening the Aim repository", shown=not follow):
        sync(run_dir, repo, follow=follow, as_json=as_json)


def aim_ui(
    repo: Annotated[Path, typer.Option("--repo", envvar="AIM_REPO", help="Aim repo: a folder.")],
    host: Annotated[str, typer.Option(help="Address to listen on; in a pod 0.0.0.0.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the page; 0 takes a free one.")] = 43800,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--name", help="Another name than localhost by which the page is opened; may be repeated."
        ),
    ] = None,
) -> None:
    """Aim's web page, for this machine's own browser.

    No other web site is answered, and no variable of the environment is in its processes.

    \b
    Examples:
      podtune aim-ui --repo demo/aim
    """
    if importlib.util.find_spec("aim") is None:
        raise Unavailable("Aim is not installed", fix="pip install 'podtune[aim]'")
    if not (repo / ".aim").is_dir():
        raise NotFound("there is no Aim repository", where=str(repo), fix="podtune aim-sync RUN --repo REPO")
    serve(repo, host, port, names or ())
