"""podtune sweep: fine-tunes over a grid or a list, one after another on this machine, compared at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def sweep(
    file: Annotated[Path, typer.Argument(help="The sweep, in YAML.", metavar="SWEEP.yaml")],
    output: Annotated[
        Path, typer.Option(help="Folder for the runs; an earlier sweep there is gone on with.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="How each run ended, for scripts.")] = False,
) -> None:
    """Fine-tune over a grid or a list, one run after another, each as podtune train would.

    Every configuration is checked before the first run starts. Finished runs are kept; one that was broken
    off goes on from its checkpoint. With `stop: median` a run ends early that is worse than half of those
    before it at the same step. The comparison of all is OUTPUT/compare.html. Exit code 0: every run finished
    or was stopped by the rule; 70: one failed. In a cluster, submit a release for each instead.

    \b
    Examples:
      podtune sweep sweep.yaml --output runs/rates
      podtune sweep sweep.yaml --output runs/rates --json

    \b
    A sweep.yaml:
      config: sft.yaml                       # what all have in common, beside this file
      options: {max_steps: 200, eval_strategy: steps, eval_steps: 50}
      learning_rate: [1.0e-4, 3.0e-4]        # any key with a list is an axis of the grid
      seed: [1, 2]
      runs: [{}, {use_peft: true}]           # and a list of its own, each with every point of the grid
      processes: 1                           # of each run, or gpu
      stop: median
    """
    from podtune.run.errors import SOFTWARE
    from podtune.run.sweeps import SweepStopped
    from podtune.sft.sweep import Sweeper, read

    sweeper = Sweeper(read(file), output)
    try:
        states = sweeper.run()
    except SweepStopped as stopped:
        typer.echo(f"stopped; what is done is in {output}, and the same command goes on from there", err=True)
        raise typer.Exit(stopped.code) from None
    if as_json:
        typer.echo(json.dumps({"runs": states, "output": str(output)}, indent=2))
    _compare([output / name for name, state in states.items() if state != "failed"], output, quiet=as_json)
    if "failed" in states.values():
        raise typer.Exit(SOFTWARE)


def _compare(folders: list[Path], output: Path, *, quiet: bool) -> None:
    """The verdict on the screen, and the page."""
    from podtune.report.compare import page, view
    from podtune.report.compare.comparison import compare
    from podtune.report.runs.runs import load_run
    from podtune.run.errors import printable

    if len(folders) < 2:
        return
    runs = [load_run(folder) for folder in folders]
    comparison = compare(runs)
    (output / "compare.html").write_text(page.html_page(comparison, runs), encoding="utf-8")
    if not quiet:
        typer.echo(printable("\n".join(view.conclusions(comparison))))
        typer.echo(f"page    {output / 'compare.html'}")
