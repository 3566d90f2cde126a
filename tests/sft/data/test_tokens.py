"""Rows become the tokens and labels that TRL's own trainer would make of them, whatever their shape."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from support.small_tokenizers import chatml, llama_like, overriding, plain
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer, pack_dataset
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from podtune.run.errors import CONFIG, UserError
from podtune.sft.data import encode
from podtune.sft.data.load import shape_of as shape_of_rows
from podtune.sft.data.rows import cut_by_packing, pack, packed_tokens
from podtune.sft.data.source import DataSource, check_source
from podtune.sft.data.tokenise import Tokenised
from podtune.sft.data.tokenise import tokenised as tokenised_from
from podtune.sft.data.tokenizer import (
    TokenizeOptions,
    check_tokenizer,
    is_plain_fast,
    load_tokenizer,
)
from podtune.sft.source.model import locate_model

QUESTIONS = [
    ("What does json.dumps() do?", "It turns an object into text."),
    ("  How is zip\tcalled?\n\n", " zip(*iterables, strict=False)  "),
    ("Grüße, naïve café 数据 😀?", "It isn't 12345 — it's \r\n\x0b\x1f fine."),
    ("What is <|im_end|> in a question?", "A token, <|im_start|> too."),
    ("x" * 300, "y"),
    ("a", "word " * 200),
    ("Dog's", ""),
]
TEXTS = [question + " " + answer for question, answer in QUESTIONS]
CHATS = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And?\n"},
        {"role": "assistant", "content": "Nothing, " + answer},
    ]
    for question, answer in QUESTIONS
]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def assistant(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


CONVERSATIONAL = {
    "prompt": [user(q) for q, _ in QUESTIONS],
    "completion": [assistant(a) for _, a in QUESTIONS],
}
ROWS: dict[str, dict[str, list[Any]]] = {
    "messages": {"messages": CHATS},
    "from and value": {
        "conversations": [[{"from": m["role"], "value": m["content"]} for m in chat] for chat in CHATS]
    },
    "prompt and completion of messages": CONVERSATIONAL,
    ("prompt and completion of text"): {
        "prompt": [q for q, _ in QUESTIONS],
        "completion": [a for _, a in QUESTIONS],
    },
    "text": {"text": TEXTS},
    "tokens": {
        "input_ids": [[1, 2, 3], [4], [5, 6, 7, 8, 9]],
        "completion_mask": [[0, 1, 1], [1], [0, 0, 1, 1, 1]],
    },
    "tokens and labels": {
        "input_ids": [[1, 2, 3], [4], [5, 6, 7, 8, 9]],
        "labels": [[-100, 2, 3], [-100], [5, 6, 7, 8, 9]],
    },
    "tokens and labels of their own": {
        "input_ids": [[1, 2, 3], [4, 5], [5, 6, 7, 8, 9]],
        "labels": [[-100, 12, 13], [-100, 4], [15, -100, 17, 8, 9]],
    },
    "conversations of another form beside text": {"conversations": CHATS, "text": TEXTS},
    "messages with tools": {
        "messages": CHATS,
        "tools": [json.dumps([{"type": "function", "function": {"name": "f"}}]), None] * 3 + [None],
        "chat_template_kwargs": [{"bos_token": "<|bos|>"}, {"bos_token": "-"}] * 3 + [{"bos_token": ""}],
    },
}
OPTIONS = {
    "defaults": {},
    "cut at the end": {"max_length": 64},
    "cut at the start": {"max_length": 64, "truncation_mode": "keep_end"},
    "whole rows": {"max_length": None},
    "every token": {"completion_only_loss": False},
    "completions": {"completion_only_loss": True},
}
TOKENIZERS = {"ChatML": chatml, "Llama-like": llama_like}


def as_trl(rows: Dataset, tokenizer: PreTrainedTokenizerFast, options: TokenizeOptions) -> Dataset:
    """TRL's own preparation, with what its constructor would have decided."""
    first = rows[0]
    completion_only = (
        "prompt" in first and "completion" in first
        if options.completion_only_loss is None
        else options.completion_only_loss
    )
    marked = not options.assistant_only_loss or has_generation_markers(tokenizer.chat_template)
    trainer = SimpleNamespace(
        _tokenizer=tokenizer,
        chat_template=None if marked else get_training_chat_template(tokenizer),
        completion_only_loss=completion_only,
    )
    config = SFTConfig(
        output_dir="unused", report_to="none", use_cpu=True, bf16=False, **dataclasses.asdict(options)
    )
    return SFTTrainer._prepare_dataset(trainer, rows, tokenizer, config, False, None, "train")


