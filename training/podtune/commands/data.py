"""podtune data: build a data set, inspect what would be trained, tokenise ahead of a job."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podtune.commands.options import PASS_ON, AsJson
from podtune.demo_data.build import build as build_set
from podtune.run.errors import warn, working
from podtune.sft.config import settings
from podtune.sft.config.keys import Settings
from podtune.sft.data.source import Sources, check_source
from podtune.sft.data.tokenizer import TokenizeOptions, load_tokenizer
from podtune.sft.source.model import Origin, locate_model, vocabulary_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

app = typer.Typer(
    help="Build a question-answer set or CIFAR-10, see what would be trained, tokenise ahead of a job.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def build(
    output: Annotated[Path, typer.Option(help="Folder to make: train.parquet, eval.parquet, card.json.")],
    rows: Annotated[int, typer.Option(help="At most so many rows in both files together.")] = 12_000,
    seed: Annotated[int, typer.Option(help="Seed of the draw and the division.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Make a question-answer set about the characters of Unicode. Nothing is downloaded.

    The same Python and seed give the same bytes. Questions in eval are about characters that train never
    names.

    \b
    Examples:
      podtune data build --output work/data
      podtune data build --output /tmp/qa --rows 2000 --seed 1 --json
    """
    card = build_set(output, rows=rows, seed=seed)
    if as_json:
        print(json.dumps(card, indent=2))
        return
    files = ", ".join(f"{name} {entry['rows']:,} rows" for name, entry in card["files"].items())
    print(f"{output}: {files}; {card['objects']:,} objects; kinds: {', '.join(card['kinds'])}")


@app.command()
def cifar10(
    output: Annotated[Path, typer.Option(help="Folder to make; give it to podtune.benchmark as --data.")],
    archive: Annotated[
        Path | None, typer.Option(help="cifar-10-python.tar.gz or cifar-10-binary.tar.gz.", metavar="FILE")
    ] = None,
    made: Annotated[
        int, typer.Option(help="No CIFAR-10: so many images of its shape, made to be learned.")
    ] = 0,
) -> None:
    """Write CIFAR-10 as the benchmark reads it.

    From an archive, a download by torchvision, or made.

    \b
    Examples:
      podtune data cifar10 --archive cifar-10-python.tar.gz --output work/cifar10
      podtune data cifar10 --made 10000 --output work/cifar10
      python -m podtune.benchmark --model resnet18-cifar --strategy single --data work/cifar10 --epochs 10
    """
    from podtune.bench.case import cifar10 as data  # loads torch

    if archive is None and not made:
        with tempfile.TemporaryDirectory() as folder:
            splits = data.read_archive(data.download(Path(folder)))
    else:
        splits = data.read_archive(archive) if archive else data.make(made)
    file = data.write(output, splits)
    print(f"{file}: {', '.join(f'{split} {len(labels):,} images' for split, (_, labels) in splits.items())}")


Config = Annotated[Path | None, typer.Option(help="Training YAML, as python -m podtune.training takes it.")]
Data = Annotated[str | None, typer.Option(help="File, folder or hub name: short for --dataset_name.")]
Model = Annotated[str | None, typer.Option(help="Folder or hub id: short for --model_name_or_path.")]


def _settings(context: typer.Context, config: Path | None, data: str | None, model: str | None) -> Settings:
    """The configuration that training would read, of which data, model and tokens are used here."""
    named = {"config": config, "dataset_name": data, "model_name_or_path": model}
    words = [word for key, value in named.items() if value is not None for word in (f"--{key}", str(value))]
    return settings.read(["--output_dir", ".", *words, *context.args])  # nothing is written there


def _model_files(settings: Settings) -> tuple[Origin, PreTrainedTokenizerBase, int]:
    """Place, tokenizer and vocabulary of the model that would be trained."""
    origin = locate_model(settings.value("model_name_or_path"), settings.value("model_revision"))
    options = ("eos_token", "pad_token", "chat_template_path", "trust_remote_code")
    tokenizer = load_tokenizer(origin, **{key: settings.value(key) for key in options})
    return origin, tokenizer, vocabulary_size(origin, settings.value("trust_remote_code"))


@app.command(context_settings=PASS_ON)
def inspect(
    context: typer.Context,
    config: Config = None,
    data: Data = None,
    model: Model = None,
    split: Annotated[str | None, typer.Option(help="Split to look at.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what would be trained: rows, tokens, lengths, cuts.

    Three rows are shown with the loss mask marked. All other options are those of training, and the rows are
    made by the same code.

    \b
    Examples:
      podtune data inspect --config sft.yaml
      podtune data inspect --data datasets/qa --model models/tiny
      podtune data inspect --data chats.jsonl --model HuggingFaceTB/SmolLM3-3B --max_length 2048 --json
    """
    settings = _settings(context, config, data, model)
    source = settings.sources.train
    source = dataclasses.replace(source, split=split or source.split)
    with working("reading rows, tokenising"):
        # it imports transformers, which takes seconds
        from podtune.sft.data.inspect import inspect as inspect_rows
        from podtune.sft.data.inspect import stop_ids_of

        source.fetch()
        check_source(source)
        origin, tokenizer, vocabulary = _model_files(settings)
        report = inspect_rows(
            source,
            tokenizer,
            TokenizeOptions.of(settings.value, packed=settings.value("packing")),
            vocabulary=vocabulary,
            stop_ids=stop_ids_of(origin),
            held_out=None if split else settings.sources.evaluation,
        )
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        print(report.text(colour=sys.stdout.isatty()))


@app.command("prepare", context_settings=PASS_ON)
def prepare_rows(
    context: typer.Context,
    output: Annotated[
        Path, typer.Option(help="Folder for tokenised data; give it to training as --tokenized_cache.")
    ],
    config: Config = None,
    data: Data = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Tokenise a data set into a folder, ahead of a job.

    Any number of pods may run this at once on a shared volume: one works, the others wait for it. What is
    there already is kept. A name in the folder stands for rows, tokenizer and options, so that nothing stale
    is ever used. All other options are those of training.

    \b
    Examples:
      podtune data prepare --config sft.yaml --output /cache/tokenized
      podtune data prepare --data datasets/qa --model models/tiny --output /cache/tokenized --json
    """
    settings = _settings(context, config, data, model)
    with working("reading rows, tokenising"):
        from podtune.sft.data.tokenise import tokenised

        # an evaluation split is prepared, too, whatever asks for it later
        sources = Sources.of({"eval_strategy": "steps", **settings.values, "tokenized_cache": output})
        sources.check()
        _, tokenizer, vocabulary = _model_files(settings)
        packs, eval_packs = settings.value("packing"), settings.value("eval_packing")
        work = [(sources.train, packs)]
        held_out = sources.evaluations.values()
        work += [(source, packs if eval_packs is None else eval_packs) for source in held_out]
        prepared = []
        for source, packed in work:
            options = TokenizeOptions.of(settings.value, packed=packed)
            made = tokenised(source, tokenizer, options, vocabulary=vocabulary, cache_dir=sources.cache_dir)
            stats, state = made.stats, "there already" if made.from_cache else "tokenised"
            if not as_json:
                print(f"{source}: {stats.rows_kept:,} rows, {stats.tokens:,} tokens, {state}: {made.path}")
                for warning in made.warnings:
                    warn(f"{source}: {warning}")
            entry = {"source": str(source), "path": str(made.path), "from_cache": made.from_cache}
            prepared.append(entry | dataclasses.asdict(stats) | {"warnings": made.warnings})
    if as_json:
        print(json.dumps(prepared, indent=2))
