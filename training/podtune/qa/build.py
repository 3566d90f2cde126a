"""A question-answer set: train.parquet, eval.parquet and a card that says what is in them. Needs no torch.

Groups of rows, not rows, are divided into train and eval, by a hash: what is asked in eval is about objects
that train never names. The same Python and seed give the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from podtune.qa import documentation, podtune_commands, unicode_characters
from podtune.qa.row import Row, held_out
from podtune.run.errors import CannotCreate, DataError, UsageError

DEFAULT_ROWS = 12_000
SCHEMA = "podtune.data/1"

Questions = Callable[[int, int], Sequence[Row]]  # (at most so many rows, seed)
KINDS: dict[str, tuple[str, Questions]] = {
    "unicode": (unicode_characters.DESCRIPTION, unicode_characters.questions),
    "commands": (podtune_commands.DESCRIPTION, podtune_commands.questions),
    "docs": (documentation.DESCRIPTION, documentation.questions),
}


def build(output: Path, *, kind: str, rows: int = DEFAULT_ROWS, seed: int = 0) -> dict[str, Any]:
    """Write ``train.parquet``, ``eval.parquet`` and ``card.json`` into ``output``; return the card.

    Args:
        output: a folder; made if absent.
        kind: one of :data:`KINDS`.
        rows: at most so many rows in both files together, drawn by hash.
        seed: of the draw, the phrasing and the division.

    Raises:
        UserError: an unknown kind, too few rows, or a folder that cannot be written.
    """
    if kind not in KINDS:
        raise UsageError(f"unknown kind {kind!r}", fix=f"choose one of {', '.join(KINDS)}")
    if rows < 20:
        raise DataError(f"--rows is {rows}; the least is 20", where="command line")
    with _writing(output):
        output.mkdir(parents=True, exist_ok=True)
    description, questions = KINDS[kind]
    chosen = questions(rows, seed)
    if len(chosen) < min(rows, 20):
        raise DataError(
            "this Python has no documented source files",
            fix="use a Python with its standard library's .py files",
        )
    parts: dict[str, list[Row]] = {"train": [], "eval": []}
    for row in chosen:
        parts["eval" if held_out(row.group, seed) else "train"].append(row)
    if not parts["eval"]:
        parts["eval"] = [parts["train"].pop()]
    card = describe(parts, seed, kind, description)
    with _writing(output):
        for name, content in parts.items():
            card["files"][f"{name}.parquet"]["sha256"] = _write(output / f"{name}.parquet", content)
        _replace(output / "card.json", (json.dumps(card, indent=2) + "\n").encode())
    return card


@contextlib.contextmanager
def _writing(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotCreate(
            f"cannot be written: {error.strerror or error}",
            where=str(error.filename or output),
            fix="give --output a folder that can be written",
        ) from None


def describe(parts: dict[str, list[Row]], seed: int, kind: str, description: str) -> dict[str, Any]:
    """The card: what is in the set and where it comes from."""
    every = [row for content in parts.values() for row in content]
    card = {
        "schema": SCHEMA,
        "kind": kind,
        "description": description,
        "language": "en",
        "python": platform.python_version(),
        "seed": seed,
        "rows": len(every),
        "objects": len({row.object for row in every}),
        "columns": columns(every[0]),
        "files": {f"{name}.parquet": {"rows": len(content)} for name, content in parts.items()},
        "kinds": dict(sorted(Counter(row.kind for row in every).items())),
        "mean_characters": {
            "question": round(sum(len(row.question) for row in every) / len(every), 1),
            "answer": round(sum(len(row.answer) for row in every) / len(every), 1),
        },
    }
    packages: dict[str, dict[str, Any]] = {}
    for row in every:
        if isinstance(row, documentation.DocumentedRow):
            package = {"version": row.version, "license": row.license, "rows": 0}
            packages.setdefault(row.package, package)["rows"] += 1
    return card | ({"packages": dict(sorted(packages.items()))} if packages else {})


def columns(row: Row) -> list[str]:
    """The names of a row's columns, in their order."""
    return [each.name for each in fields(row) if each.name != "group"]


def _write(path: Path, rows: list[Row]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = {name: pa.array([getattr(row, name) for row in rows], pa.string()) for name in columns(rows[0])}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(table), sink, compression="zstd")
    content = sink.getvalue().to_pybytes()
    _replace(path, content)
    return hashlib.sha256(content).hexdigest()


def _replace(path: Path, content: bytes) -> None:
    """Whole or not at all, for a reader in another process."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)