def assert_equal_to_trl(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerFast,
    options: TokenizeOptions,
    trl_rows: Dataset | None = None,
) -> None:
    expected = as_trl(rows if trl_rows is None else trl_rows, tokenizer, options)
    found = tokens_of(rows, tokenizer, options)
    assert found.column_names == ["input_ids", "labels"]
    assert found["input_ids"][:] == expected["input_ids"][:]
    assert found["labels"][:] == expected["labels"][:]


def tokenised(
    rows: Dataset, tokenizer: PreTrainedTokenizerFast, options: TokenizeOptions, **more: Any
) -> Tokenised:
    return tokenised_from(DataSource("chats.jsonl"), tokenizer, options, rows=rows, **more)


def tokens_of(rows: Dataset, tokenizer: PreTrainedTokenizerFast, options: TokenizeOptions) -> Dataset:
    return tokenised(rows, tokenizer, options).dataset


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    import datasets

    datasets.disable_progress_bars()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_tokens_and_labels_are_those_of_trl(tokenizer: str, shape: str, options: str) -> None:
    assert_equal_to_trl(
        Dataset.from_dict(ROWS[shape]), TOKENIZERS[tokenizer](), TokenizeOptions(**OPTIONS[options])
    )


@pytest.mark.parametrize("options", ["defaults", "cut at the end", "cut at the start", "every token"])
@pytest.mark.parametrize("shape", ["messages", "prompt and completion of messages", "messages with tools"])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_assistant_masks_are_those_of_trl(tokenizer: str, shape: str, options: str) -> None:
    # An empty answer has no assistant token under a template that marks only content: leave that row to its
    # own test.
    rows = Dataset.from_dict({name: values[:-1] for name, values in ROWS[shape].items()})
    assert_equal_to_trl(
        rows, TOKENIZERS[tokenizer](), TokenizeOptions(assistant_only_loss=True, **OPTIONS[options])
    )


@pytest.mark.parametrize(
    "shape", ["messages", ("prompt and completion of messages"), "prompt and completion of text", "text"]
)
def test_a_tokenizer_with_its_own_encoding_is_asked_row_by_row(shape: str) -> None:
    tokenizer = overriding()
    assert not is_plain_fast(tokenizer)
    assert_equal_to_trl(Dataset.from_dict(ROWS[shape]), tokenizer, TokenizeOptions(max_length=50))


def test_question_and_answer_are_messages_under_a_template() -> None:
    rows = Dataset.from_dict({"question": [q for q, _ in QUESTIONS], "answer": [a for _, a in QUESTIONS]})
    assert_equal_to_trl(rows, chatml(), TokenizeOptions(), Dataset.from_dict(CONVERSATIONAL))


def test_question_and_answer_are_text_with_a_line_break_between_without_a_template() -> None:
    rows = Dataset.from_dict({"question": [q for q, _ in QUESTIONS], "answer": [a for _, a in QUESTIONS]})
    as_text = Dataset.from_dict(
        {"prompt": [q + "\n" for q, _ in QUESTIONS], "completion": [a for _, a in QUESTIONS]}
    )
    assert_equal_to_trl(rows, plain(), TokenizeOptions(), as_text)


def test_rows_that_a_cut_leaves_without_a_trained_token_are_dropped_and_counted() -> None:
    rows = Dataset.from_dict({"prompt": ["a long prompt " * 10, "short"], "completion": ["answer", "answer"]})
    prepared = tokenised(rows, chatml(), TokenizeOptions(max_length=12))
    assert (prepared.stats.rows, prepared.stats.rows_kept, prepared.stats.rows_dropped) == (2, 1, 1)
    assert prepared.stats.rows_truncated >= 1
    assert any("left out" in warning for warning in prepared.stats.warnings(TokenizeOptions(max_length=12)))


