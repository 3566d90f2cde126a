"""podtune model: build a small model, look at any model, merge an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Build a small model, look at any model before using it, merge an adapter.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
def build(
    data: Annotated[Path, typer.Option(help="Data set (file or folder) that the tokenizer is trained on.")],
    output: Annotated[Path, typer.Option(help="Folder to make.")],
    size: Annotated[str, typer.Option(help="micro (0.26 M parameters, for tests) or tiny (7 M).")] = "tiny",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was built as JSON.")] = False,
) -> None:
    """Make a SmolLM3-architecture model with random weights and its own tokenizer and chat template.

    The same data, size and seed give the same bytes; nothing is downloaded.

    \b
    podtune model build --data datasets/qa --output models/tiny
    podtune model build --size micro --data rows.jsonl --output /tmp/micro
    """
    from training.sft.new_model import build_model

    built = build_model(size, data, output, seed=seed)
    if as_json:
        print(json.dumps(built, indent=2))
        return
    state = "unchanged, " if built.get("unchanged") else ""
    print(f"{output}: {state}{built['parameters']:,} parameters, {built['vocabulary']} tokens learned from {built['rows']:,} rows")
