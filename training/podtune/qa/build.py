"""Questions and answers from the documentation that every Python installation carries. Needs no torch.

What a function does, how it is called, which parameters it takes, what it raises and returns: from the source
of the standard library and of installed packages, parsed and never run, and from the help texts of the
interpreter's own C modules. The same Python and packages give the same bytes.

Objects, not rows, are divided into train and eval (a class with all its methods falls on one side), and what
two objects say in the same words is kept once, so that no answer of eval stands in train.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from podtune.qa.prose import whole_sentences
from podtune.qa.python_objects import PythonObject, documented_objects
from podtune.run.collection import without_collection
from podtune.run.errors import CANNOT_CREATE, DATA, UserError

DEFAULT_ROWS = 12_000
EVAL_SHARE = 10  # one object in ten
SCHEMA = "podtune.data/1"
_ANSWER_CHARACTERS = 600
_LONGEST_SIGNATURE = 180
# Asked of a signature that stands in the question: answerable without knowing the object.
_READING = ("parameters", "default", "required")
# of all rows, at most; the rest is prose
_SHARES = {"signature": 0.2, "base": 0.04, **dict.fromkeys(_READING, 0.05)}

_PHRASES = {
    "purpose": ("What does {name} do?", "What is {name} for?", "What is the {sort} {name}?"),
    "description": (
        "Explain {name}.",
        "Describe the {sort} {name}.",
        "How does {name} work?",
        "What should I know about {name}?",
    ),
    "signature": ("How is {name} called?", "What is the signature of {name}?", "Show how to call {name}."),
    "raises": ("What does {name} raise?", "Which exceptions can {name} raise?"),
    "returns": ("What does {name} return?", "What is the result of {name}?"),
    "base": ("What does the class {name} derive from?", "Which class does {name} extend?"),
    "parameters": ("Which parameters does {call} take?", "Name the parameters of {call}."),
    "default": (
        "What is the default of {parameter} in {call}?",
        ("In {call}, what is {parameter} if it is left out?"),
    ),
    "required": ("Which arguments must be given to {call}?", "What has to be passed to {call}?"),
}


@dataclass(frozen=True)
class Row:
    """One row of the set; the columns in this order."""

    question: str
    answer: str
    kind: str
    object: str
    module: str
    package: str
    version: str
    license: str


def build(output: Path, *, rows: int = DEFAULT_ROWS, seed: int = 0) -> dict[str, Any]:
    """Write ``train.parquet``, ``eval.parquet`` and ``card.json`` into ``output``; return the card.

    Args:
        output: a folder; made if absent.
        rows: at most so many rows in both files together, drawn by hash.
        seed: of the draw, the phrasing and the division.

    Raises:
        UserError: too few documented objects on this machine, or the folder cannot be written.
    """
    if rows < 20:
        raise UserError(f"--rows is {rows}; the least is 20", where="command line", code=DATA)
    with _writing(output):
        output.mkdir(parents=True, exist_ok=True)
    with without_collection():  # syntax trees are many objects and no garbage
        chosen = draw(questions(documented_objects(), seed), rows, seed)
    if len(chosen) < min(rows, 20):
        raise UserError(
            "this Python has no documented source files",
            fix=("use a Python with its standard library's .py files"),
            code=DATA,
        )
    parts: dict[str, list[Row]] = {"train": [], "eval": []}
    for row in chosen:
        parts["eval" if in_eval(row.object, seed) else "train"].append(row)
    if not parts["eval"]:
        parts["eval"] = [parts["train"].pop()]
    card = describe(parts, seed)
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
        raise UserError(
            f"cannot be written: {error.strerror or error}",
            where=str(error.filename or output),
            fix="give --output a folder that can be written",
            code=CANNOT_CREATE,
        ) from None


def questions(objects: Iterable[PythonObject], seed: int) -> Iterator[Row]:
    """Every question about every object, without those that repeat an earlier one in other words."""
    seen: set[str] = set()
    for thing in objects:
        for kind, values, answer in _facts(thing, seed):
            phrases = _PHRASES[kind]
            question = phrases[_hash(seed, thing.name, kind) % len(phrases)].format(
                name=thing.name + ("()" if thing.callable and kind != "signature" else ""),
                sort=thing.sort,
                **values,
            )
            keys = {question, *_same(kind, thing, values, answer)}
            if keys & seen:
                continue
            seen |= keys
            yield Row(
                question, answer, kind, thing.name, thing.module, thing.package, thing.version, thing.license
            )


def _facts(thing: PythonObject, seed: int) -> Iterator[tuple[str, dict[str, str], str]]:
    """(kind, what the question names, answer) for all that is known of ``thing``."""
    summary, details = thing.summary(_ANSWER_CHARACTERS), thing.details(_ANSWER_CHARACTERS)
    if summary:
        yield "purpose", {}, summary
    if summary and details:
        yield "description", {}, whole_sentences(f"{summary} {details}", _ANSWER_CHARACTERS)
    if thing.raises:
        yield "raises", {}, _listed(thing.raises) + "."
    if returned := thing.returned():
        yield "returns", {}, returned
    if thing.bases:
        yield "base", {}, _listed(thing.bases) + "."
    if thing.signature is None or len(thing.signature) > _LONGEST_SIGNATURE:
        return
    call = f"{thing.short}{thing.signature}"
    yield "signature", {}, f"{thing.name}{thing.signature}"
    if 2 <= len(thing.parameters) <= 8:
        yield "parameters", {"call": call}, _listed(thing.parameters) + "."
        if thing.required and len(thing.required) < len(thing.parameters):
            yield "required", {"call": call}, _listed(thing.required) + "."
    if thing.defaults:
        names = sorted(thing.defaults)
        parameter = names[_hash(seed, thing.name, "which") % len(names)]
        yield "default", {"call": call, "parameter": parameter}, thing.defaults[parameter]


def _same(kind: str, thing: PythonObject, values: dict[str, str], answer: str) -> set[str]:
    """What another row shares if it says the same: the words, without case, digits and punctuation, with and
    without the
    object's own name."""
    if kind in _READING:
        return {f"{kind}:{values['call']}:{values.get('parameter', '')}"}
    if kind in ("raises", "base"):
        return {f"{kind}:{thing.name}"}
    if kind == "signature":
        return {f"{kind}:{thing.short}{thing.signature}"}
    words = re.findall(r"[a-z]+", answer.lower())
    own = set(re.findall(r"[a-z]+", thing.short.lower()))
    return {" ".join(words), "without name:" + " ".join(word for word in words if word not in own)}


