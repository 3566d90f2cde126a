"""Options that several commands share, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

#: context of a command that passes the options that it does not know to the fine-tune
PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True}


def _profiles(incomplete: str) -> list[str]:
    """Names of the profiles that podtune ships, and paths, for a shell that completes ``-f``."""
    from podtune.cluster.chart.render import PROFILES

    files = [str(path) for path in Path().glob(f"{incomplete}*") if path.is_dir() or path.suffix == ".yaml"]
    shipped = sorted(path.stem for path in PROFILES.glob("*.yaml"))
    return [name for name in (*shipped, *sorted(files)) if name.startswith(incomplete)]


Values = Annotated[
    list[Path] | None,
    typer.Option("-f", "--values", help="Values for the chart; may be repeated.", autocompletion=_profiles),
]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As helm's --set.")]
Namespace = Annotated[str, typer.Option("-n", "--namespace", help="Namespace; default: the kubeconfig's.")]
Context = Annotated[str, typer.Option(help="Context of the kubeconfig; default: its current one.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The job.")]
ReleaseName = Annotated[str, typer.Option("--name", help="The release, and so the run.")]
TrustRemoteCode = Annotated[bool, typer.Option(help="Run Python code that the model brings.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
