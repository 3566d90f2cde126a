"""The demo's set: the same every time, its card true, and refused at once where it cannot be made."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from podtune.demo_data.build import build
from podtune.run.errors import CANNOT_CREATE, UserError

ROWS = 9000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("set")
    build(folder, rows=ROWS)
    return folder


@pytest.fixture(scope="module")
def parts(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {name: pq.read_table(folder / f"{name}.parquet").to_pylist() for name in ("train", "eval")}


def test_the_card_counts_the_rows_of_both_files(parts: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    card = json.loads((folder / "card.json").read_text())
    assert len(parts["train"]) + len(parts["eval"]) == card["rows"] == ROWS
    assert 0.05 < len(parts["eval"]) / ROWS < 0.15
    for name, rows in parts.items():
        assert card["files"][f"{name}.parquet"]["rows"] == len(rows)
        assert {row["kind"] for row in rows} == set(card["kinds"])
        assert card["columns"] == list(rows[0])


def test_no_object_stands_on_both_sides_and_no_question_is_asked_twice(
    parts: dict[str, list[dict[str, Any]]],
) -> None:
    objects = {name: {row["object"] for row in rows} for name, rows in parts.items()}
    assert not objects["train"] & objects["eval"]
    questions = [row["question"] for rows in parts.values() for row in rows]
    assert len(set(questions)) == len(questions)


def test_the_command_gives_the_same_bytes_in_another_process(folder: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "podtune.cli",
        *("data", "build", "--output", str(tmp_path), "--rows", str(ROWS), "--json"),
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


def test_a_folder_that_cannot_be_written_and_too_few_rows_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    started = time.monotonic()
    with pytest.raises(UserError, match="cannot be written") as refusal:
        build(tmp_path / "file" / "set", rows=50)
    assert refusal.value.code == CANNOT_CREATE
    with pytest.raises(UserError, match="the least is 20"):
        build(tmp_path, rows=1)
    assert time.monotonic() - started < 1
