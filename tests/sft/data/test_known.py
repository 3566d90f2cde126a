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

from podtune.sft.data import tokenise
from podtune.sft.data.load import load_split
from podtune.sft.data.source import DataSource
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


def test_other_options_are_other_tokens(file: Path, tmp_path: Path, reads: list[str]) -> None:
    made(file, tmp_path)
    assert not made(file, tmp_path, max_length=9).from_cache
    assert len(reads) == 2
    assert made(file, tmp_path, max_length=9).from_cache
    assert len(reads) == 2
