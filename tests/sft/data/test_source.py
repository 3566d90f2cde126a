"""Bad data is answered before anything is loaded: the file, the row, the column and what to do. Good data is
found and read.
"""

from __future__ import annotations

import gzip
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.small_tokenizers import chatml

from podtune.run.errors import DATA, NO_INPUT, UNAVAILABLE, USAGE, UserError
from podtune.sft.data.load import load_split
from podtune.sft.data.source import DataSource, Sources, check_source, find_eval_split
from podtune.sft.data.tokenise import tokenised
from podtune.sft.data.tokenizer import TokenizeOptions
from podtune.sft.source import hub

GOOD = {"question": ["a", "b", "c"], "answer": ["x", "y", "z"]}


def parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def refused(path: Path | str, **more: Any) -> UserError:
    """What is said of a data set on its way to tokens, within five seconds."""
    source, started = DataSource(str(path), **more), time.monotonic()

    def walk() -> None:
        check_source(source)
        tokenised(source, chatml(), TokenizeOptions())

    with pytest.raises(UserError) as refusal:
        walk()
    assert time.monotonic() - started < 5
    assert str(path) in refusal.value.where
    return refusal.value


# ---- what is missing, empty, or no data ----
def test_a_missing_file_is_answered_with_what_lies_beside_it(tmp_path: Path) -> None:
    lines(tmp_path / "rows.jsonl", {"text": "a"})
    error = refused(tmp_path / "row.jsonl")
    assert error.code == NO_INPUT
    assert "rows.jsonl" in error.what


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "header.csv").write_text("question,answer\n")
    assert "holds no rows" in refused(tmp_path / "empty.jsonl").what
    assert "holds no rows" in refused(tmp_path / "header.csv").what
    assert "holds no rows" in refused(parquet(tmp_path / "none.parquet", text=pa.array([], pa.string()))).what


def test_a_folder_without_data_or_with_two_formats_is_refused(tmp_path: Path) -> None:
    assert "no data file" in refused(tmp_path).what
    parquet(tmp_path / "a.parquet", **GOOD)
    (tmp_path / "b.csv").write_text("text\na\n")
    assert "mixes csv and parquet" in refused(tmp_path).what


def test_an_unknown_kind_of_file_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    (tmp_path / "rows.xlsx").write_bytes(b"x")
    error = refused(tmp_path / "rows.xlsx")
    assert (error.code, "'.xlsx'" in error.what, "Parquet" in error.fix) == (NO_INPUT, True, True)


def test_wrong_columns_are_answered_with_those_found_and_the_shapes_understood(tmp_path: Path) -> None:
    error = refused(parquet(tmp_path / "a.parquet", input=["a"], output=["b"]))
    assert error.code == DATA
    assert "found input, output" in error.what
    for shape in ("messages", "prompt, completion", "question, answer", "text", "input_ids"):
        assert shape in error.fix
    check_source(DataSource(str(tmp_path / "a.parquet"), text_field="output"))


def test_images_are_told_that_they_are_for_another_task(tmp_path: Path) -> None:
    assert "images" in refused(lines(tmp_path / "b.jsonl", {"image": "a", "text": "b"})).what


# ---- cells ----
CELLS = [
    ({"question": "a", "answer": None}, "column 'answer' is missing or null"),
    ({"question": "a", "answer": 3}, "column 'answer' holds a number instead of text: 3"),
    ({"question": ["a"], "answer": "b"}, "column 'question' holds a list instead of text"),
    ({"question": "a"}, "column 'answer' is missing or null"),
]


@pytest.mark.parametrize(("row", "problem"), CELLS, ids=["null", "number", "list", "missing"])
def test_a_bad_cell_of_json_lines_is_named_by_line_and_column(
    tmp_path: Path, row: dict[str, Any], problem: str
) -> None:
    error = refused(lines(tmp_path / "a.jsonl", {"question": "a", "answer": "b"}, row))
    assert (error.code, error.where) == (DATA, f"{tmp_path}/a.jsonl, line 2")
    assert error.what.startswith(problem)


def test_a_bad_cell_of_parquet_is_named_by_row_and_column(tmp_path: Path) -> None:
    error = refused(parquet(tmp_path / "null.parquet", question=["a"] * 9 + [None], answer=["x"] * 10))
    assert error.where == f"{tmp_path}/null.parquet, row 10"
    assert error.what == "column 'question' is missing or null"
    error = refused(parquet(tmp_path / "type.parquet", question=["a"], answer=[1.5]))
    assert "holds a number instead of text" in error.what
    error = refused(parquet(tmp_path / "bytes.parquet", text=[b"a"]))
    assert "holds bytes instead of text" in error.what


