"""podtune data: build a question-answer set, look at what would be trained, tokenise ahead of a job."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from podtune.run.errors import working

app = typer.Typer(
    help="Build a question-answer set, see what would be trained, tokenise ahead of a job.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def build(
    output: Annotated[Path, typer.Option(help="Folder to make: train.parquet, eval.parquet, card.json.")],
    rows: Annotated[int, typer.Option(help="At most so many rows in both files together.")] = 12_000,
    seed: Annotated[int, typer.Option(help="Of the draw and the division.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the card as JSON.")] = False,
) -> None:
    """Make a question-answer set about the characters of Unicode. Nothing is downloaded.

    The same Python and seed give the same bytes. Questions in eval are about characters that train never
    names.

    \b
    Examples:
      podtune data build --output work/data
      podtune data build --output /tmp/qa --rows 2000 --seed 1 --json
    """
    from podtune.demo_data.build import build as build_set

    card = build_set(output, rows=rows, seed=seed)
    if as_json:
        print(json.dumps(card, indent=2))
        return
    files = ", ".join(f"{name} {entry['rows']:,} rows" for name, entry in card["files"].items())
    print(f"{output}: {files}; {card['objects']:,} objects; kinds: {', '.join(card['kinds'])}")


Data = Annotated[str, typer.Option(help="File, folder or hub name.")]
Model = Annotated[str, typer.Option(help="Model folder or hub id; its tokenizer is used.")]
MaxLength = Annotated[int, typer.Option(min=2, help="Longest row in tokens.")]
AssistantOnly = Annotated[bool, typer.Option(help="Train only the assistant's turns of messages.")]
CompletionOnly = Annotated[
    bool | None, typer.Option(help="Train only completions; default: if there are prompts.")
]
TextField = Annotated[str, typer.Option(help="Column of plain text.")]


@app.command()
def inspect(
    data: Data,
    model: Model,
    split: Annotated[
        str | None, typer.Option(help="Split to look at, also with a slice: 'train[:1000]'.")
    ] = None,
    max_length: MaxLength = 1024,
    truncation_mode: Annotated[str, typer.Option(help="keep_start or keep_end.")] = "keep_start",
    assistant_only_loss: AssistantOnly = False,
    completion_only_loss: CompletionOnly = None,
    dataset_text_field: TextField = "text",
    chat_template_path: Annotated[
        str | None, typer.Option(help="Template (.jinja) or model to take it from.")
    ] = None,
    eos_token: Annotated[str | None, typer.Option(help="EOS token, if not the tokenizer's own.")] = None,
    pad_token: Annotated[str | None, typer.Option(help="Padding token, if not the tokenizer's own.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a batch, for the share of padding.")] = 8,
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that the model brings.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Show what would be trained: rows, tokens, lengths, what is cut off, what the loss sees, three rows with
    it marked.

    The options are those of training, and the rows are made by the same code.

    \b
    Examples:
      podtune data inspect --data datasets/qa --model models/tiny
      podtune data inspect --data chats.jsonl --model HuggingFaceTB/SmolLM3-3B --assistant-only-loss
      --max-length 2048 --json
    """
    from podtune.sft.data.inspect import inspect as inspect_rows
    from podtune.sft.data.inspect import stop_ids_of, text, where_to_look
    from podtune.sft.data.source import check_source
    from podtune.sft.data.tokenizer import TokenizeOptions, load_tokenizer
    from podtune.sft.source.model import locate_model, vocabulary_size

    source = where_to_look(data, split)
    check_source(source, text_field=dataset_text_field)
    working("tokenising")
    origin = locate_model(model)
    report = inspect_rows(
        source,
        load_tokenizer(
            origin,
            eos_token=eos_token,
            pad_token=pad_token,
            chat_template_path=chat_template_path,
            trust_remote_code=trust_remote_code,
        ),
        TokenizeOptions(
            max_length, truncation_mode, completion_only_loss, assistant_only_loss, dataset_text_field
        ),
        batch_size=batch_size,
        model_vocab_size=vocabulary_size(origin, trust_remote_code),
        stop_ids=stop_ids_of(origin),
    )
    print(
        json.dumps(report.as_json(), indent=2, ensure_ascii=False)
        if as_json
        else text(report, colour=sys.stdout.isatty())
    )


