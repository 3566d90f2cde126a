"""A file is answered row by row, and what a person types at podtune generate is answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from podtune.commands import generate as command
from podtune.run.errors import CANNOT_CREATE, DATA, NO_INPUT, USAGE, UserError
from podtune.sft.generate.answer_file import check_output, read_prompts
from podtune.sft.model.build import build_model

QUESTIONS = [f"What is {'very ' * (number % 5)}number {number}?" for number in range(12)]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.txt"
    path.write_text("\n".join(QUESTIONS) + "\n")
    return path


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    rows = "".join(json.dumps({"question": text, "answer": "A number."}) + "\n" for text in QUESTIONS)
    (folder / "rows.jsonl").write_text(rows)
    build_model("micro", folder / "rows.jsonl", folder / "micro")
    return folder / "micro"


# ---- files ----
def test_an_output_that_exists_or_has_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists already") as caught:
        check_output(write(tmp_path / "there.jsonl", ""))
    assert caught.value.code == CANNOT_CREATE
    with pytest.raises(UserError, match="unknown kind of output"):
        check_output(tmp_path / "answers.xls")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_prompts_come_from_every_shape_and_the_first_bad_row_is_named(tmp_path: Path) -> None:
    found = read_prompts(
        write(
            tmp_path / "rows.jsonl",
            ('{"question": "q", "answer": "a"}\n{"text": "go on"}\n{"prompt": "p"}\n'),
        )
    )
    assert [(item.prompt, item.reference) for item in found] == [
        ([{"role": "user", "content": "q"}], "a"),
        ("go on", None),
        ("p", None),
    ]
    with pytest.raises(UserError, match="no prompt") as caught:
        read_prompts(
            write(
                tmp_path / "bad.jsonl",
                ('{"question": "q"}\n{"messages": [{"role": "assistant", "content": "a"}]}\n'),
            )
        )
    assert (caught.value.code, caught.value.where) == (DATA, f"{tmp_path / 'bad.jsonl'}, row 2")
    with pytest.raises(UserError, match="no prompt"):
        read_prompts(write(tmp_path / "empty.txt", "\n\n"))


def test_sampled_answers_to_a_file_are_the_same_each_time(
    micro: Path, questions: Path, tmp_path: Path
) -> None:
    def run(name: str) -> Path:
        command.generate(
            str(micro),
            input=questions,
            output=tmp_path / name,
            against=str(micro),
            temperature=1.0,
            max_new_tokens=24,
            batch_size=5,
        )
        return tmp_path / name

    found = pq.read_table(run("answers.parquet")).to_pylist()
    assert rows_of(run("answers.jsonl")) == found
    assert [row["row"] for row in found] == list(range(12))
    assert [row["prompt"] for row in found] == QUESTIONS
    assert found[0]["answer"] == found[0]["answer_against"] != ""  # the same model with the same seed
    assert len({row["answer"] for row in found}) > 6


def test_answers_to_rows_with_references_are_counted_as_right(
    micro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(rows: list[dict[str, str]], name: str) -> list[dict[str, str]]:
        source = write(tmp_path / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        output = tmp_path / f"{name}-answers.jsonl"
        command.generate(str(micro), input=source, output=output, max_new_tokens=24)
        return rows_of(output)

    (answered,) = ask([{"question": "q", "answer": "no model says this"}], "first")
    assert f"{micro}: 0.0% of 1 exactly right" in capsys.readouterr().out
    rows = [{"question": "q", "answer": answered["answer"]}, {"question": "q", "answer": "nor this"}]
    ask(rows, "second")
    assert f"{micro}: 50.0% of 2 exactly right" in capsys.readouterr().out


# ---- one prompt, a chat ----
def test_one_prompt_prints_one_answer_and_of_two_models_each_under_its_name(
    micro: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.generate(str(micro), prompt="What is number 3?", max_new_tokens=24, temperature=1.0, seed=5)
    first = capsys.readouterr().out
    command.generate(str(micro), prompt="What is number 3?", max_new_tokens=24, temperature=1.0, seed=5)
    assert capsys.readouterr().out == first
    assert first.strip()
    command.generate(str(micro), prompt="What is number 3?", against=str(micro), max_new_tokens=24)
    assert capsys.readouterr().out.count(f"{micro}:\n") == 2


def test_a_chat_remembers_what_was_said_until_it_starts_again(
    micro: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["one", "two", "/new", "three"])
    asked: list[list[str]] = []

    def type_line(_: str = "") -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    def listen(model: Any, tokenizer: Any, messages: list[dict[str, str]], *_: Any) -> str:
        asked.append([turn["content"] for turn in messages])
        return "heard"

    monkeypatch.setattr("builtins.input", type_line)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(command, "ask", listen)
    command.generate(str(micro), system="be brief")
    assert asked == [["be brief", "one"], ["be brief", "one", "heard", "two"], ["be brief", "three"]]


def test_flags_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    for flags in (
        {"input": tmp_path},
        {"output": tmp_path},
        {"input": tmp_path, "output": tmp_path, "prompt": "p"},
    ):
        with pytest.raises(UserError) as caught:
            command.generate("model", **flags)  # type: ignore[arg-type]
        assert caught.value.code == USAGE


def test_an_answer_longer_than_the_context_is_refused(micro: Path) -> None:
    with pytest.raises(UserError, match="no room for a prompt"):
        command.generate(str(micro), prompt="p", max_new_tokens=2048)


def test_a_run_means_its_final_model_or_says_which_checkpoint_there_is(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    assert command.resolve_run(str(tmp_path)) == str(tmp_path / "final")
    (tmp_path / "final").rmdir()
    assert command.resolve_run(str(tmp_path)) == str(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    for step in (5, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    with pytest.raises(UserError, match="no final model") as caught:
        command.resolve_run(str(tmp_path))
    assert caught.value.code == NO_INPUT
    assert "checkpoint-10" in caught.value.fix