def test_an_empty_cell_of_csv_is_null(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('question,answer\na,"two\nlines"\nb,\n')
    error = refused(tmp_path / "a.csv")
    assert (error.where, error.what) == (f"{tmp_path}/a.csv, line 4", "column 'answer' is missing or null")


MESSAGES = [
    ([], "is an empty list"),
    ("hello", "holds text instead of a list"),
    (["hello"], "has a message 1 that is text instead of {role, content}"),
    (
        [{"role": "user", "content": "a"}, {"content": "b"}],
        ("has a message 2 that has no role; its keys are content"),
    ),
    ([{"role": "user"}], "has a message 1 that has no content (role user)"),
    ([{"role": "user", "content": 5}], "has a message 1 that has as its content a number instead of text: 5"),
]


@pytest.mark.parametrize(("messages", "problem"), MESSAGES)
def test_bad_messages_are_named_by_their_place(tmp_path: Path, messages: Any, problem: str) -> None:
    good = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
    ]
    error = refused(lines(tmp_path / "a.jsonl", {"messages": good}, {"messages": messages}))
    assert f"column 'messages' {problem}" in error.what
    assert error.where.endswith("line 2")


# ---- damage ----
def test_a_torn_parquet_file_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", text=["row"] * 1000)
    path.write_bytes(path.read_bytes()[:-20])
    error = refused(path)
    assert error.code == DATA
    assert "not a readable Parquet file" in error.what


def test_bytes_that_are_not_utf8_are_named_by_line_or_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "caf\xe9"}\n')
    error = refused(tmp_path / "a.jsonl")
    assert error.where.endswith("a.jsonl, line 2")
    assert "not UTF-8: byte 0xe9" in error.what
    assert "iconv" in error.fix
    (tmp_path / "a.csv").write_bytes(b"text\ncaf\xe9\n")
    assert refused(tmp_path / "a.csv").where.endswith("a.csv, line 2")
    broken = pa.StringArray.from_buffers(
        2, pa.py_buffer(b"\0\0\0\0\x02\0\0\0\x04\0\0\0"), pa.py_buffer(b"ab\xff\xfe")
    )
    error = refused(parquet(tmp_path / "a.parquet", text=broken))
    assert (error.where, "UTF8" in error.what) == (f"{tmp_path}/a.parquet", True)


def test_a_torn_line_of_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n{"text": ')
    assert refused(tmp_path / "a.jsonl").where.endswith("line 2")
    (tmp_path / "b.jsonl").write_text('["text"]\n{"text": "a"}\n')
    assert "not JSON" in refused(tmp_path / "b.jsonl").what


def test_json_that_is_no_text_or_nested_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine \\ud83d\\ude00"}\n{"text": "half \\ud83d"}\n')
    error = refused(tmp_path / "a.jsonl")
    assert (error.where.endswith("line 2"), "surrogates not allowed" in error.what) == (True, True)
    (tmp_path / "b.jsonl").write_text('{"text": ' + "[" * 100_000 + "\n")
    assert "recursion" in refused(tmp_path / "b.jsonl").what


def test_a_csv_line_with_too_many_cells_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer\na,b,c\n")
    error = refused(tmp_path / "a.csv")
    assert "3 cells but the header has 2" in error.what


def test_a_saved_data_set_that_lost_a_file_is_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict(GOOD).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    lost = next((tmp_path / "saved").glob("*.arrow"))
    lost.unlink()
    with pytest.raises(UserError, match="missing") as refusal:
        check_source(DataSource(str(tmp_path / "saved")))
    assert refusal.value.where == str(lost)


def test_checking_imports_neither_torch_nor_datasets(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "a"})
    program = (
        "import sys; from podtune.sft.data.source import *; "
        f"check_source(DataSource({str(path)!r})); "
        "sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_the_datasets_folder_here_does_not_hide_the_library() -> None:
    import datasets

    assert "site-packages" in str(datasets.__file__)
    assert not (Path(__file__).parents[3] / "datasets" / "__init__.py").exists()


# ---- what is read ----
def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"question": q, "answer": a} for q, a in zip(*GOOD.values(), strict=True)]
    parquet(tmp_path / "a.parquet", **GOOD)
    lines(tmp_path / "a.jsonl", *rows)
    (tmp_path / "array.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "a.csv").write_text("question,answer\na,x\nb,y\nc,z\n")
    (tmp_path / "a.tsv").write_text("question\tanswer\na\tx\nb\ty\nc\tz\n")
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as packed:
        packed.write((tmp_path / "a.jsonl").read_bytes())
    datasets.Dataset.from_dict(GOOD).save_to_disk(str(tmp_path / "saved"))
    for name in ("a.parquet", "a.jsonl", "array.json", "a.csv", "a.tsv", "a.jsonl.gz", "saved"):
        source = DataSource(str(tmp_path / name))
        check_source(source)
        assert load_split(source).to_list() == rows, name


def test_text_stays_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer\n2024-01-01,None\n007,NA\n")
    assert load_split(DataSource(str(tmp_path / "a.csv"))).to_dict() == {
        "question": ["2024-01-01", "007"],
        "answer": ["None", "NA"],
    }
    lines(tmp_path / "a.jsonl", {"text": "2024-01-01T00:00:00"})
    assert load_split(DataSource(str(tmp_path / "a.jsonl")))["text"][:] == ["2024-01-01T00:00:00"]


def test_columns_that_are_not_trained_may_hold_anything(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "a", "meta": 1}, {"text": "b", "meta": {"x": "y"}})
    check_source(DataSource(str(path)))
    assert load_split(DataSource(str(path)))["text"][:] == ["a", "b"]