def test_a_set_without_any_trained_token_is_refused() -> None:
    rows = Dataset.from_dict({"prompt": ["a long prompt " * 10], "completion": ["answer"]})
    with pytest.raises(UserError, match="no token to train") as refusal:
        tokenised(rows, chatml(), TokenizeOptions(max_length=5))
    assert "--max_length" in refusal.value.fix


def test_a_row_that_the_template_refuses_is_named() -> None:
    tokenizer = plain()
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') "
        "}}{% endif %}"
        "{{ message['content'] }}{% endfor %}"
    )
    rows = Dataset.from_dict({"messages": [user("a"), user("b"), [{"role": "tool", "content": "c"}]]})
    with pytest.raises(UserError, match=r"row 3: the chat template refuses the row: no tools here"):
        tokens_of(rows, tokenizer, TokenizeOptions())


def test_rows_of_a_stop_token_alone_train_nothing() -> None:
    prepared = tokenised(Dataset.from_dict({"text": ["some words", "", ""]}), plain(), TokenizeOptions())
    assert prepared.stats.warnings(TokenizeOptions()) == [
        "2 of 3 rows have nothing to train: they are empty, or their loss mask is",
        "1 of 3 rows are exact doubles of an earlier row",
    ]
    with pytest.raises(UserError, match="there is no token to train"):
        tokenised(Dataset.from_dict({"text": ["", ""]}), plain(), TokenizeOptions())


def test_completion_only_loss_without_completions_is_warned_of() -> None:
    rows = Dataset.from_dict({"messages": [user("a") + assistant("b")]})
    found = check_tokenizer(chatml(), TokenizeOptions(completion_only_loss=True), shape_of_rows(rows))
    assert "completion_only_loss has no effect: the rows are messages" in found[0]


def test_a_row_is_named_with_its_file() -> None:
    rows = Dataset.from_dict(
        {"messages": [user("a"), [{"role": "tool", "content": None, "tool_calls": "x"}]]}
    )
    with pytest.raises(UserError, match=r"chats.jsonl, row 2: .*\n  fix: .*--chat_template_path"):
        tokenised(rows, chatml(), TokenizeOptions())


def test_assistant_only_loss_names_the_row_without_an_assistant() -> None:
    rows = Dataset.from_dict({"messages": [user("a") + assistant("b"), user("c")]})
    with pytest.raises(
        UserError, match=("row 2: assistant_only_loss is set, and the row has no assistant token")
    ):
        tokens_of(rows, chatml(), TokenizeOptions(assistant_only_loss=True))


def test_a_prompt_that_is_not_how_the_row_starts_is_warned_of() -> None:
    stats = tokenised(Dataset.from_dict(CONVERSATIONAL), llama_like(), TokenizeOptions()).stats
    assert stats.rows_diverged == len(QUESTIONS)
    assert any("another context" in warning for warning in stats.warnings(TokenizeOptions()))


def test_packing_is_trl_s_own_and_says_what_it_cuts() -> None:
    rows = tokens_of(Dataset.from_dict(ROWS["messages"]), chatml(), TokenizeOptions(max_length=None))
    packed = pack(rows, 64, "bfd", seed=None)
    assert packed["input_ids"][:] == pack_dataset(rows, 64, "bfd")["input_ids"][:]
    assert (
        packed_tokens(packed)["tokens"]
        == sum(map(len, packed["input_ids"][:]))
        < sum(map(len, rows["input_ids"][:]))
    )
    assert "packing cuts them" in cut_by_packing(rows, 64, "bfd")[0]
    assert cut_by_packing(rows, 64, "bfd_split") == []
    assert cut_by_packing(rows, 100_000, "bfd") == []


# ---- the tokenizer ----
def shape_of(**columns: list[Any]) -> Any:
    return shape_of_rows(Dataset.from_dict(columns))


