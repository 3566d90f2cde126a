"""Rows as people have them: other names, other roles, other separators, gaps, doubles and blanks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from support.small_tokenizers import chatml

from podtune.run.errors import UserError
from podtune.sft.config import settings as config
from podtune.sft.data.load import load_split
from podtune.sft.data.rows import split_off, trained_too
from podtune.sft.data.source import DataSource, Sources, check_source
from podtune.sft.data.stream import TokenStream
from podtune.sft.data.tokenise import Tokenised, tokenised
from podtune.sft.data.tokenizer import TokenizeOptions
from podtune.sft.model.template import prompt_and_answer

PLAIN = {"question": "Why is it?\n\nthe sky", "answer": "It is."}
ALPACA = {"instruction": "Why is it?", "input": "the sky", "output": "It is."}
SHAREGPT = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def made(source: DataSource) -> Tokenised:
    check_source(source)
    return tokenised(source, chatml(), TokenizeOptions())


def written(folder: Path, *rows: Any, name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("row", "known"),
    [
        (ALPACA, PLAIN),
        ({"instruction": PLAIN["question"], "input": "", "output": "It is."}, PLAIN),
        ({"Question": PLAIN["question"], "ANSWER": "It is."}, PLAIN),
        (SHAREGPT, CHAT),
    ],
    ids=["alpaca", "alpaca without input", "capitals", "sharegpt"],
)
def test_rows_under_other_names_are_trained_and_answered_as_under_ours(
    tmp_path: Path, row: dict[str, Any], known: dict[str, Any]
) -> None:
    other, ours = (made(DataSource(written(tmp_path, each))) for each in (row, known))
    assert other.dataset.to_dict() == ours.dataset.to_dict()
    assert other.warnings == ()
    assert prompt_and_answer(row) == prompt_and_answer(known)


def test_names_as_they_are_come_before_names_in_another_case(tmp_path: Path) -> None:
    rows = written(tmp_path, {"text": "plain", "Question": "a", "Answer": "b"})
    assert made(DataSource(rows)).shape == "text"


def test_columns_get_the_names_of_the_configuration(tmp_path: Path) -> None:
    given = written(tmp_path, {"frage": "a", "antwort": "b", "answer": "not this"})
    values = {"dataset_name": given, "columns": {"frage": "question", "antwort": "answer"}}
    source = Sources.of(values).train
    expected = made(DataSource(written(tmp_path, {"question": "a", "answer": "b"}, name="ours.jsonl")))
    assert made(source).dataset.to_dict() == expected.dataset.to_dict()
    stream = TokenStream(source, chatml(), TokenizeOptions(), vocabulary=10**6)
    assert next(iter(stream.dataset()))["input_ids"] == expected.dataset[0]["input_ids"]
    with pytest.raises(
        UserError, match="there is no column 'fragen' to rename; found answer, antwort, frage"
    ):
        check_source(Sources.of(values | {"columns": {"fragen": "question"}}).train)
    needed = ["--model_name_or_path", "m", "--dataset_name", given, "--output_dir", "o"]
    with pytest.raises(UserError, match="must be a mapping of names to new names"):
        config.read([*needed, "--columns", "frage"], {})


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_csv_s_separator_is_that_of_its_line_of_names(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f'question{separator}answer\n"a; b, c"{separator}d\n')
    assert load_split(DataSource(str(path))).to_list() == [{"question": "a; b, c", "answer": "d"}]


GAPS = [{"question": f"q{n}", "answer": None if n % 2 else "a"} for n in range(14)]


def test_missing_values_are_told_all_at_once_and_can_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = DataSource(written(tmp_path, *GAPS))
    check_source(source)
    with pytest.raises(UserError, match="7 rows lack a value: column 'answer' is missing") as caught:
        load_split(source)
    assert caught.value.where.endswith("line 2")
    assert [f"line {number}:" in caught.value.what for number in (4, 6, 8, 10, 12)] == [True] * 4 + [False]
    assert "drop_incomplete: true" in caught.value.fix
    kept = made(Sources.of({"dataset_name": source.name, "drop_incomplete": True}).train)
    assert kept.stats.rows == 7
    assert "rows left out for want of a value: 7" in capsys.readouterr().err


def test_doubles_and_blank_answers_are_counted(tmp_path: Path) -> None:
    rows = [{"question": "q", "answer": "a"}] * 4 + [{"question": "r", "answer": "  "}, PLAIN]
    found = made(DataSource(written(tmp_path, *rows)))
    assert (found.stats.rows_doubled, found.stats.rows_blank) == (3, 1)
    assert found.warnings == (
        "3 of 6 rows are exact doubles of an earlier row",
        "1 of 6 rows have a blank answer",
    )
    chats = [{"messages": [CHAT["messages"][0], {"role": "assistant", "content": "\n"}]}, CHAT]
    assert made(DataSource(written(tmp_path, *chats))).stats.rows_blank == 1


def test_no_question_is_on_both_sides_of_a_split_and_the_seed_decides_it() -> None:
    rows = Dataset.from_dict(
        {"question": [f"q{n % 60}" for n in range(100)], "answer": [str(n) for n in range(100)]}
    )
    train, test = split_off(rows, 0.2, seed=1)
    assert (len(train), len(test)) == (80, 20)
    assert not set(train["question"]) & set(test["question"])
    assert split_off(rows, 20, seed=1)[1]["answer"][:] == test["answer"][:]
    assert split_off(rows, 20, seed=2)[1]["answer"][:] != test["answer"][:]
    with pytest.raises(UserError, match="1 differ in what they ask: one part would be empty"):
        split_off(Dataset.from_dict({"text": ["same"] * 9}), 3, seed=1)


def test_rows_held_out_that_are_trained_too_are_counted(tmp_path: Path) -> None:
    train = made(DataSource(written(tmp_path, PLAIN, {"question": "q", "answer": "a"})))
    held_out = made(DataSource(written(tmp_path, {"question": "q", "answer": "b"}, PLAIN)))
    assert trained_too(train, held_out) == ["1 of 2 rows held out are also trained, token for token"]
    assert trained_too(train, made(DataSource(written(tmp_path, {"text": "else"})))) == []


def test_a_number_beyond_64_bits_is_named_by_its_row(tmp_path: Path) -> None:
    rows = [{"text": "a", "more": {"n": 1}}, {"text": "b", "more": {"n": [2**64, "x"]}}]
    with pytest.raises(UserError, match="a whole number of more than 64 bits") as caught:
        load_split(DataSource(written(tmp_path, *rows)))
    assert caught.value.where.endswith("line 2")
