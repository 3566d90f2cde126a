"""podtune generate: ask a model one thing, talk with it, or answer a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podtune.commands.options import TrustRemoteCode
from podtune.run.errors import NotFound, UsageError, working

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
        float | None,
        typer.Option(min=0, max=1, help="Sample from the likeliest tokens that hold this share."),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; default: the model's.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts of --input at once.")] = 16,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Answer with a model's own chat template, sampling defaults and stop tokens.

    A killed --input run resumes where it stopped when it is started again with the same flags.

    \b
    Examples:
      podtune generate runs/demo --prompt "What does os.path.join do?"
      podtune generate runs/demo --against models/tiny --prompt "What is a tuple?"
      podtune generate runs/demo                                   # a chat
      podtune generate runs/demo --input eval.parquet --output answers.parquet
    """
    if (input is None) != (output is None):
        raise UsageError("--input and --output belong together", fix="give both or neither")
    if input is not None and (prompt is not None or system is not None):
        raise UsageError("--input has the prompts already", fix="leave --prompt and --system out")
    names = [resolve_run(model), *([resolve_run(against)] if against else [])]
    from podtune.sft.generate.answers import Sampling

    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    if input is not None and output is not None:
        answer_input(names, input, output, sampling, batch_size, trust_remote_code)
        return
    opening: Messages = [{"role": "system", "content": system}] if system else []
    models = [load(name, trust_remote_code) for name in names]
    if prompt is None and sys.stdin.isatty():
        chat(models, names, opening, sampling)
    else:
        question = sys.stdin.read().strip() if prompt is None else prompt
        if not question:
            raise UsageError("there is no prompt", fix="give --prompt, --input, or text on stdin")
        show(
            names,
            [ask(*pair, [*opening, {"role": "user", "content": question}], sampling) for pair in models],
        )


def resolve_run(name: str) -> str:
    """Resolve ``RUN_DIR`` to ``RUN_DIR/final``; anything else stands for itself.

    Raises:
        UserError: a run that has not ended; names its newest checkpoint.
    """
    folder = Path(name).expanduser()
    if (folder / "config.json").exists() or (folder / "adapter_config.json").exists() or not folder.is_dir():
        return name
    if (folder / "final").is_dir():
        return str(folder / "final")
    if (folder / "run.json").exists():
        steps = sorted(
            int(path.name.split("-")[1])
            for path in folder.glob("checkpoint-*")
            if path.name.split("-")[1].isdigit()
        )
        newest = (
            f"ask its newest checkpoint: {folder}/checkpoint-{steps[-1]}"
            if steps
            else "wait for its first checkpoint"
        )
        raise NotFound("the run has no final model (yet)", where=name, fix=newest)
    return name


def load(model: str | Origin, trust_remote_code: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model, on the GPU if there is one, and its tokenizer."""
    from podtune.sft.data.tokenizer import load_tokenizer
    from podtune.sft.generate.evaluate import on_device
    from podtune.sft.model.load import load_model
    from podtune.sft.source.model import locate_model

    origin = locate_model(model) if isinstance(model, str) else model
    working(f"loading {origin.name}")
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


def show(names: list[str], answers: list[str]) -> None:
    """Print one answer as it is; two in columns under the names of their models."""
    if len(answers) == 1:
        print(answers[0])
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True)
    for name in names:
        table.add_column(name, ratio=1, overflow="fold")
    table.add_row(*map(Text, answers))
    Console().print(table)


def chat(
    models: Sequence[tuple[PreTrainedModel, PreTrainedTokenizerBase]],
    names: list[str],
    opening: Messages,
    sampling: Sampling,
) -> None:
    """Converse with one model, or with two side by side, each with its own history, until end of input."""
    from transformers import TextStreamer

    print("Ask; /new starts again, Ctrl-D ends.")
    histories: list[Messages] = [list(opening) for _ in models]
    while True:
        try:
            question = input("> ").strip()
        except EOFError:
            print()
            return
        if question == "/new":
            histories = [list(opening) for _ in models]
        elif question:
            answers = []
            for (model, tokenizer), history in zip(models, histories, strict=True):
                history.append({"role": "user", "content": question})
                streamer = (
                    TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
                    if len(models) == 1
                    else None
                )
                answers.append(ask(model, tokenizer, history, sampling, streamer))
                history.append({"role": "assistant", "content": answers[-1]})
            if len(models) > 1:
                show(names, answers)


def answer_input(
    names: list[str], source: Path, output: Path, sampling: Sampling, batch_size: int, trust_remote_code: bool
) -> None:
    """Answer ``--input`` in ``--output``: columns ``answer`` and, of a second model, ``answer_against``."""
    from dataclasses import replace

    from podtune.sft.generate.answer_file import answer_file, read_prompts
    from podtune.sft.generate.answers import answer

    items = read_prompts(source)
    models = [load(name, trust_remote_code) for name in names]

    def answer_batch(prompts: Sequence[Any], number: int) -> list[dict[str, str]]:
        seeded = replace(sampling, seed=sampling.seed + number)
        answers = [answer(model, tokenizer, prompts, seeded) for model, tokenizer in models]
        return [
            dict(zip(("answer", "answer_against"), both, strict=False)) for both in zip(*answers, strict=True)
        ]

    settings = {"models": [[name, *weights_state(name)] for name in names], "sampling": vars(sampling)}
    earlier = answer_file(
        items,
        output,
        answer_batch,
        settings=settings,
        batch_size=batch_size,
        progress=progress_line(len(items)),
    )
    print(
        f"{output}: {len(items)} answers"
        + ((f", {earlier} of them from the interrupted run") if earlier else "")
    )


def weights_state(name: str) -> list[list[str | int]]:
    """List name, size and time of a folder's weight files, which change with a new training."""
    files = sorted(Path(name).expanduser().glob("*.safetensors"))
    return [[path.name, (state := path.stat()).st_size, state.st_mtime_ns] for path in files]


def progress_line(total: int) -> Callable[[int], None]:
    """Write one line on a terminal's stderr, nothing elsewhere."""
    if not sys.stderr.isatty():
        return lambda done: None
    return lambda done: print(
        f"\r{done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True
    )
