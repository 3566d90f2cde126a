"""The shapes of training rows: columns and their task, checked cell by cell. Needs no torch, no pyarrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from podtune.run.errors import DataError, UserError

Name = Literal["tokenized", "prompt-completion", "messages", "text", "question-answer"]
Cell = Literal["text", "messages", "ids"]
Messages = list[dict[str, Any]]
Row = dict[str, Any]

EXTRAS = ("tools", "chat_template_kwargs", "prompt", "completion", "completion_mask", "assistant_masks")
UNDERSTOOD = """messages (or conversations): a list of {role, content}
      prompt, completion: both text, or both lists of {role, content}
      question, answer: text (or instruction, input and output, as Alpaca has them)
      text: text (another name with --dataset_text_field)
      input_ids, and labels if not every token is trained: whole numbers"""


@dataclass(frozen=True)
class RowShape:
    """The task that the columns of a data set make."""

    name: Name
    columns: tuple[str, ...]  # that it needs, in order, by the names that they have in the set
    cell: Cell  # of those columns
    context: str = ""  # a column with more of the question, which may be empty (Alpaca's input), or none

    @property
    def read(self) -> tuple[str, ...]:
        """All columns that decide a row's tokens, if they are there."""
        return tuple(dict.fromkeys((*self.columns, *filter(None, [self.context]), *EXTRAS)))

    @property
    def conversational(self) -> bool:
        """True if the rows are lists of messages, which need a chat template."""
        return self.cell == "messages"

    def templated(self, chat_template: object) -> bool:
        """True if a tokenizer's ``chat_template`` renders the rows: messages, or question and answer."""
        return self.conversational or (self.name == "question-answer" and bool(chat_template))

    def asked(self, row: Mapping[str, Any]) -> list[object]:
        """The part of a row that is not to be learnt: question, prompt, or the messages before the last."""
        if self.name == "messages":
            return list(row[self.columns[0]][:-1])
        return [row[self.columns[0]], row.get(self.context)]

    def answers_nothing(self, row: Mapping[str, Any]) -> bool:
        """True if an answer of the row is blank: nothing, or nothing but spaces."""
        if self.cell == "ids" or self.name == "text":
            return False
        answer = row[self.columns[-1]]
        if isinstance(answer, str):
            return not answer.strip()
        turns = [turn for turn in as_messages(answer) if turn.get("role") == "assistant"]
        texts = [turn["content"] for turn in turns if isinstance(turn.get("content"), str)]
        return any(not text.strip() for text in texts) and not any(turn.get("tool_calls") for turn in turns)


def named(row: Mapping[str, Any]) -> Row:
    """``row`` under the names that are known: in lower case, and Alpaca's as question and answer."""
    row = {name.lower(): value for name, value in row.items()} | dict(row)
    if row.get("instruction") is not None and not {"question", "prompt", "text"} & set(row):
        row |= {"question": joined(row["instruction"], row.get("input")), "answer": row.get("output")}
    return row


def joined(question: str, context: str | None) -> str:
    """A question and the text that it is about."""
    return f"{question}\n\n{context}" if context else question


def detect(first: Mapping[str, Any], where: str, text_field: str = "text") -> RowShape:
    """Detect the shape of rows that look like ``first`` (column to value). Raises :class:`UserError`.

    Names in another case than ours are taken where no shape is made of the names as they are.
    """
    if {"image", "images"} & set(first):
        raise DataError(
            "the rows hold images; podtune trains text", where=where, fix="give a set without image columns"
        )
    for names in ({name: name for name in first}, {name.lower(): name for name in first}):
        if shape := _shape(first, names, text_field):
            return shape
    raise DataError(
        f"the columns make no shape that can be trained: found {', '.join(map(str, first)) or 'none'}",
        where=where,
        fix="rename the columns to one of these, in the file or by `columns: {name: new name}`:\n      "
        + UNDERSTOOD,
    )


