"""Answering a file survives a kill, and what a person types at podtune generate is answered."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from podtune.commands import generate as command
from podtune.run.errors import CANNOT_CREATE, DATA, NO_INPUT, USAGE, UserError
from podtune.sft.generate.answer_file import Item, answer_file, read_prompts
from podtune.sft.model.build import build_model

QUESTIONS = [f"What is {'very ' * (number % 5)}number {number}?" for number in range(12)]

# Answers a file in batches of two; says when it is in its third batch, and then waits to be killed.
KILLED = """
import sys
from pathlib import Path
from podtune.sft.generate.answer_file import answer_file, read_prompts

def answerer(prompts, number):
    if number == 2:
        print("third batch", flush=True)
        sys.stdin.read()
    return [{"answer": prompt[0]["content"].upper()} for prompt in prompts]

source, output = map(Path, sys.argv[1:])
settings = {"models": ["m"]}
prompts = read_prompts(source)
answer_file(prompts, output, answerer, settings=settings, batch_size=2, progress=lambda done: None)
"""


def shout(prompts: Sequence[Any], number: int) -> list[dict[str, str]]:
    return [{"answer": prompt[0]["content"].upper()} for prompt in prompts]


def answer(items: list[Item], output: Path, settings: dict[str, Any], answerer: Any = shout) -> int:
    return answer_file(items, output, answerer, settings=settings, batch_size=2, progress=lambda done: None)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.txt"
    path.write_text("\n".join(QUESTIONS) + "\n")
    return path


@pytest.fixture
def killed(questions: Path, tmp_path: Path) -> Path:
    """The output path of a run that was killed in its third batch."""
    output = tmp_path / "answers.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(questions), str(output)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "third batch\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=30) == -signal.SIGKILL
    return output


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    rows = "".join(json.dumps({"question": text, "answer": "A number."}) + "\n" for text in QUESTIONS)
    (folder / "rows.jsonl").write_text(rows)
    build_model("micro", folder / "rows.jsonl", folder / "micro")
    return folder / "micro"


# ---- files ----
@pytest.mark.parametrize("torn", ["", '{"row": 11, "prom'])
def test_a_killed_run_goes_on_where_it_stopped(killed: Path, questions: Path, torn: str) -> None:
    journal = killed.with_name(f".{killed.name}.journal")
    assert not killed.exists()
    assert len(rows_of(journal)) == 1 + 4  # the settings, and two batches of two
    with journal.open("a") as file:
        file.write(torn)
    asked: list[str] = []

    def remember(prompts: Sequence[Any], number: int) -> list[dict[str, str]]:
        asked.extend(prompt[0]["content"] for prompt in prompts)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return shout(prompts, number)

    with pytest.raises(KeyboardInterrupt):  # interrupted again, in its second batch
        answer(read_prompts(questions), killed, {"models": ["m"]}, remember)
    assert answer(read_prompts(questions), killed, {"models": ["m"]}, remember) == 6
    assert len(asked) == 4 + 6
    assert [row["answer"] for row in rows_of(killed)] == [text.upper() for text in QUESTIONS]
    assert not journal.exists()


def test_an_interrupted_run_is_not_mixed_with_other_settings(killed: Path, questions: Path) -> None:
    with pytest.raises(UserError, match=r"other settings.*models") as caught:
        answer(read_prompts(questions), killed, {"models": ["another"]})
    assert caught.value.code == USAGE
    with pytest.raises(UserError, match="different: prompts"):
        answer(read_prompts(questions)[1:], killed, {"models": ["m"]})


def test_an_output_that_exists_or_has_an_unknown_name_is_refused(questions: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists already") as caught:
        answer(read_prompts(questions), write(tmp_path / "there.jsonl", ""), {})
    assert caught.value.code == CANNOT_CREATE
    with pytest.raises(UserError, match="unknown kind of output"):
        answer(read_prompts(questions), tmp_path / "answers.xls", {})


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


def test_sampled_answers_to_a_file_are_the_same_with_and_without_an_interruption(
    micro: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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

    whole = pq.read_table(run("whole.parquet")).to_pylist()
    with monkeypatch.context() as patch:
        patch.setattr(command, "progress_line", lambda total: stop_after_one_batch)
        with pytest.raises(KeyboardInterrupt):
            run("again.parquet")
    assert pq.read_table(run("again.parquet")).to_pylist() == whole
    assert [row["row"] for row in whole] == list(range(12))
    assert whole[0]["answer"] == whole[0]["answer_against"] != ""  # the same model with the same seed
    assert len({row["answer"] for row in whole}) > 6


def stop_after_one_batch(done: int) -> None:
    raise KeyboardInterrupt


# ---- one prompt, a chat ----
def test_one_prompt_prints_one_answer_and_two_models_two_columns(
    micro: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.generate(str(micro), prompt="What is number 3?", max_new_tokens=24, temperature=1.0, seed=5)
    first = capsys.readouterr().out
    command.generate(str(micro), prompt="What is number 3?", max_new_tokens=24, temperature=1.0, seed=5)
    assert capsys.readouterr().out == first
    assert first.strip()
    command.generate(str(micro), prompt="What is number 3?", against=str(micro), max_new_tokens=24)
    assert "│" in capsys.readouterr().out


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