def test_shards_are_read_in_order_and_splits_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, text in [
        ("train-00000-of-00002", "a"),
        ("train-00001-of-00002", "b"),
        ("validation-00000-of-00001", "c"),
    ]:
        parquet(tmp_path / "data" / f"{name}.parquet", text=[text])
    (tmp_path / "card.json").write_text("{}")
    source = DataSource(str(tmp_path))
    check_source(source)
    assert load_split(source)["text"][:] == ["a", "b"]
    found = find_eval_split(source)
    assert found is not None
    assert found.split == "validation"
    assert load_split(found)["text"][:] == ["c"]
    with pytest.raises(UserError, match="no split 'test'; found train, validation"):
        load_split(DataSource(str(tmp_path), split="test"))


def test_shards_without_a_split_in_their_names_are_all_trained(tmp_path: Path) -> None:
    for number in range(3):
        lines(tmp_path / f"part-{number}.jsonl", {"text": str(number)})
    assert load_split(DataSource(str(tmp_path)))["text"][:] == ["0", "1", "2"]
    assert find_eval_split(DataSource(str(tmp_path))) is None


def test_shards_with_other_columns_are_refused(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", text=["a"])
    parquet(tmp_path / "b.parquet", question=["a"], answer=["b"])
    assert refused(tmp_path).what == "column 'text' is missing or null"


def test_a_saved_dict_of_splits_gives_each(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one, two = datasets.Dataset.from_dict({"text": ["a"]}), datasets.Dataset.from_dict({"text": ["b"]})
    datasets.DatasetDict({"train": one, "test": two}).save_to_disk(str(tmp_path / "saved"))
    source = DataSource(str(tmp_path / "saved"))
    check_source(source)
    found = find_eval_split(source)
    assert found is not None
    assert (load_split(source)["text"][:], load_split(found)["text"][:]) == (["a"], ["b"])


def test_a_mixture_takes_files_and_shares(tmp_path: Path) -> None:
    first = parquet(tmp_path / "a.parquet", text=["a"] * 30)
    second = lines(tmp_path / "b.jsonl", *[{"text": "b"}] * 90)
    mixture = ({"path": str(first), "fraction": 0.5}, {"path": str(second), "fraction": 0.5})
    check_source(DataSource(mixture=mixture))
    mixed = load_split(DataSource(mixture=mixture))["text"][:]
    assert (mixed.count("a"), mixed.count("b")) == (30, 30)
    with_test = DataSource(mixture=mixture, mixture_test_size=0.1)
    held_out = find_eval_split(with_test)
    assert held_out is not None
    assert (len(load_split(with_test)), len(load_split(held_out))) == (54, 6)
    for wrong, why in (
        ({"path": str(first), "weight": 2}, "weight"),
        ({"path": "gone.jsonl"}, "no such file"),
    ):
        with pytest.raises(UserError, match=why):
            load_split(DataSource(mixture=(wrong,)))


def test_a_configuration_gives_its_sources(tmp_path: Path) -> None:
    parquet(tmp_path / "train.parquet", text=["a"])
    parquet(tmp_path / "eval.parquet", text=["b"])
    folder = Sources.of({"dataset_name": str(tmp_path), "eval_strategy": "steps"})
    assert folder.train.split == "train"
    assert folder.evaluation is not None
    assert folder.evaluation.split == "eval"
    alone, given = (str(tmp_path / f"{name}.parquet") for name in ("train", "eval"))
    assert Sources.of({"dataset_name": alone}).evaluation is None
    named = Sources.of({"dataset_name": alone, "eval_dataset_name": given})
    assert (named.train, named.evaluation) == (DataSource(alone), DataSource(given))
    with pytest.raises(UserError, match="no data set is given") as refusal:
        Sources.of({})
    assert refusal.value.code == USAGE


def test_a_split_that_is_named_is_the_one_that_is_taken(tmp_path: Path) -> None:
    parquet(tmp_path / "train.parquet", text=["a", "b", "c"])
    parquet(tmp_path / "test.parquet", text=["d", "e"])

    def evaluation(split: str) -> DataSource | None:
        values = {"dataset_name": str(tmp_path), "dataset_test_split": split, "eval_strategy": "steps"}
        return Sources.of(values).evaluation

    for split, texts in (("train", ["a", "b", "c"]), ("test", ["d", "e"])):
        source = evaluation(split)
        assert source is not None
        assert load_split(source)["text"][:] == texts
    with pytest.raises(UserError, match="there is no split 'validation'; found train, test"):
        evaluation("validation")
    with pytest.raises(UserError, match=r"there is no split 'test\[:1\]'; found train, test"):
        evaluation("test[:1]")


def test_rows_that_nothing_evaluates_are_not_read(tmp_path: Path) -> None:
    parquet(tmp_path / "train.parquet", text=["a"])
    (tmp_path / "test.parquet").write_bytes(b"broken")
    Sources.of({"dataset_name": str(tmp_path)}).check()
    with pytest.raises(UserError, match=r"test\.parquet"):
        Sources.of({"dataset_name": str(tmp_path), "eval_strategy": "epoch"}).check()


@pytest.mark.parametrize("offset", [2_000_000, -2_000_000_000])
def test_offsets_outside_of_an_arrow_file_are_refused(tmp_path: Path, offset: int) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"messages": [[{"role": "user", "content": "abc"}]] * 5})
    rows.save_to_disk(str(tmp_path / "saved"))
    file = next((tmp_path / "saved").glob("*.arrow"))
    content = file.read_bytes()
    ends = b"".join(number.to_bytes(4, "little") for number in (0, 1, 2, 3, 4, 5))
    assert content.count(ends)
    file.write_bytes(content.replace(ends, ends[:12] + offset.to_bytes(4, "little", signed=True) + ends[16:]))
    for read in (check_source, load_split):
        with pytest.raises(UserError, match="damaged or incomplete") as refusal:
            read(DataSource(str(tmp_path / "saved")))
        assert refusal.value.code == DATA


