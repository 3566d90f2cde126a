"""A streamed set gives the rows that a loaded one gives, pass after pass, and goes on at any place."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.small_tokenizers import chatml

from podtune.run.errors import PeerLost, UserError
from podtune.sft.config import settings as config
from podtune.sft.data import stream as module
from podtune.sft.data.batching import ROW
from podtune.sft.data.source import DataSource, Sources
from podtune.sft.data.stream import TokenStream
from podtune.sft.data.tokenise import tokenised
from podtune.sft.data.tokenizer import TokenizeOptions

COUNT = 150  # more than two chunks, and not a multiple of one
OPTIONS = TokenizeOptions(max_length=48)


@pytest.fixture
def source(tmp_path: Path) -> DataSource:
    """Two files; every tenth question is so long that the cut leaves nothing of its answer."""
    for name, numbers in (("train-a", range(100)), ("train-b", range(100, COUNT))):
        lines = [
            {"question": f"What is {n}?" + " Why?" * 40 * (n % 10 == 3), "answer": f"It is {n}."}
            for n in numbers
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return DataSource(str(tmp_path))


def stream(source: DataSource, seed: int | None = None, **options: Any) -> TokenStream:
    tokenizer = chatml()
    words = {"vocabulary": len(tokenizer), "seed": seed} | options
    return TokenStream(source, tokenizer, OPTIONS, **words)


def rows(source: DataSource, count: int, position: int = 0, seed: int | None = None) -> list[dict[str, Any]]:
    return list(itertools.islice(stream(source, seed).dataset(position), count))


def test_its_rows_are_those_of_a_loaded_set_in_their_order_pass_after_pass(source: DataSource) -> None:
    loaded = tokenised(source, chatml(), OPTIONS)
    assert loaded.stats.rows_dropped == COUNT // 10
    streamed = rows(source, 2 * len(loaded.dataset))
    tokens = [{name: row[name] for name in ("input_ids", "labels")} for row in streamed]
    assert tokens == 2 * loaded.dataset.to_list()
    assert [row[ROW] for row in streamed] == [place for place in range(2 * COUNT) if place % 10 != 3]


@pytest.mark.parametrize("position", [1, 64, 100, COUNT, COUNT + 7, 5 * COUNT + 99])
@pytest.mark.parametrize("seed", [None, 3])
def test_it_goes_on_behind_any_place_as_if_it_had_never_stopped(
    source: DataSource, position: int, seed: int | None
) -> None:
    whole = rows(source, 6 * COUNT, seed=seed)
    rest = [row for row in whole if row[ROW] >= position][:40]
    assert rows(source, 40, position, seed) == rest


def test_a_seed_shuffles_each_pass_anew_and_loses_no_row(source: DataSource) -> None:
    kept = COUNT - COUNT // 10
    plain, shuffled = rows(source, kept), rows(source, 2 * kept, seed=1)
    passes = [[str(row["input_ids"]) for row in part] for part in (shuffled[:kept], shuffled[kept:])]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(str(row["input_ids"]) for row in plain)
    assert passes[0] != passes[1]


def test_what_can_not_be_trained_ends_with_its_reason_and_not_never(
    tmp_path: Path, source: DataSource
) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"question": "Why? " * 40, "answer": "So."}) + "\n")
    with pytest.raises(UserError, match="no token to train"):
        rows(DataSource(str(file)), 1)
    file.write_text(json.dumps({"question": "Why?", "answer": None}) + "\n")
    with pytest.raises(UserError, match=r"row 1.*answer"):
        rows(DataSource(str(file)), 1)
    with pytest.raises(UserError, match="the model has 5 embeddings"):
        next(iter(stream(source, vocabulary=5).dataset()))


def test_another_file_or_size_is_another_set(source: DataSource, tmp_path: Path) -> None:
    before = stream(source).fingerprint
    assert stream(source).fingerprint == before != stream(source, seed=1).fingerprint
    with (tmp_path / "train-b.jsonl").open("a") as file:
        file.write(json.dumps({"question": "And?", "answer": "Nothing."}) + "\n")
    assert stream(source).fingerprint != before


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "set max_steps"),
        (["--max_steps", "5", "--packing"], "packing needs all rows"),
        (["--max_steps", "5", "--eval_split_size", "0.1"], "eval_split_size needs all rows"),
        (["--max_steps", "5", "--train_sampling_strategy", "group_by_length"], "group_by_length needs"),
        (["--max_steps", "5", "--dataloader_num_workers", "2"], "one worker"),
    ],
)
def test_what_needs_all_rows_is_refused_before_anything_is_read(words: list[str], reason: str) -> None:
    needed = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o", "--dataset_streaming"]
    with pytest.raises(UserError, match=reason):
        config.read([*needed, *words], {})


def test_mixtures_and_slices_are_not_streamed() -> None:
    for more in ({"dataset_train_split": "train[:10]"}, {"datasets": [{"path": "user/set"}]}):
        with pytest.raises(UserError, match="is not streamed"):
            Sources.of({"dataset_name": "user/set", "dataset_streaming": True} | more).check()


def test_a_set_of_the_hub_is_read_as_it_comes(
    monkeypatch: pytest.MonkeyPatch, source: DataSource, tmp_path: Path
) -> None:
    """The datasets library's own streaming, of a local copy: there is no hub here."""
    import datasets

    asked = []
    real = datasets.load_dataset

    def load(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((name, config, split, streaming))
        return real("json", data_files=str(tmp_path / "train-a.jsonl"), split=split, streaming=streaming)

    monkeypatch.setattr(module.hub, "look_up", lambda name: None)
    monkeypatch.setattr(datasets, "load_dataset", load)
    from_hub = rows(DataSource("user/set"), 120, seed=2)
    assert {row[ROW] for row in from_hub} <= set(range(200))
    assert set(asked) == {("user/set", None, "train", True)}


def test_a_hub_that_stops_answering_is_a_reason_to_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield from [{"question": "Why?", "answer": "So."}] * 70
        raise ConnectionError("Server Disconnected")

    monkeypatch.setattr(module.hub, "load", lambda *_, **__: rows())
    endless = iter(stream(DataSource("user/set"))._token_rows(0))
    assert len(list(itertools.islice(endless, 64))) == 64
    with pytest.raises(PeerLost, match=r"user/set: the hub stopped answering .*Server Disconnected"):
        next(endless)
