"""Answer every prompt of a file, in batches, so that a killed run resumes where it stopped.

Finished batches are appended to a journal beside the output; the output itself appears at the end by one
rename. Batches are fixed by the input alone and each has a seed of its own, so that an interrupted run ends
with the same answers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podtune.run.errors import (
    CannotCreate,
    DataError,
    NotFound,
    UsageError,
)
from podtune.sft.data.readers import rows_at
from podtune.sft.data.shapes import Messages
from podtune.sft.generate.answers import by_length
from podtune.sft.model.template import prompt_and_answer

OUTPUTS = (".parquet", ".jsonl")
Prompt = str | Messages
Answerer = Callable[[Sequence[Prompt], int], list[dict[str, str]]]


@dataclass(frozen=True)
class Item:
    """A prompt of the input and the row it comes from, counted from 0."""

    row: int
    prompt: Prompt
    reference: str | None


def read_prompts(path: Path) -> list[Item]:
    """Read the prompts of a data file in any training shape, or of a text file with one a line.

    Raises:
        UserError: missing, unreadable, no prompt in it, or a row without one.
    """
    if path.suffix == ".txt":
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise NotFound(f"cannot be read: {error}", where=str(path)) from None
        items = [Item(row, line, None) for row, line in enumerate(lines) if line.strip()]
        items = [Item(item.row, [{"role": "user", "content": item.prompt}], None) for item in items]
    else:
        items = []
        for row, content in enumerate(rows_at(path)):
            prompt, reference = prompt_and_answer(content)
            if prompt == "" and reference:  # plain text is what to go on from
                prompt, reference = reference, None
            if not prompt:
                raise DataError(
                    "there is no prompt in it", where=f"{path}, row {row + 1}", fix="remove the row"
                )
            items.append(Item(row, prompt, reference))
    if not items:
        raise DataError("there is no prompt in it", where=str(path))
    return items


def answer_file(
    items: list[Item],
    output: Path,
    answerer: Answerer,
    *,
    settings: dict[str, Any],
    batch_size: int,
    progress: Callable[[int], None],
) -> int:
    """Answer all ``items`` and write ``output`` (Parquet or JSON lines, in the order of the input).

    Args:
        answerer: prompts and the batch's number to the columns of each row.
        settings: what the answers depend on; a journal with others is refused.
        progress: called with the rows done so far.

    Returns:
        The rows that an earlier, interrupted run had finished.

    Raises:
        UserError: a journal of other settings, or an output that exists or cannot be written.
    """
    if output.suffix not in OUTPUTS:
        raise UsageError(
            f"unknown kind of output '{output.suffix}'", where=str(output), fix="name it .parquet or .jsonl"
        )
    if output.exists():
        raise CannotCreate("exists already", where=str(output), fix="give another --output, or remove it")
    prompts = json.dumps([item.prompt for item in items], sort_keys=True)
    header = settings | {"batch_size": batch_size, "prompts": hashlib.sha256(prompts.encode()).hexdigest()}
    journal = output.with_name(f".{output.name}.journal")
    done = _resume(journal, header, output)
    answered = len(done)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with journal.open("a", encoding="utf-8") as file:
            if not answered and not file.tell():
                file.write(json.dumps(header) + "\n")
            # the text's length stands for its tokens': a journal must fit without the tokenizer
            for number, batch in enumerate(
                by_length(items, lambda item: len(json.dumps(item.prompt)), batch_size)
            ):
                if all(item.row in done for item in batch):
                    continue
                columns = answerer([item.prompt for item in batch], number)
                rows = [_row(item, answers) for item, answers in zip(batch, columns, strict=True)]
                file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
                file.flush()
                os.fsync(file.fileno())
                done |= {row["row"]: row for row in rows}
                progress(len(done))
        _write([done[item.row] for item in items], output)
    except OSError as error:
        raise CannotCreate(f"cannot be written: {error.strerror}", where=str(output)) from error
    journal.unlink()
    return answered


def _row(item: Item, answers: dict[str, str]) -> dict[str, Any]:
    prompt = item.prompt if isinstance(item.prompt, str) else json.dumps(item.prompt, ensure_ascii=False)
    question = prompt if isinstance(item.prompt, str) else str(item.prompt[-1]["content"])
    reference = {} if item.reference is None else {"reference": item.reference}
    single_turn = isinstance(item.prompt, str) or len(item.prompt) == 1
    return {"row": item.row, "prompt": question if single_turn else prompt, **reference, **answers}


def _resume(journal: Path, header: dict[str, Any], output: Path) -> dict[int, dict[str, Any]]:
    """Read the finished rows of an interrupted run; cut a torn last line off the journal."""
    if not journal.exists():
        return {}
    lines = journal.read_bytes().splitlines(keepends=True)
    whole = lines if not lines or lines[-1].endswith(b"\n") else lines[:-1]
    if len(whole) != len(lines):
        os.truncate(journal, sum(map(len, whole)))
    if not whole:
        return {}
    earlier = json.loads(whole[0])
    changed = sorted(key for key in header if earlier.get(key) != header[key])
    if changed:
        raise UsageError(
            f"an interrupted run with other settings left its answers here (different: {', '.join(changed)})",
            where=str(output),
            fix=f"give the same flags to resume, or remove {journal}",
        )
    return {row["row"]: row for row in map(json.loads, whole[1:])}


def _write(rows: list[dict[str, Any]], output: Path) -> None:
    part = output.with_name(f".{output.name}.part")
    if output.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        names = list(dict.fromkeys(name for row in rows for name in row))
        pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), part)
    else:
        part.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    part.replace(output)
