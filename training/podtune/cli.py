"""The podtune command. A subcommand is imported when it is run, so that each starts at once."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated

import click
import typer
from typer.core import TyperGroup

from podtune.run.errors import USAGE, Unavailable, UserError, near, reader_left, report

# the module in podtune/commands (a group of commands has an `app` there, a command a function), and the line
# in `podtune --help`, of at most 60 characters
PANELS: dict[str, dict[str, tuple[str, str]]] = {
    "Try": {
        "data": ("data", "build a question-answer set, see what would be trained"),
        "model": ("model", "build a small model, look at any, merge an adapter"),
        "train": ("train", "fine-tune on this machine, on one process or several"),
        "sweep": ("sweep", "fine-tunes over a grid, one after another, compared"),
        "generate": ("generate", "ask a model, talk with it, or answer a file"),
        "eval": ("eval", "scores on lm-evaluation-harness, base beside tuned"),
        "skill": ("skill", "print how an agent uses podtune"),
    },
    "Compare": {
        "runs": ("runs", "list runs with state, progress and loss"),
        "compare": ("runs", "runs side by side: what differs, which is better"),
        "watch": ("runs", "follow a run or a job until it ends"),
        "aim-sync": ("aim", "copy the metrics of runs into an Aim repository"),
        "sync": ("sync", "copy a run to MLflow, TensorBoard, trackio or Aim"),
        "aim-ui": ("aim", "the page of an Aim repository, for this machine alone"),
        "bench": ("bench", "plan, measure and report ways to distribute training"),
    },
    "Cluster": {
        "init": ("init", "write a values file for my data, model and GPUs"),
        "doctor": ("doctor", "what this machine or a cluster lacks, with the fix"),
        "render": ("manifests", "print the manifests of a job"),
        "lint": ("lint", "check PyTorchJobs and TrainJobs before a cluster does"),
        "migrate": ("migrate", "a PyTorchJob as a TrainJob or an Indexed Job"),
        "dry-run": ("dry_run", "run a job's pods as local processes"),
        "submit": ("jobs", "create a job, and follow it"),
        "status": ("jobs", "how a job and its pods are doing"),
        "why": ("why", "why a job does not run, in one sentence"),
        "logs": ("jobs", "the logs of a job's pods"),
        "delete": ("jobs", "delete a job and what the chart made for it"),
        "collect": ("collect", "get a run's record back out of a log"),
    },
    "Inside pods": {
        "prepare": ("launch", "fetch model and data, and tokenise, once for all pods"),
        "preflight": ("preflight", "check GPUs and network of the pods before training"),
        "launch": ("launch", "torchrun, with the exit code of the process that failed"),
    },
}
COMMANDS = {name: entry for panel in PANELS.values() for name, entry in panel.items()}


class Podtune(TyperGroup):
    """The group of all subcommands, of which only the ones asked for are imported."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands and cmd_name in COMMANDS:
            self.commands[cmd_name] = load(cmd_name)
        return self.commands.get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        # typer's own suggestion looks among the commands that are imported, which are none yet
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"no such command {name!r}{near(name, [*COMMANDS])}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("podtune: stopped", file=sys.stderr)
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, panel in PANELS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), about) for name, (_, about) in panel.items()])


def load(name: str) -> click.Command:
    """The subcommand ``name``, imported."""
    module = importlib.import_module(f"podtune.commands.{COMMANDS[name][0]}")
    parent = typer.Typer(add_completion=False, rich_markup_mode=None, suggest_commands=False)
    parent.callback()(lambda: None)  # keeps the subcommand's name where there is only one
    if hasattr(module, "app"):
        parent.add_typer(module.app, name=name)
    else:
        command = getattr(module, name.replace("-", "_"))
        parent.command(name, context_settings=getattr(module, "CONTEXT", None))(command)
    return typer.main.get_group(parent).commands[name]


app = typer.Typer(
    cls=Podtune,
    name="podtune",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    suggest_commands=False,
)


def print_version(asked: bool) -> None:
    """The line that a report of a problem should begin with."""
    if asked:
        from podtune.machine.provenance import version_line

        print(version_line())
        raise typer.Exit


@app.callback()
def podtune(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", is_eager=True, callback=print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Fine-tune small language models on Kubernetes, from one pod to many, and measure what it costs."""


EXTRAS = {
    "aim": "aim",
    "deepspeed": "deepspeed",
    "bitsandbytes": "qlora",
    "s3fs": "s3",
    "lm_eval": "eval",
    "helm_python": "render",
} | dict.fromkeys(("kubernetes", "jsonschema"), "cluster")


def not_installed(error: ModuleNotFoundError) -> Exception:
    """A library of one of podtune's extras that is missing, as a sentence; anything else as it is."""
    library = (error.name or "").partition(".")[0]
    if library in ("", "podtune"):
        return error
    fix = f"pip install 'podtune[{EXTRAS.get(library, 'train')}]'"
    return Unavailable(f"{library} is not installed", where="this command", fix=fix)


WRONG_USAGE = 2  # as the parser of the command line has it; 64 is that of the programs in pods


def main() -> None:
    """Run one command; a user's error becomes one message and its exit code, never a traceback."""
    # the processes that it starts import nothing from the working directory, which may be anybody's
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        app()
    except UserError as error:
        code = report(error)
        sys.exit(WRONG_USAGE if code == USAGE else code)
    except ModuleNotFoundError as error:
        sys.exit(report(not_installed(error)))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        reader_left()
        sys.exit(0)


if __name__ == "__main__":
    main()
