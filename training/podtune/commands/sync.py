"""podtune sync: ended runs copied to a tracker, from their files."""

from __future__ import annotations

from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from podtune.run.aim.sync import sync as sync_to_aim
from podtune.run.errors import DataError, NotFound, Unavailable, warn, working
from podtune.run.follow import find_runs
from podtune.run.trackers import TRACKERS, read_run


class Tracker(StrEnum):
    """Where runs can be copied to."""

    mlflow = "mlflow"
    tensorboard = "tensorboard"
    trackio = "trackio"
    aim = "aim"


def sync(
    run_dir: Annotated[Path, typer.Argument(help="A run's folder, or a folder with runs below it.")],
    to: Annotated[Tracker, typer.Option("--to", help="The tracker; its package is the extra of that name.")],
    repo: Annotated[
        str | None,
        typer.Option(
            "--repo",
            help="MLflow's tracking URI, trackio's project, or Aim's repository; "
            "TensorBoard's events are in tensorboard/ of each run.",
        ),
    ] = None,
) -> None:
    """Copy ended runs to MLflow, TensorBoard, trackio or Aim. Repeating it adds nothing twice.

    \b
    Examples:
      podtune sync demo/run --to tensorboard                        # then: tensorboard --logdir demo
      podtune sync demo/run --to mlflow --repo http://mlflow:5000
      podtune sync /outputs --to trackio --repo my-project
      podtune sync demo/run --to aim --repo demo/aim
    """
    if find_spec(to) is None:
        raise Unavailable(f"{to} is not installed", fix=f"pip install 'podtune[{to}]'")
    if to is Tracker.tensorboard and repo:
        raise typer.BadParameter("TensorBoard's events are in the run's folder", param_hint="--repo")
    if to is Tracker.aim:
        if repo is None:
            raise typer.BadParameter("Aim needs a repository", param_hint="--repo")
        sync_to_aim(run_dir, repo, follow=False, as_json=False)
        return
    run_dirs = find_runs(run_dir)
    if not run_dirs:
        raise NotFound("no run here", where=str(run_dir), fix="give the --output_dir of a run")
    for folder in run_dirs:
        try:
            run = read_run(folder)
        except DataError as error:
            if len(run_dirs) == 1:
                raise
            warn(f"left out: {error.where}: {error.what}")
            continue
        with working(f"writing to {to}"):
            written = TRACKERS[to](run, repo)
        print(f"{folder}: {len(run.points)} lines -> {written}")
