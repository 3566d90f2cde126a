"""Prompts of a data file, and the file of their answers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from podtune.run.errors import CannotCreate, DataError, NotFound, UsageError
from podtune.sft.data.readers import rows_at
from podtune.sft.data.shapes import Messages
from podtune.sft.model.template import prompt_and_answer


@dataclass(frozen=True)
class Item:
    """A prompt of the input and the row it comes from, counted from 0."""

    row: int
    prompt: str | Messages
    reference: str | None

    def columns(self) -> dict[str, object]:
        """Make the columns of the output beside the answers."""
        prompt: object = self.prompt
        if not isinstance(self.prompt, str):
            single = len(self.prompt) == 1
            prompt = self.prompt[0]["content"] if single else json.dumps(self.prompt, ensure_ascii=False)
        reference = {} if self.reference is None else {"reference": self.reference}
        return {"row": self.row, "prompt": prompt, **reference}


def read_prompts(path: Path) -> list[Item]:
    """Read the prompts of a data file in any training shape, or of a text file with one a line.

    Raises :class:`UserError` for a file that cannot be read, and for a row without a prompt.
    """
    items = []
    if path.suffix == ".txt":
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise NotFound(f"cannot be read: {error}", where=str(path)) from None
        chats = ((row, [{"role": "user", "content": line}]) for row, line in enumerate(lines) if line.strip())
        items = [Item(row, chat, None) for row, chat in chats]
    else:
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


def check_output(output: Path) -> None:
    """Refuse an ``output`` that exists or is neither Parquet nor JSON lines, before a model is loaded."""
    if output.suffix not in (".parquet", ".jsonl"):
        raise UsageError(
            f"unknown kind of output '{output.suffix}'", where=str(output), fix="name it .parquet or .jsonl"
        )
    if output.exists():
        raise CannotCreate("exists already", where=str(output), fix="give another --output, or remove it")


def write_answers(rows: list[dict[str, object]], output: Path) -> None:
    """Write ``rows`` as Parquet or JSON lines, by its name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.suffix == ".parquet":
            names = dict.fromkeys(name for row in rows for name in row)
            pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), output)
        else:
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            output.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise CannotCreate(f"cannot be written: {error.strerror}", where=str(output)) from error