def refused(tokenizer: PreTrainedTokenizerFast, shape: Any, **options: Any) -> UserError:
    with pytest.raises(UserError) as refusal:
        encode.Encoder(tokenizer, TokenizeOptions(**options), shape)
    assert refusal.value.code == CONFIG
    return refusal.value


def test_messages_need_a_chat_template() -> None:
    error = refused(plain(), shape_of(messages=[user("a")]))
    assert "no chat template" in error.what
    assert "--chat_template_path" in error.fix


def test_text_needs_an_eos_token() -> None:
    tokenizer = plain()
    tokenizer.eos_token = None
    error = refused(tokenizer, shape_of(text=["a"]))
    assert "EOS" in error.what
    assert "--eos_token" in error.fix


def test_batches_need_a_padding_token_or_eos() -> None:
    fresh = plain()
    fresh.chat_template = chatml().chat_template
    fresh.eos_token = fresh.pad_token = None
    error = refused(fresh, shape_of(messages=[user("a")]))
    assert "padding" in error.what
    assert "--pad_token" in error.fix


def test_ids_beyond_the_embeddings_are_refused_in_rows_and_not_in_the_vocabulary() -> None:
    rows = Dataset.from_dict({"messages": [user("a")]})
    highest = tokenised(rows, chatml(), TokenizeOptions()).stats.highest_id
    assert highest + 1 < len(chatml())
    tokenised(rows, chatml(), TokenizeOptions(), vocabulary=highest + 1)
    with pytest.raises(UserError, match=rf"the id {highest}, and the model has {highest} embeddings"):
        tokenised(rows, chatml(), TokenizeOptions(), vocabulary=highest)


def test_a_tokenizer_without_padding_pads_with_its_eos_token(tmp_path: Path) -> None:
    tokenizer = plain()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(locate_model(tmp_path)).pad_token == tokenizer.eos_token


def test_a_template_is_taken_from_a_folder_with_a_tokenizer_alone(tmp_path: Path) -> None:
    plain().save_pretrained(tmp_path / "own")
    (tmp_path / "own" / "config.json").write_text("{}")
    chatml().save_pretrained(tmp_path / "donor")
    origin = locate_model(tmp_path / "own")
    loaded = load_tokenizer(origin, chat_template_path=str(tmp_path / "donor"))
    assert loaded.chat_template == chatml().chat_template


def test_assistant_only_loss_needs_messages_and_markers() -> None:
    assert "needs rows of messages" in refused(chatml(), shape_of(text=["a"]), assistant_only_loss=True).what
    unmarked = plain()
    unmarked.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert (
        "{% generation %}" in refused(unmarked, shape_of(messages=[user("a")]), assistant_only_loss=True).what
    )


# ---- rows of JSON ----
TOOLS_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message | tojson }}<|im_end|>{% endfor %}"
    "{{ tools | tojson if tools else '' }}{{ 'think' if enable_thinking is undefined else enable_thinking }}"
)


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"properties": parameters}}}


JSON_ROWS = {
    "tools with other parameters": [{"tools": [tool(a={"x": 1})]}, {"tools": [tool(b={"y": 2}, c={})]}],
    "a default of two types": [{"tools": [tool(x={"default": 1})]}, {"tools": [tool(x={"default": "a"})]}],
    "whole numbers beside others": [{"tools": [tool(x={"v": 1})]}, {"tools": [tool(x={"v": 1.5})]}],
    "template arguments in some rows": [
        {"chat_template_kwargs": {}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    "template arguments of mixed types": [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"enable_thinking": "no"}},
    ],
    "calls with arguments of mixed types": [
        {"messages": [*user("a"), {"role": "assistant", "content": "", "tool_calls": [{"v": 1}]}]},
        {"messages": [*user("a"), {"role": "assistant", "content": "", "tool_calls": [{"v": "x"}]}]},
    ],
}


