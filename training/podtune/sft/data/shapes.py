"""The shapes of training rows: columns and their task, checked cell by cell. Needs no torch, no pyarrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from podtune.run.errors import DataError, UserError

Name = Literal["tokenized", "prompt-completion", "messages", "text", "question-answer"]
Cell = Literal["text", "messages", "ids"]
Messages = list[dict[str, Any]]

UNDERSTOOD = """messages (or conversations): a list of {role, content}
      prompt, completion: both text, or both lists of {role, content}
      question, answer: text
      text: text (another name with --dataset_text_field)
      input_ids, and labels if not every token is trained: whole numbers"""


@dataclass(frozen=True)
class RowShape:
    """The task that the columns of a data set make.

    Attributes:
        name: the task.
        columns: the columns it needs, in order.
        cell: what a cell of those columns holds.
    """

    name: Name
    columns: tuple[str, ...]
    cell: Cell

    @property
    def conversational(self) -> bool:
        """True if the rows are lists of messages, which need a chat template."""
        return self.cell == "messages"


@dataclass(frozen=True)
class NotText:
    """A cell that stands for text that cannot be decoded; ``problem`` says why ("is not UTF-8 ...")."""

    problem: str


def known_columns(text_field: str) -> set[str]:
    """The columns that can be trained, or that tell one shape from another."""
    shapes = (
        "prompt",
        "completion",
        "messages",
        "conversations",
        "question",
        "answer",
        "input_ids",
        "labels",
    )
    return {*shapes, text_field}


def detect(first: Mapping[str, Any], where: str, text_field: str = "text") -> RowShape:
    """The shape of rows that look like ``first`` (column to value).

    Raises:
        UserError: no known set of columns; says which were found and which are understood.
    """
    columns = set(first)
    if {"image", "images"} & columns:
        raise DataError(
            "the rows hold images; podtune trains text", where=where, fix="give a set without image columns"
        )
    if "input_ids" in columns:
        return RowShape(
            "tokenized", ("input_ids", "labels") if "labels" in columns else ("input_ids",), "ids"
        )
    if {"prompt", "completion"} <= columns:
        return RowShape("prompt-completion", ("prompt", "completion"), _kind(first["prompt"]))
    for name in ("messages", "conversations"):
        if name == "conversations" and {name, text_field} <= columns and not _is_from_value(first[name]):
            continue  # TRL trains the text
        if name in columns:
            return RowShape("messages", (name,), "messages")
    if text_field in columns:
        return RowShape("text", (text_field,), "text")
    if {"question", "answer"} <= columns:
        return RowShape("question-answer", ("question", "answer"), "text")
    named = ", ".join(map(str, first)) or "none"
    hint = "rename the columns to one of these"
    if {"chosen", "rejected"} & columns:
        hint = (
            "this is a preference set; supervised fine-tuning needs one answer a row. Rename the columns "
            "to one of these"
        )
    raise DataError(
        f"the columns make no shape that can be trained: found {named}",
        where=where,
        fix=f"{hint}:\n      {UNDERSTOOD}",
    )


def _is_from_value(value: Any) -> bool:
    """True for the older form of messages; also for a cell that is not known yet."""
    return value is None or bool(isinstance(value, list) and value and "from" in (value[0] or ()))


def _kind(value: Any) -> Cell:
    return "messages" if isinstance(value, list) else "text"


def cell_problem(value: Any, cell: Cell) -> str | None:
    """The problem with ``value`` as a ``cell``, as the rest of a sentence ("is null"), or None."""
    if value is None:
        return "is null"
    if isinstance(value, NotText):
        return value.problem
    if cell == "text":
        return None if isinstance(value, str) else f"holds {_type(value)} instead of text: {_short(value)}"
    if not isinstance(value, list):
        return f"holds {_type(value)} instead of a list: {_short(value)}"
    if not value:
        return "is an empty list"
    if cell == "ids":
        wrong = next((item for item in value if not isinstance(item, int) or isinstance(item, bool)), None)
        return (
            None
            if wrong is None and None not in value
            else f"holds {_type(wrong)} instead of whole numbers: {_short(wrong)}"
        )
    for index, message in enumerate(value):
        problem = _message_problem(message)
        if problem:
            return f"has a message {index + 1} that {problem}"
    return None


def _message_problem(message: Any) -> str | None:
    if not isinstance(message, dict):
        return f"is {_type(message)} instead of {{role, content}}: {_short(message)}"
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if not isinstance(role, str):
        return (
            f"has no role; its keys are {', '.join(map(str, message)) or 'none'}"
            if role is None
            else f"has {_type(role)} as its role"
        )
    if content is None:
        calls = message.get("tool_calls") or message.get("reasoning_content") or message.get("thinking")
        return None if calls else f"has no content (role {role})"
    return (
        None if isinstance(content, str | list) else f"has {_type(content)} as its content: {_short(content)}"
    )


def _type(value: Any) -> str:
    names = {
        str: "text",
        int: "a number",
        float: "a number",
        bool: "true/false",
        dict: "a mapping",
        list: "a list",
        bytes: "bytes",
    }
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def as_messages(value: Sequence[dict[str, Any]]) -> Messages:
    """Messages with role and content; ``from`` and ``value`` are their older names."""
    renamed = {"from": "role", "value": "content"}
    return [{renamed.get(key, key): item for key, item in message.items()} for message in value]


def check_cells(row: Mapping[str, Any], shape: RowShape, where: str) -> None:
    """Raise :class:`UserError` for the first cell of ``row`` that is missing, null or of another type."""
    for column in shape.columns:
        problem = f"is missing (the row has: {', '.join(map(str, row)) or 'none'})"
        if column in row:
            problem = cell_problem(row[column], shape.cell) or ""
        if problem:
            raise bad_cell(where, column, problem)


def bad_cell(where: str, column: str, problem: str) -> UserError:
    """The error for one cell of the row ``where``."""
    return DataError(f"column '{column}' {problem}", where=where, fix="correct the row or remove it")