@app.command("prepare")
def prepare_rows(
    data: Data,
    model: Model,
    output: Annotated[
        Path, typer.Option(help="Folder for tokenised data; give it to training as --tokenized_cache.")
    ],
    max_length: MaxLength = 1024,
    truncation_mode: Annotated[str, typer.Option(help="keep_start or keep_end.")] = "keep_start",
    packing: Annotated[bool, typer.Option(help="Training will pack rows.")] = False,
    assistant_only_loss: AssistantOnly = False,
    completion_only_loss: CompletionOnly = None,
    dataset_text_field: TextField = "text",
    chat_template_path: Annotated[
        str | None, typer.Option(help="Template (.jinja) or model to take it from.")
    ] = None,
    eos_token: Annotated[str | None, typer.Option(help="EOS token, if not the tokenizer's own.")] = None,
    pad_token: Annotated[str | None, typer.Option(help="Padding token, if not the tokenizer's own.")] = None,
    eval_dataset_name: Annotated[
        str | None, typer.Option(help="Evaluation set, if it is not a split of the data.")
    ] = None,
    wait: Annotated[
        float,
        typer.Option(min=0, help="Longest wait for another process that prepares the same, in seconds."),
    ] = 3600.0,
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that the model brings.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was prepared as JSON.")] = False,
) -> None:
    """Tokenise a data set into a folder, so that the processes of a job find it there.

    Any number of pods may run this at once on a shared volume: one works, the others wait for it. What is
    there already is kept. A name in the folder stands for rows, tokenizer and options, so that nothing stale
    is ever used.

    \b
    Examples:
      podtune data prepare --data datasets/qa --model models/tiny --output /cache/tokenized
      podtune data prepare --data user/chats --model HuggingFaceTB/SmolLM3-3B --max-length 4096 --output
      /cache/tokenized --json
    """
    from podtune.run.errors import warn
    from podtune.sft.data.source import Sources
    from podtune.sft.data.tokenise import tokenised_source
    from podtune.sft.data.tokenizer import TokenizeOptions, load_tokenizer
    from podtune.sft.source.model import locate_model, vocabulary_size

    sources = Sources.of(
        {
            "dataset_name": data,
            "eval_dataset_name": eval_dataset_name,
            "dataset_text_field": dataset_text_field,
            "eval_strategy": "steps",
            "tokenized_cache": output,
        }
    )
    sources.check()
    working("tokenising")
    origin = locate_model(model)
    tokenizer = load_tokenizer(
        origin,
        eos_token=eos_token,
        pad_token=pad_token,
        chat_template_path=chat_template_path,
        trust_remote_code=trust_remote_code,
    )
    options = TokenizeOptions(
        None if packing else max_length,
        truncation_mode,
        completion_only_loss,
        assistant_only_loss,
        dataset_text_field,
    )
    prepared = [
        tokenised_source(
            source,
            tokenizer,
            options,
            vocabulary=vocabulary_size(origin, trust_remote_code),
            cache_dir=sources.cache_dir,
            wait_s=wait,
        ).summary(source)
        for source in (sources.train, sources.evaluation)
        if source is not None
    ]
    if as_json:
        print(json.dumps(prepared, indent=2))
        return
    for entry in prepared:
        state = "there already" if entry["from_cache"] else "tokenised"
        print(
            f"{entry['source']}: {entry['rows_kept']:,} rows, {entry['tokens']:,} tokens, {state}: "
            f"{entry['path']}"
        )
        for warning in entry["warnings"]:
            warn(f"{entry['source']}: {warning}")
