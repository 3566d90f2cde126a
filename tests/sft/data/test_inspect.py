"""podtune data inspect shows the rows that training would get; podtune data prepare leaves them where
training finds them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.small_tokenizers import chatml
from transformers import SmolLM3Config
from typer.testing import CliRunner

from podtune.commands.data import app
from podtune.run.errors import UserError
from podtune.sft.data import inspect
from podtune.sft.data.source import DataSource
from podtune.sft.data.tokenise import Tokenised, tokenised
from podtune.sft.data.tokenizer import TokenizeOptions, load_tokenizer
from podtune.sft.source.model import locate_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a configuration: inspecting reads no weights."""
    folder = tmp_path_factory.mktemp("model")
    chatml().save_pretrained(folder)
    SmolLM3Config(
        vocab_size=len(chatml()), hidden_size=8, num_hidden_layers=1, pad_token_id=0
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    content = [
        {"question": f"What is {n} times two?", "answer": f"It is {2 * n}. " * (n % 7 + 1)} for n in range(50)
    ]
    content.append({"question": "long " * 200, "answer": "cut off"})
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def from_file(path: Path, max_length: int) -> Tokenised:
    source = DataSource(str(path))
    return tokenised(source, chatml(), TokenizeOptions(max_length=max_length))


def report(*arguments: Any) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments), "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_report_counts_what_training_gets(model: Path, rows: Path) -> None:
    found = report("--data", rows, "--model", model, "--max-length", 128)
    prepared = from_file(rows, 128)
    labels = prepared.dataset["labels"][:]
    assert found["rows"] == 51
    assert found["tokens"] == sum(map(len, labels))
    assert found["trained_tokens"] == sum(label != -100 for row in labels for label in row)
    assert found["truncated"] == {
        "rows": 1,
        "share": round(1 / 51, 4),
        "tokens_cut": prepared.stats.cut_tokens,
        "policy": "keep_start",
    }
    assert found["empty_mask"] == {"dropped_rows": 1, "kept_rows": 0}
    lengths = sorted(map(len, labels))
    assert (found["length"]["min"], found["length"]["max"]) == (lengths[0], lengths[-1])
    assert found["fingerprint"] == prepared.stats.fingerprint
    assert any("left out" in warning for warning in found["warnings"])


def test_the_marked_rows_join_to_the_row_and_mark_the_answer(model: Path, rows: Path) -> None:
    found = report("--data", rows, "--model", model)
    first = found["examples"][0]
    assert "".join(segment["text"] for segment in first).startswith(
        "<|im_start|>user\nWhat is 0 times two?<|im_end|>"
    )
    assert [segment["text"] for segment in first if segment["trained"]] == ["It is 0. <|im_end|>\n"]
    assert len(found["examples"]) == 3


def test_the_stop_token_is_found_trained_or_not(model: Path, rows: Path, tmp_path: Path) -> None:
    assert report("--data", rows, "--model", model, "--max-length", 2000)["stop_token"] == {
        "tokens": ["<|im_end|>"],
        "rows": 51,
        "share": 1.0,
    }
    template = tmp_path / "endless.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}\n{% endfor %}")
    found = report("--data", rows, "--model", model, "--chat-template-path", template)
    assert found["stop_token"]["share"] == 0
    assert any("may not learn to stop" in warning for warning in found["warnings"])


def test_a_terminal_gets_colour_and_a_file_gets_brackets(model: Path, rows: Path) -> None:
    plain = (
        CliRunner()
        .invoke(app, ["inspect", "--data", str(rows), "--model", str(model)], catch_exceptions=False)
        .stdout
    )
    assert "[[It is 0. <|im_end|>\n]]" in plain
    assert "\x1b[" not in plain
    shown = inspect.inspect(DataSource(str(rows)), chatml(), TokenizeOptions())
    assert "\x1b[32mIt is 0. <|im_end|>" in shown.text(colour=True)


def test_a_folder_s_training_split_is_shown_unless_asked_otherwise(model: Path, tmp_path: Path) -> None:
    for name, content in [("train", "a"), ("eval", "b")]:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": content}) + "\n")
    assert "a" in report("--data", tmp_path, "--model", model)["examples"][0][0]["text"]
    assert "b" in report("--data", tmp_path, "--model", model, "--split", "eval")["examples"][0][0]["text"]


def test_prepared_rows_are_found_by_training_s_own_call(model: Path, rows: Path, tmp_path: Path) -> None:
    arguments = [
        "prepare",
        "--data",
        str(rows),
        "--model",
        str(model),
        "--output",
        str(tmp_path),
        "--max-length",
        "128",
        "--json",
    ]
    first = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout)
    again = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout)
    assert [entry["from_cache"] for entry in first + again] == [False, True]
    source = DataSource(str(rows))
    tokenizer = load_tokenizer(locate_model(model))
    found = tokenised(source, tokenizer, TokenizeOptions(max_length=128), cache_dir=tmp_path)
    assert found.from_cache
    assert str(found.path) == first[0]["path"]


def test_a_training_yaml_says_what_is_inspected_and_prepared(model: Path, rows: Path, tmp_path: Path) -> None:
    config = tmp_path / "sft.yaml"
    config.write_text(
        f"model_name_or_path: {model}\ndataset_name: {rows}\noutput_dir: {tmp_path / 'run'}\n"
        "max_length: 128\nper_device_train_batch_size: 4\nlearning_rate: 1e-4\n"
    )
    assert report("--config", config) == report(
        *("--data", rows, "--model", model, "--max-length", 128, "--per_device_train_batch_size", 4)
    )
    packed = report("--config", config, "--packing", "--max_length", 200)
    assert (packed["max_length"], packed["truncated"]["rows"]) == (None, 0)
    words = ["prepare", "--config", str(config), "--output", str(tmp_path / "cache"), "--json"]
    entry = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)[0]
    assert entry["rows_truncated"] == 1
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="unknown key 'max_lenght'"):
        report("--config", config, "--max_lenght", 3)


def test_ids_beyond_the_model_are_refused(model: Path, rows: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    chatml().save_pretrained(small)
    SmolLM3Config(vocab_size=100, hidden_size=8, num_hidden_layers=1, pad_token_id=0).save_pretrained(small)
    with pytest.raises(UserError, match="the model has 100 embeddings"):
        CliRunner().invoke(
            app, ["inspect", "--data", str(rows), "--model", str(small)], catch_exceptions=False
        )