def _shape(first: Mapping[str, Any], names: dict[str, str], text_field: str) -> RowShape | None:
    """The shape that columns make by our names for them, ``names``; None if they make none."""

    def of(name: Name, cell: Cell, *columns: str, context: str = "") -> RowShape:
        return RowShape(name, tuple(names[column] for column in columns), cell, names.get(context, ""))

    known = names.keys()
    if "input_ids" in known:
        return of("tokenized", "ids", "input_ids", *(["labels"] if "labels" in known else []))
    if {"prompt", "completion"} <= known:
        cell: Cell = "messages" if isinstance(first[names["prompt"]], list) else "text"
        return of("prompt-completion", cell, "prompt", "completion")
    for name in ("messages", "conversations"):
        if name not in known:
            continue
        # TRL trains the text beside conversations that are not of the older form
        if name == "messages" or text_field not in known or _is_from_value(first[names[name]]):
            return of("messages", "messages", name)
    if text_field in known:
        return of("text", "text", text_field)
    if {"question", "answer"} <= known:
        return of("question-answer", "text", "question", "answer")
    if {"instruction", "output"} <= known:
        return of("question-answer", "text", "instruction", "output", context="input")
    return None


def _is_from_value(value: Any) -> bool:
    """True for the older form of messages; also for a cell that is not known yet."""
    return value is None or bool(isinstance(value, list) and value and "from" in (value[0] or ()))


_TYPES = {str: "text", dict: "a mapping", list: "a list", type(None): "null"}
_TYPES |= dict.fromkeys((int, float), "a number")


def _instead(value: Any, wanted: str) -> str:
    text, kind = repr(value), _TYPES.get(type(value), type(value).__name__)
    return f"{kind} instead of {wanted}: {text if len(text) <= 40 else text[:37] + '...'}"


def cell_problem(value: Any, cell: Cell) -> str | None:
    """The problem with ``value`` as a ``cell``, as the rest of a sentence ("is an empty list"), or None."""
    if value is None:
        return "is missing or null"
    if not isinstance(value, str if cell == "text" else list):
        return f"holds {_instead(value, 'text' if cell == 'text' else 'a list')}"
    if value == []:
        return "is an empty list"
    if cell == "ids":
        wrong = [item for item in value if type(item) is not int]
        return f"holds {_instead(wrong[0], 'whole numbers')}" if wrong else None
    if cell == "messages":
        for number, message in enumerate(value, 1):
            if problem := _message_problem(message):
                return f"has a message {number} that {problem}"
    return None


def _message_problem(message: Any) -> str | None:
    if not isinstance(message, dict):
        return f"is {_instead(message, '{role, content}')}"
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if not isinstance(role, str):
        return f"has no role; its keys are {', '.join(map(str, message)) or 'none'}"
    if content is None and not any(map(message.get, ("tool_calls", "reasoning_content", "thinking"))):
        return f"has no content (role {role})"
    if not isinstance(content, str | list | None):
        return f"has as its content {_instead(content, 'text')}"
    return None


def as_messages(value: Sequence[dict[str, Any]]) -> Messages:
    """Messages with role and content; older are the names from and value, the roles human and gpt."""
    renamed, roles = {"from": "role", "value": "content"}, {"human": "user", "gpt": "assistant"}
    return [
        {
            renamed.get(key, key): roles.get(item, item) if key == "from" else item
            for key, item in message.items()
        }
        for message in value
    ]


def check_cells(row: Mapping[str, Any], shape: RowShape, where: str) -> None:
    """Raise :class:`UserError` for the first cell of ``row`` that is missing, null or of another type."""
    cells: list[tuple[str, Any, Cell]] = [(name, row.get(name), shape.cell) for name in shape.columns]
    if shape.context:
        cells.append((shape.context, row.get(shape.context) or "", "text"))
    for name, value, cell in cells:
        if problem := cell_problem(value, cell):
            raise DataError(f"column '{name}' {problem}", where=where, fix="correct the row or remove it")


def no_rows(where: str) -> UserError:
    """The error for a data set without rows."""
    return DataError("the data set holds no rows", where=where, fix="give a file with rows in it")