def draw(found: Iterable[Row], rows: int, seed: int) -> list[Row]:
    """At most ``rows`` of them, in an order that their hashes decide, with bounded shares of signatures and
    reading exercises.
    """
    ordered = sorted(found, key=lambda row: (_hash(seed, row.question, row.answer), row.question))
    room = {kind: int(rows * share) for kind, share in _SHARES.items()}
    first: list[Row] = []
    rest: list[Row] = []
    for row in ordered:
        within = room.get(row.kind, 1) > 0
        room[row.kind] = room.get(row.kind, rows) - 1
        (first if within else rest).append(row)
    kept = set(first[:rows]) | set(rest[: max(0, rows - len(first))])
    return [row for row in ordered if row in kept]


def in_eval(name: str, seed: int) -> bool:
    """Whether an object is held out. A class and its methods, and a name in a package's several modules, go
    together.
    """
    words = name.split(".")
    owner = next((word for word in words if word[:1].isupper()), words[-1])
    return _hash(seed, words[0], owner) % EVAL_SHARE == 0


def describe(parts: dict[str, list[Row]], seed: int) -> dict[str, Any]:
    """The card: what is in the set and where it comes from."""
    import platform

    every = [row for content in parts.values() for row in content]
    packages: dict[str, dict[str, Any]] = {}
    for row in every:
        entry = packages.setdefault(row.package, {"version": row.version, "license": row.license, "rows": 0})
        entry["rows"] += 1
    return {
        "schema": SCHEMA,
        "description": (
            "Questions and answers about Python objects, from the documentation strings and "
            "signatures of installed source."
        ),
        "language": "en",
        "python": platform.python_version(),
        "seed": seed,
        "rows": len(every),
        "objects": len({row.object for row in every}),
        "columns": list(asdict(every[0])),
        "files": {f"{name}.parquet": {"rows": len(content)} for name, content in parts.items()},
        "kinds": dict(sorted(Counter(row.kind for row in every).items())),
        "mean_characters": {
            "question": round(sum(len(row.question) for row in every) / len(every), 1),
            "answer": round(sum(len(row.answer) for row in every) / len(every), 1),
        },
        "packages": dict(sorted(packages.items())),
    }


def _listed(names: Iterable[str]) -> str:
    words = list(names)
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:8], "big")


def _write(path: Path, rows: list[Row]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {name: pa.array([getattr(row, name) for row in rows], pa.string()) for name in asdict(rows[0])}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    content = sink.getvalue().to_pybytes()
    _replace(path, content)
    return hashlib.sha256(content).hexdigest()


def _replace(path: Path, content: bytes) -> None:
    """Whole or not at all, for a reader in another process."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)
