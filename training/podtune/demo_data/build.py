"""The demo's question-answer set: train.parquet, eval.parquet and a card that describes them.

Needs no torch. The same Python and seed give the same bytes.
"""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import TypedDict

from podtune.demo_data.unicode_characters import DESCRIPTION, Row, held_out, questions
from podtune.run.errors import DataError
from podtune.run.output_volume import check_writable
from podtune.run.record import write_json

DEFAULT_ROWS = 12_000
SCHEMA = "podtune.data/1"
COLUMNS = [each.name for each in fields(Row) if each.name != "group"]


class File(TypedDict):
    """One file of the set."""

    rows: int
    sha256: str


class Card(TypedDict):
    """Counts, versions and origin of the set: card.json."""

    schema: str
    kind: str
    description: str
    language: str
    python: str
    seed: int
    rows: int
    objects: int
    columns: list[str]
    files: dict[str, File]
    kinds: dict[str, int]
    mean_characters: dict[str, float]


def build(output: Path, *, rows: int = DEFAULT_ROWS, seed: int = 0) -> Card:
    """Write ``train.parquet``, ``eval.parquet`` and ``card.json`` into ``output``; return the card.

    Args:
        output: a folder; made if absent.
        rows: at most so many rows in both files together, drawn by hash.
        seed: of the draw and of the division.

    Raises:
        UserError: too few rows, or a folder that cannot be written.
    """
    if rows < 20:
        raise DataError(f"--rows is {rows}; the least is 20", where="command line")
    check_writable(output)
    output.mkdir(parents=True, exist_ok=True)
    chosen = questions(rows, seed)
    # groups of rows, not rows, are held out: eval asks about objects that train never names
    parts = {
        "train": [row for row in chosen if not held_out(row.group, seed)],
        "eval": [row for row in chosen if held_out(row.group, seed)],
    }
    if not parts["eval"]:
        parts["eval"] = [parts["train"].pop()]
    every = [row for content in parts.values() for row in content]
    card: Card = {
        "schema": SCHEMA,
        "kind": "unicode",
        "description": DESCRIPTION,
        "language": "en",
        "python": platform.python_version(),
        "seed": seed,
        "rows": len(every),
        "objects": len({row.object for row in every}),
        "columns": COLUMNS,
        "files": {
            f"{name}.parquet": {"rows": len(content), "sha256": _write(output / f"{name}.parquet", content)}
            for name, content in parts.items()
        },
        "kinds": dict(sorted(Counter(row.kind for row in every).items())),
        "mean_characters": {
            "question": round(sum(len(row.question) for row in every) / len(every), 1),
            "answer": round(sum(len(row.answer) for row in every) / len(every), 1),
        },
    }
    write_json(output / "card.json", card)
    return card


def _write(path: Path, rows: list[Row]) -> str:
    """Write the rows as Parquet and return the SHA-256 of the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = {name: pa.array([getattr(row, name) for row in rows], pa.string()) for name in COLUMNS}
    part = path.with_name(path.name + ".part")  # a reader sees the whole file or none
    pq.write_table(pa.table(table), part, compression="zstd")
    part.replace(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()
