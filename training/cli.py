"""The podtune command. Each group of subcommands lives in training/commands and imports what it needs when it runs."""

from __future__ import annotations

import sys

import typer

from training.commands import aim, bench, collect, data, doctor, dry_run, generate, jobs, launch, manifests, model, runs
from training.run.errors import UserError, report

app = typer.Typer(
    name="podtune",
    help="Fine-tune small language models on Kubernetes, from one pod to many, and measure what it costs.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench.app, name="bench")
app.add_typer(data.app, name="data")
app.add_typer(model.app, name="model")
app.command()(generate.generate)
app.command("aim-sync")(aim.aim_sync)
app.command()(runs.runs)
app.command()(runs.compare)
app.command()(runs.watch)
app.command("collect")(collect.collect)
app.command()(doctor.doctor)
app.command("lint")(manifests.lint)
app.command("render")(manifests.render)
app.command("dry-run")(dry_run.dry_run)
app.command("submit")(jobs.submit)
app.command("status")(jobs.status)
app.command("logs")(jobs.logs)
app.command("delete")(jobs.delete)
app.command("launch")(launch.launch)
app.command("prepare")(launch.prepare)


def main() -> None:
    """Run one command; a user's error becomes one message and its exit code, never a traceback."""
    try:
        app()
    except UserError as error:
        sys.exit(report(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
