"""The question-answer set: the same every time, divided so that nothing leaks, true to its sources."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from podtune.qa import build as qa
from podtune.qa import documentation
from podtune.qa.documentation import plain, prose, whole_sentences
from podtune.run.errors import CANNOT_CREATE, UserError

ROWS = 9000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qa")
    qa.build(folder, kind="docs", rows=ROWS)
    return folder


@pytest.fixture(scope="module")
def parts(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {name: pq.read_table(folder / f"{name}.parquet").to_pylist() for name in ("train", "eval")}


def test_there_are_enough_rows_of_every_kind(parts: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    card = json.loads((folder / "card.json").read_text())
    assert len(parts["train"]) + len(parts["eval"]) == card["rows"] == ROWS
    assert 0.05 < len(parts["eval"]) / ROWS < 0.15
    assert set(card["kinds"]) == set(documentation._PHRASES)
    for name, rows in parts.items():
        assert card["files"][f"{name}.parquet"]["rows"] == len(rows)
        assert {row["kind"] for row in rows} == set(documentation._PHRASES)
    assert card["packages"]["python"]["rows"] > ROWS // 4
    assert len(card["packages"]) > 5


def test_no_object_stands_on_both_sides_and_no_prose_of_eval_stands_in_train(
    parts: dict[str, list[dict[str, Any]]],
) -> None:
    objects = {name: {row["object"] for row in rows} for name, rows in parts.items()}
    assert not objects["train"] & objects["eval"]
    prose_kinds = ("purpose", "description", "returns")
    answers = {
        name: {row["answer"].lower() for row in rows if row["kind"] in prose_kinds}
        for name, rows in parts.items()
    }
    assert not answers["train"] & answers["eval"]


def test_no_question_is_asked_twice(parts: dict[str, list[dict[str, Any]]]) -> None:
    questions = [row["question"] for rows in parts.values() for row in rows]
    assert len(set(questions)) == len(questions)


def test_rows_are_short_full_and_say_where_they_come_from(parts: dict[str, list[dict[str, Any]]]) -> None:
    for row in parts["train"] + parts["eval"]:
        assert all(isinstance(value, str) and value for value in row.values()), row
        assert len(row["answer"]) <= 620
        assert row["object"].startswith(row["module"])


def test_signatures_are_python(parts: dict[str, list[dict[str, Any]]]) -> None:
    signatures = [
        row["answer"] for row in parts["eval"] if row["kind"] == "signature" and row["package"] != "python"
    ]
    assert len(signatures) > 20
    for signature in signatures:
        name, _, rest = signature.partition("(")
        ast.parse(f"def {name.rpartition('.')[2]}({rest}: ...")


def test_the_command_gives_the_same_bytes_in_another_process(folder: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "podtune.cli",
        *("data", "build", "--kind", "docs", "--output", str(tmp_path), "--rows", str(ROWS), "--json"),
    ]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONHASHSEED": "7"}, check=True, timeout=200, capture_output=True
    )
    for name in ("train.parquet", "eval.parquet", "card.json"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    card = json.loads(done.stdout)
    assert card == json.loads((folder / "card.json").read_text())
    assert (
        card["files"]["train.parquet"]["sha256"]
        == hashlib.sha256((folder / "train.parquet").read_bytes()).hexdigest()
    )


def test_a_known_object_is_described_by_its_own_words(parts: dict[str, list[dict[str, Any]]]) -> None:
    thing = next(item for item in documentation.documented_objects() if item.name == "bisect.bisect_right")
    assert thing.signature == "(a, x, lo=0, hi=None, *, key=None)"
    assert thing.parameters == ("a", "x", "lo", "hi", "key")
    assert thing.required == ("a", "x")
    assert thing.raises == ("ValueError",)
    assert prose(thing.doc)[0] == "Return the index where to insert item x in list a, assuming a is sorted."


def test_nothing_of_a_package_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "click"
    package.mkdir()
    (package / "__init__.py").write_text('raise SystemExit("imported")\n')
    (package / "verbs.py").write_text(
        'def shout(words: str, times=2) -> str:\n    """Say the words in capitals."""\n    raise SystemExit\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(documentation, "PACKAGES", (("click", "click"),))
    monkeypatch.delitem(sys.modules, "click", raising=False)
    monkeypatch.setattr(documentation.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "none")})
    found = {item.name: item for item in documentation.documented_objects() if item.package == "click"}
    assert found["click.verbs.shout"].signature == "(words: str, times=2) -> str"
    assert found["click.verbs.shout"].raises == ("SystemExit",)


def test_documentation_becomes_sentences() -> None:
    doc = """Read :class:`~io.Bytes` from ``path`` with `open`_.

    Args:
        path: where.

    Returns:
        The bytes, as they are.

    >>> read("x")
    """
    assert prose(re.sub(r"(?m)^    ", "", doc))[1] == "Returns the bytes, as they are."
    assert plain("a :func:`~os.path.join` of ``x`` and *y*") == "a os.path.join of x and y"
    assert whole_sentences("One is here. Two is longer than that.", 15) == "One is here."
    assert whole_sentences("much too long for the room", 10) == ""


def test_a_folder_that_cannot_be_written_and_too_few_rows_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    started = time.monotonic()
    with pytest.raises(UserError, match="cannot be written") as refusal:
        qa.build(tmp_path / "file" / "qa", kind="unicode", rows=50)
    assert refusal.value.code == CANNOT_CREATE
    with pytest.raises(UserError, match="the least is 20"):
        qa.build(tmp_path, kind="unicode", rows=1)
    assert time.monotonic() - started < 1
