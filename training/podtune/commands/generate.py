"""podtune generate: ask a model one thing, talk with it, or answer a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podtune.commands.options import TrustRemoteCode
from podtune.run.errors import NotFound, UsageError, working

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from podtune.sft.data.shapes import Messages
    from podtune.sft.generate.answers import Sampling
    from podtune.sft.source.model import Origin


def generate(
    model: Annotated[
        str, typer.Argument(help="Folder of a run (its final model), model or adapter folder, or hub id.")
    ],
    prompt: Annotated[
        str | None, typer.Option(help="One prompt; without it and --input a chat, or what comes on stdin.")
    ] = None,
    input: Annotated[
        Path | None, typer.Option(help="Parquet, JSON lines, CSV, or text with a prompt a line.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Answers to --input: .parquet or .jsonl.")] = None,
    against: Annotated[
        str | None, typer.Option(help="A second model to answer the same, such as the base.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message before --prompt or the chat.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 always takes the likeliest token; default: the model's.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Only the likeliest tokens that hold this share.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; default: the model's.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts of --input at once.")] = 16,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Answer with a model's own chat template, sampling defaults and stop tokens.

    \b
    Examples:
      podtune generate runs/demo --prompt "What does os.path.join do?"
      podtune generate runs/demo                                   # a chat
      podtune generate runs/demo --input eval.parquet --output answers.parquet
    """
    if (input is None) != (output is None):
        raise UsageError("--input and --output belong together", fix="give both or neither")
    if input is not None and (prompt is not None or system is not None):
        raise UsageError("--input has the prompts already", fix="leave --prompt and --system out")
    names = [resolve_run(name) for name in (model, against) if name]
    from podtune.sft.generate.answers import Sampling

    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    if input is not None and output is not None:
        answer_input(names, input, output, sampling, batch_size, trust_remote_code)
        return
    opening: Messages = [{"role": "system", "content": system}] if system else []
    if prompt is None and sys.stdin.isatty():
        if against:
            raise UsageError("a chat is with one model", fix="give --prompt beside --against")
        chat(*load(names[0], trust_remote_code), opening, sampling)
        return
    question = sys.stdin.read().strip() if prompt is None else prompt
    if not question:
        raise UsageError("there is no prompt", fix="give --prompt, --input, or text on stdin")
    dialogue: Messages = [*opening, {"role": "user", "content": question}]
    for name in names:
        text = ask(*load(name, trust_remote_code), dialogue, sampling)
        print(f"{name}:\n{text}\n" if against else text)


def resolve_run(name: str) -> str:
    """Resolve ``RUN_DIR`` to ``RUN_DIR/final``; anything else stands for itself.

    Raises:
        UserError: a run that has not ended; names its newest checkpoint.
    """
    from podtune.run.checkpoint import checkpoints

    folder = Path(name).expanduser()
    if (folder / "config.json").exists() or (folder / "adapter_config.json").exists() or not folder.is_dir():
        return name
    if (folder / "final").is_dir():
        return str(folder / "final")
    if (folder / "run.json").exists():
        saved = checkpoints(folder)
        newest = f"ask its newest checkpoint: {saved[-1]}" if saved else "wait for its first checkpoint"
        raise NotFound("the run has no final model (yet)", where=name, fix=newest)
    return name


def load(model: str | Origin, trust_remote_code: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, on the GPU if there is one, and its tokenizer."""
    from podtune.sft.data.tokenizer import load_tokenizer
    from podtune.sft.generate.evaluate import on_device
    from podtune.sft.model.load import load_model
    from podtune.sft.source.model import locate_model

    origin = locate_model(model) if isinstance(model, str) else model
    with working(f"loading {origin.name}"):
        tokenizer = load_tokenizer(origin, trust_remote_code=trust_remote_code)
        return on_device(load_model(origin, trust_remote_code=trust_remote_code)), tokenizer


def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    sampling: Sampling,
    streamer: Any = None,
) -> str:
    """Generate one answer."""
    from podtune.sft.generate.answers import answer

    return answer(model, tokenizer, [messages], sampling, streamer=streamer)[0]


def chat(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, opening: Messages, sampling: Sampling
) -> None:
    """Converse until the end of input."""
    from transformers import TextStreamer

    print("Ask; /new starts again, Ctrl-D ends.")
    history = list(opening)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            print()
            return
        if question == "/new":
            history = list(opening)
        elif question:
            history.append({"role": "user", "content": question})
            reply = ask(model, tokenizer, history, sampling, streamer)
            history.append({"role": "assistant", "content": reply})


def answer_input(
    names: list[str], source: Path, output: Path, sampling: Sampling, batch_size: int, trust_remote_code: bool
) -> None:
    """Answer ``--input`` in ``--output``: columns ``answer`` and, of a second model, ``answer_against``."""
    import json
    from dataclasses import replace

    from rich.console import Console
    from rich.progress import track

    from podtune.sft.generate.answer_file import check_output, read_prompts, write_answers
    from podtune.sft.generate.answers import answer, by_length
    from podtune.sft.generate.evaluate import normalised

    check_output(output)
    items = read_prompts(source)
    batches = list(by_length(range(len(items)), lambda at: len(json.dumps(items[at].prompt)), batch_size))
    rows = [item.columns() for item in items]
    for column, name in zip(("answer", "answer_against"), names, strict=False):
        model, tokenizer = load(name, trust_remote_code)
        bar = track(batches, f"asking {name}", console=Console(stderr=True), disable=not sys.stderr.isatty())
        for number, batch in enumerate(bar):
            # a seed for each batch, so that equal prompts in two of them get two answers
            seeded = replace(sampling, seed=sampling.seed + number)
            answers = answer(model, tokenizer, [items[at].prompt for at in batch], seeded)
            for at, text in zip(batch, answers, strict=True):
                rows[at][column] = text
    write_answers(rows, output)
    print(f"{output}: {len(items)} answers")
    asked = [row for row in rows if "reference" in row]
    for column, name in zip(("answer", "answer_against"), names if asked else (), strict=False):
        right = sum(normalised(str(row[column])) == normalised(str(row["reference"])) for row in asked)
        print(f"{name}: {right / len(asked):.1%} of {len(asked)} exactly right")
