"""Options that several commands share, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

#: context of a command that passes the options that it does not know to the fine-tune
PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True}

Values = Annotated[
    list[Path] | None, typer.Option("-f", "--values", help="Values for the chart; may be repeated.")
]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As helm's --set.")]
Namespace = Annotated[str, typer.Option("-n", "--namespace", help="Namespace; default: the kubeconfig's.")]
Context = Annotated[str, typer.Option(help="Context of the kubeconfig; default: its current one.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The job.")]
Release = Annotated[str, typer.Option("--name", help="The release, and so the run.")]
TrustRemoteCode = Annotated[bool, typer.Option(help="Run Python code that the model brings.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
