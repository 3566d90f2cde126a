"""podtune data: build a question-answer set, look at what would be trained, tokenise ahead of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Build a question-answer set, see what would be trained, tokenise ahead of a job.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
def build(
    output: Annotated[Path, typer.Option(help="Folder to make: train.parquet, eval.parquet, card.json.")],
    rows: Annotated[int, typer.Option(help="At most so many rows in both files together.")] = 12_000,
    seed: Annotated[int, typer.Option(help="Of the draw, the phrasing and the division into train and eval.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the card as JSON.")] = False,
) -> None:
    """Make a question-answer set from the documentation strings and signatures of the installed Python and its packages.

    Nothing is downloaded and no package is run. The same Python, packages and seed give the same bytes.

    \b
    podtune data build --output datasets/qa
    podtune data build --output /tmp/qa --rows 2000 --seed 1 --json
    """
    from training.sft.qa import build as build_set

    card = build_set(output, rows=rows, seed=seed)
    if as_json:
        print(json.dumps(card, indent=2))
        return
    files = ", ".join(f"{name} {entry['rows']:,} rows" for name, entry in card["files"].items())
    print(f"{output}: {files}; {card['objects']:,} objects of Python {card['python']} and {len(card['packages']) - 1} packages")