@pytest.mark.parametrize("loader", ["jsonl", "parquet", "saved"])
@pytest.mark.parametrize("case", JSON_ROWS)
def test_rows_of_json_reach_the_template_as_they_are(case: str, loader: str, tmp_path: Path) -> None:
    rows = [{"messages": user("a") + assistant("b"), **row} for row in JSON_ROWS[case]]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if loader != "jsonl":  # as the datasets library writes them
        if case == "whole numbers beside others":
            pytest.skip("the library has made them 1.0 when it wrote the file")
        from datasets import load_dataset

        library = load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
        path = tmp_path / ("rows.parquet" if loader == "parquet" else "rows")
        library.to_parquet(str(path)) if loader == "parquet" else library.save_to_disk(str(path))
    tokenizer = plain()
    tokenizer.chat_template = TOOLS_TEMPLATE
    source = DataSource(str(path))
    check_source(source)
    tokens = tokenised_from(source, tokenizer, TokenizeOptions(max_length=None)).dataset
    expected = [
        tokenizer.apply_chat_template(
            row["messages"], tools=row.get("tools"), tokenize=False, **row.get("chat_template_kwargs", {})
        )
        for row in rows
    ]
    assert [tokenizer.decode(ids) for ids in tokens["input_ids"]] == expected


# ---- the cache ----
def test_a_second_preparation_maps_the_first_one_s_file(tmp_path: Path) -> None:
    rows = Dataset.from_dict(ROWS["messages"])
    first = tokenised(rows, chatml(), TokenizeOptions(), cache_dir=tmp_path)
    second = tokenised(rows, chatml(), TokenizeOptions(), cache_dir=tmp_path)
    assert first.templated is second.templated is True
    assert tokenised(Dataset.from_dict(ROWS["text"]), chatml(), TokenizeOptions()).templated is False
    assert (first.from_cache, second.from_cache) == (False, True)
    assert first.path == second.path
    assert first.stats == second.stats
    assert (
        first.dataset["labels"][:]
        == second.dataset["labels"][:]
        == tokens_of(rows, chatml(), TokenizeOptions())["labels"][:]
    )


def test_other_rows_options_or_tokenizers_are_other_entries(tmp_path: Path) -> None:
    rows = Dataset.from_dict(ROWS["messages"])
    changed = chatml().chat_template.replace("user", "person") + " "
    other = plain()
    other.chat_template = changed
    paths = {
        tokenised(some, tokenizer, options, cache_dir=tmp_path).path
        for some, tokenizer, options in [
            (rows, chatml(), TokenizeOptions()),
            (rows.select(range(3)), chatml(), TokenizeOptions()),
            (rows, chatml(), TokenizeOptions(max_length=99)),
            (rows, llama_like(), TokenizeOptions()),
            (rows, other, TokenizeOptions()),
        ]
    }
    assert len(paths) == 5


def test_a_damaged_entry_is_made_again(tmp_path: Path) -> None:
    rows = Dataset.from_dict(ROWS["text"])
    path = tokenised(rows, chatml(), TokenizeOptions(), cache_dir=tmp_path).path
    assert path is not None
    path.write_bytes(path.read_bytes()[:-10])
    again = tokenised(rows, chatml(), TokenizeOptions(), cache_dir=tmp_path)
    assert not again.from_cache
    assert again.dataset["input_ids"][:] == tokens_of(rows, chatml(), TokenizeOptions())["input_ids"][:]


def test_the_fingerprint_is_of_the_content_not_of_the_file(tmp_path: Path) -> None:
    rows = Dataset.from_dict(ROWS["messages"] | {"n": list(range(7))})
    rows.to_parquet(str(tmp_path / "a.parquet"), batch_size=2)
    rows.to_json(str(tmp_path / "b.jsonl"))
    rows.save_to_disk(str(tmp_path / "saved"), num_shards=3)

    def fingerprint(source: DataSource, rows: Dataset | None = None) -> str:
        return tokenised_from(source, chatml(), TokenizeOptions(), rows=rows).stats.fingerprint

    names = ("a.parquet", "b.jsonl", "saved")
    same = {fingerprint(DataSource(str(tmp_path / name))) for name in names}
    assert same == {fingerprint(DataSource("rows"), rows)}
    assert fingerprint(DataSource("rows"), rows.select([1, 0, 2, 3, 4, 5, 6])) not in same
