"""podtune sweep: fine-tunes over a grid or a list, here or in a cluster, compared at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from podtune.commands.options import AsJson, Context, Namespace, Sets, Values
from podtune.report.compare import page
from podtune.report.compare.comparison import compare
from podtune.report.runs.runs import load_run
from podtune.run.errors import SOFTWARE, ConfigError, UsageError, printable
from podtune.run.record import RUN_FILE
from podtune.run.yaml_text import load
from podtune.sweep.runner import Begin, State, Sweep, SweepStopped
from podtune.sweep.trials import Trial, TrialRunner, read_sweep, start_here


def sweep(
    file: Annotated[Path, typer.Argument(help="The sweep, in YAML.", metavar="SWEEP.yaml")],
    output: Annotated[Path, typer.Option(help="Folder for the runs; a sweep there is resumed.")],
    values: Values = None,
    sets: Sets = None,
    at_once: Annotated[
        int, typer.Option(min=1, help="So many jobs at a time, with --values; a queue may hold them back.")
    ] = 1,
    namespace: Namespace = "",
    context: Context = "",
    as_json: AsJson = False,
) -> None:
    """Fine-tune over a grid or a list, here or with --values in the cluster, and compare the runs.

    Here one run after another, each as podtune train would; with --values as jobs of the chart, some at
    once, each as podtune submit would. Every configuration is checked before the first run starts. Finished
    runs are kept; an interrupted one resumes from its checkpoint. The comparison of all is
    OUTPUT/compare.html. Exit code 0: every run finished; 70: one failed.

    In a cluster the config of the values is what all runs have in common, and the sweep's keys overrule it.
    Name claims that exist (persistence.*.existingClaim), so that model and data are prepared once. Ctrl-C
    leaves the jobs to themselves; the same command comes back to them. Ended jobs stay for
    runPolicy.ttlSecondsAfterFinished.

    \b
    Examples:
      podtune sweep sweep.yaml --output runs/rates
      podtune sweep sweep.yaml --output runs/rates -f two-node -f claims.yaml --at-once 2

    \b
    A sweep.yaml:
      config: sft.yaml                       # what all have in common, beside this file
      options: {max_steps: 200, eval_strategy: steps, eval_steps: 50}
      learning_rate: [1.0e-4, 3.0e-4]        # any key with a list is an axis of the grid
      runs: [{}, {use_peft: true}]           # and a list of its own, each with every point of the grid
      processes: 1                           # of each run on this machine, or gpu
    """
    if values:
        trials, begin = _in_the_cluster(file, values, sets or [], namespace, context)
    else:
        refuse_cluster_options(sets, namespace, context, at_once)
        trials, begin = read_sweep(file), start_here
    states = run_to_end(TrialRunner(trials, output, begin, at_once=at_once), "runs", in_cluster=bool(values))
    if as_json:
        typer.echo(json.dumps({"runs": states, "output": str(output)}, indent=2))
    _compare([output / name for name in states if states[name] != "failed"], output, quiet=as_json)
    if "failed" in states.values():
        raise typer.Exit(SOFTWARE)


def _in_the_cluster(
    file: Path, values: list[Path], sets: list[str], namespace: str, context: str
) -> tuple[list[Trial], Begin[Trial]]:
    """The sweep on top of the values' config, and the starter of its trials.

    Raises:
        UserError: the chart, lint or the cluster would refuse one of the runs; nothing is created then.
    """
    # the cluster is loaded for a sweep in it alone
    from podtune.cluster.chart.render import effective_values, merged_values
    from podtune.commands.manifests import job_starter

    own = merged_values(values, sets)
    below = load(effective_values(own).get("config") or "{}", "config of the values")
    if not isinstance(below, dict):
        raise ConfigError("is not a mapping of keys to values", where="config of the values")
    own.pop("config", None)
    trials = read_sweep(file, place=json.dumps(own, sort_keys=True, default=str), below=below)
    configs = {trial.name: yaml.safe_dump(trial.content, sort_keys=False) for trial in trials}
    start = job_starter(namespace, context, {name: {**own, "config": text} for name, text in configs.items()})
    return trials, lambda trial, folder: start(trial.name, folder)


def refuse_cluster_options(sets: list[str] | None, namespace: str, context: str, at_once: int) -> None:
    """Raise :class:`UsageError` for an option that says nothing to a sweep on this machine."""
    if sets or namespace or context or at_once > 1:
        what = "--set, --at-once, --namespace and --context are for a sweep in a cluster"
        raise UsageError(what, fix="add -f VALUES, or leave them out")


def run_to_end(runner: Sweep[Any], what: str, *, in_cluster: bool) -> dict[str, State]:
    """Run the sweep of ``what``; Ctrl-C and SIGTERM end the command, with a line on how to go on."""
    try:
        return runner.run()
    except SweepStopped as stopped:
        left = "; jobs continue, `podtune delete NAME` ends one" if in_cluster else ""
        text = f"stopped; finished {what} are in {runner.output}, and the same command resumes{left}"
        typer.echo(text, err=True)
        raise typer.Exit(stopped.code) from None


def _compare(folders: list[Path], output: Path, *, quiet: bool) -> None:
    """Print the verdict, and write the page."""
    # a job whose log was rotated leaves none
    runs = [load_run(folder) for folder in folders if (folder / RUN_FILE).exists()]
    if len(runs) < 2:
        return
    comparison = compare(runs)
    file = output / "compare.html"
    file.write_text(page.html_page(comparison, f"Sweep {output.name}"), encoding="utf-8")
    if not quiet:
        typer.echo(printable("\n".join([*comparison.conclusions, f"page    {file}"])))