def test_seed_0_is_a_seed() -> None:
    entry = {"path": "chats.jsonl"}
    assert Sources.of({"datasets": [entry], "seed": 0}).train.seed == 0
    assert Sources.of({"datasets": [entry]}).train.seed == 42


# ---- the hub ----
@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Point the hub's client at an address; offline mode off, the cache empty."""
    from huggingface_hub import constants

    def point(endpoint: str) -> None:
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    return point


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A server that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_hub_that_refuses_or_stays_silent_is_answered_within_five_seconds(
    online: Callable[[str], None], silent_port: int
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        refusing = free.getsockname()[1]  # bound and not listening
        for port in (refusing, silent_port):
            online(f"http://127.0.0.1:{port}")
            started = time.monotonic()
            error = refused("someone/chats")
            assert time.monotonic() - started < 5
            assert error.code == UNAVAILABLE
            assert "cannot be reached" in error.what
            assert "HF_HUB_OFFLINE=1" in error.fix


def test_a_cached_copy_is_used_when_the_hub_cannot_be_reached(
    online: Callable[[str], None], silent_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    online(f"http://127.0.0.1:{silent_port}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # so that it is put back afterwards
    (tmp_path / "hf" / "hub" / "datasets--someone--chats" / "snapshots").mkdir(parents=True)
    check_source(DataSource("someone/chats"))
    assert hub.offline()


def test_offline_and_not_cached_says_how_to_fill_the_cache(
    online: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    online("http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    error = refused("someone/chats")
    assert (error.code, "hf download someone/chats" in error.fix) == (NO_INPUT, True)


def test_a_path_is_never_taken_for_a_hub_name(online: Callable[[str], None]) -> None:
    online("http://127.0.0.1:9")
    for name in ("/no/such/folder", "./here", "data.parquet", "some/folder/deep"):
        with pytest.raises(UserError, match="no such file or folder"):
            check_source(DataSource(name))
