"""Data files that have not changed are not read again, and files that have are."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from support.small_tokenizers import chatml

from podtune.run.errors import UserError
from podtune.sft.data import source, stamps, tokenise
from podtune.sft.data.load import load_split
from podtune.sft.data.source import DataSource, Sources, check_source
from podtune.sft.data.tokenise import Tokenised, tokenised
from podtune.sft.data.tokenizer import TokenizeOptions

CHAT = [
    {"role": "alien", "content": "hi"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "ho"},
]
ROWS = [{"messages": CHAT}] * 5


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture(autouse=True)
def files_settle_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamps, "SETTLED_S", -60.0)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources whose rows are read."""
    names: list[str] = []

    def load(data: DataSource) -> Dataset:
        names.append(str(data))
        return load_split(data)

    monkeypatch.setattr(tokenise, "load_split", load)
    return names


def made(data: Path | DataSource, folder: Path, **options: Any) -> Tokenised:
    data = data if isinstance(data, DataSource) else DataSource(str(data))
    return tokenised(data, chatml(), TokenizeOptions(**options), cache_dir=folder / "cache")


def test_rows_of_unchanged_files_are_known_unread(file: Path, tmp_path: Path, reads: list[str]) -> None:
    first, again = made(file, tmp_path), made(file, tmp_path)
    assert reads == [str(file)]
    assert (first.from_cache, again.from_cache) == (False, True)
    assert any("alien" in warning for warning in again.warnings)
    assert (first.stats, first.warnings, first.shape, first.digest) == (
        again.stats,
        again.warnings,
        again.shape,
        again.digest,
    )
    assert first.dataset.to_dict() == again.dataset.to_dict()


@pytest.mark.parametrize("saved", [False, True])
def test_a_change_that_keeps_size_and_time_is_seen(
    tmp_path: Path, file: Path, reads: list[str], saved: bool
) -> None:
    data, changed = file, file
    if saved:
        data = tmp_path / "saved"
        Dataset.from_list(ROWS).save_to_disk(str(data))
        changed = next(data.rglob("*.arrow"))
    first = made(data, tmp_path)
    before = changed.stat()
    time.sleep(0.05)  # a tick of the file system's clock
    changed.write_bytes(changed.read_bytes().replace(b"ho", b"ha"))
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert changed.stat().st_size == before.st_size
    again = made(data, tmp_path)
    assert (len(reads), again.from_cache) == (2, False)
    assert again.stats.fingerprint != first.stats.fingerprint


def test_other_slices_and_options_are_other_tokens(file: Path, tmp_path: Path, reads: list[str]) -> None:
    made(file, tmp_path)
    assert made(DataSource(str(file), split="train[:2]"), tmp_path).stats.rows == 2
    assert not made(file, tmp_path, max_length=9).from_cache
    assert len(reads) == 3
    assert made(file, tmp_path, max_length=9).from_cache
    assert len(reads) == 3


def test_what_was_written_this_moment_is_read_again(
    file: Path, tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stamps, "SETTLED_S", 3600.0)
    made(file, tmp_path)
    assert made(file, tmp_path).from_cache
    assert len(reads) == 2


def test_files_that_change_while_they_are_read_are_not_remembered(
    file: Path, tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = tokenise.load_split

    def touched(data: DataSource) -> Dataset:
        rows = load(data)
        os.utime(file)
        return rows

    monkeypatch.setattr(tokenise, "load_split", touched)
    made(file, tmp_path)
    made(file, tmp_path)
    assert len(reads) == 2


def test_a_memory_that_is_no_memory_is_none(file: Path, tmp_path: Path, reads: list[str]) -> None:
    made(file, tmp_path)
    (remembered,) = (tmp_path / "cache" / stamps.FOLDER).iterdir()
    for content in ("", "[]", "\0", remembered.read_text()[1:], remembered.read_text().replace("0", "x")):
        remembered.write_text(content)
        assert made(file, tmp_path).from_cache
    assert len(reads) == 6


def test_a_cache_that_cannot_be_written_remembers_nothing_and_ends_nothing(
    file: Path, tmp_path: Path, reads: list[str]
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / stamps.FOLDER).touch()
    made(file, tmp_path)
    assert made(file, tmp_path).from_cache
    assert len(reads) == 2


def test_known_files_are_not_checked_again_before_torch_is_imported(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []

    def check(data: DataSource) -> None:
        checked.append(str(data))
        check_source(data)

    monkeypatch.setattr(source, "check_source", check)
    values = {"dataset_name": str(file), "tokenized_cache": str(tmp_path / "cache")}
    Sources.of(values).check()
    made(file, tmp_path)
    Sources.of(values).check()
    assert len(checked) == 1
    Sources.of(values | {"dataset_text_field": "other"}).check()
    assert len(checked) == 2
    file.write_text(file.read_text() + '{"messages": 3}\n')
    with pytest.raises(UserError, match="line 6"):
        Sources.of(values).check()
