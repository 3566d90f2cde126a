"""podtune model: build a small model, look at any model, merge an adapter."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from podtune.commands.options import AsJson, TrustRemoteCode
from podtune.run.errors import working
from podtune.sft.model.build import build_model
from podtune.sft.model.info import model_info
from podtune.sft.model.merge import merge_adapter

app = typer.Typer(
    help="Build a small model, look at any model before using it, merge an adapter.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def build(
    data: Annotated[Path, typer.Option(help="Data set (file or folder) that the tokenizer is trained on.")],
    output: Annotated[Path, typer.Option(help="Folder to make.")],
    size: Annotated[str, typer.Option(help="micro (0.26 M parameters, for tests) or tiny (7 M).")] = "tiny",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Make a small SmolLM3 with random weights and a tokenizer.

    The same data, size and seed give the same bytes; nothing is downloaded.

    \b
    Examples:
      podtune model build --data datasets/qa --output models/tiny
      podtune model build --size micro --data rows.jsonl --output /tmp/micro
    """
    with working("learning a tokenizer and drawing weights"):
        record = build_model(size, data, output, seed=seed)
    made = (
        f"{output}: {record['parameters']:,} parameters, {record['vocabulary']} tokens learned from "
        f"{record['rows']:,} rows"
    )
    print(json.dumps(record, indent=2) if as_json else made)


@app.command()
def info(
    model: Annotated[str, typer.Argument(help="Model or adapter folder, or hub id.")],
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens a row; default: the context, at most 2048.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Show parameters, FLOPs and tokenizer of any model.

    \b
    Examples:
      podtune model info models/tiny
      podtune model info HuggingFaceTB/SmolLM3-3B --sequence-length 4096 --json
    """
    with working("reading the configuration"):
        described = asdict(
            model_info(
                model, sequence_length=sequence_length, revision=revision, trust_remote_code=trust_remote_code
            )
        )
    if as_json:
        print(json.dumps(described, indent=2))
        return
    for name, value in described.items():
        parts = value if isinstance(value, dict) else {"": value}
        for part, figure in parts.items():
            count = isinstance(figure, int | float) and not isinstance(figure, bool)
            print(f"{f'{name} {part}':<34}" + (f"{figure:,.10g}" if count else str(figure)))


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(help="Folder of a LoRA adapter, such as RUN_DIR/final.")],
    output: Annotated[Path, typer.Option(help="Folder to make.")],
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Merge a LoRA adapter into its base, for any server.

    \b
    Examples:
      podtune model merge runs/lora/final --output models/merged
      vllm serve models/merged
    """
    with working("merging"):
        merge_adapter(adapter, output, trust_remote_code=trust_remote_code)
    print(f"{output}: merged")
