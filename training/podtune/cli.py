"""The podtune command. Each group of subcommands lives in training/podtune/commands and imports what it needs
when it runs.
"""

from __future__ import annotations

import importlib
import sys

import typer

from podtune.run.errors import UserError, report

# name -> its module in training/podtune/commands; a group of commands has an `app` there, a command a
# function
COMMANDS = {
    "data": "data",
    "model": "model",
    "bench": "bench",
    "generate": "generate",
    "runs": "runs",
    "compare": "runs",
    "watch": "runs",
    "aim-sync": "aim",
    "doctor": "doctor",
    "render": "manifests",
    "lint": "manifests",
    "dry-run": "dry_run",
    "submit": "jobs",
    "status": "jobs",
    "logs": "jobs",
    "delete": "jobs",
    "collect": "collect",
    "preflight": "preflight",
    "prepare": "launch",
    "launch": "launch",
}


def build(names: list[str]) -> typer.Typer:
    """The command with the subcommands ``names``: one of them starts in a tenth of a second, all take longer
    to import.
    """
    app = typer.Typer(
        name="podtune",
        help=(
            "Fine-tune small language models on Kubernetes, from one pod to many, and measure what it costs."
        ),
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(lambda: None)  # keeps the subcommand's name where there is only one
    for name in names:
        module = importlib.import_module(f"podtune.commands.{COMMANDS[name]}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, name.replace("-", "_")))
    return app


def main() -> None:
    """Run one command; a user's error becomes one message and its exit code, never a traceback."""
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        build([asked] if asked in COMMANDS else list(COMMANDS))()
    except UserError as error:
        sys.exit(report(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
