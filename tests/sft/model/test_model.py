"""Building, loading, refusing, counting and scoring models. One micro model serves all."""

from __future__ import annotations

import hashlib
import http.server
import json
import pickle
import shutil
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import Bomb
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from podtune.commands.model import app
from podtune.run.errors import (
    CANNOT_CREATE,
    CONFIG,
    DATA,
    NO_INPUT,
    NO_PERMISSION,
    USAGE,
    UserError,
)
from podtune.sft.data.tokenizer import load_tokenizer
from podtune.sft.generate.evaluate import Question, answers_to, compare_with_base, loss_of, normalised
from podtune.sft.model import template
from podtune.sft.model.build import build_model
from podtune.sft.model.flops import flops_per_token, parameter_count
from podtune.sft.model.info import model_info
from podtune.sft.model.load import load_model
from podtune.sft.model.merge import merge_adapter
from podtune.sft.source.model import load_config, locate_model

FACTS = [
    ("red and yellow", "Orange."),
    ("blue and yellow", "Green!"),
    ("red and blue", "Violet, é."),
    ("black, white and more red than anybody would think of", "A kind of brown"),
]
ROWS = [{"question": f"What do {colours} make?", "answer": answer} for colours, answer in FACTS]


def write_rows(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS * 8), encoding="utf-8")
    return path


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_model("micro", write_rows(folder / "rows.jsonl"), folder / "micro")
    return folder / "micro"


@pytest.fixture(scope="module")
def tuned(micro: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The micro model after it has learned ROWS by heart, from the tokens that the template marks and no
    others.
    """
    tokenizer, model = load_tokenizer(locate_model(micro)), load_model(locate_model(micro))
    conversations = [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        for row in ROWS
    ]
    found = tokenizer.apply_chat_template(
        conversations, return_dict=True, return_assistant_tokens_mask=True, padding=True, return_tensors="pt"
    )
    labels = found["input_ids"].masked_fill(torch.as_tensor(found["assistant_masks"]) == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(300):
        loss = model(input_ids=found["input_ids"], attention_mask=found["attention_mask"], labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.02:
            break
    folder = tmp_path_factory.mktemp("tuned") / "final"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def copy_of(model: Path, folder: Path, **config: Any) -> Path:
    """A copy of a model folder with keys of its config.json changed."""
    shutil.copytree(model, folder)
    content = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(content))
    return folder


# ---- building ----
def test_the_same_data_gives_the_same_bytes_and_a_second_build_changes_nothing(
    micro: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "rows.jsonl")
    build_model("micro", data, tmp_path / "again")
    assert digests(tmp_path / "again") == digests(micro)
    left = (tmp_path / "again").stat().st_ino
    build_model("micro", data, tmp_path / "again")
    assert (tmp_path / "again").stat().st_ino == left


def test_another_seed_gives_other_weights_and_replaces_the_earlier_build(micro: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl")
    for seed in (0, 1):
        build_model("micro", data, tmp_path / "model", seed=seed)
    found, expected = digests(tmp_path / "model"), digests(micro)
    assert found["model.safetensors"] != expected["model.safetensors"]
    assert found["tokenizer.json"] == expected["tokenizer.json"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_sizes_are_what_the_documents_say(micro: Path) -> None:
    from transformers import SmolLM3ForCausalLM

    from podtune.sft.model.build import SIZES, model_config

    assert parameter_count(load_config(locate_model(micro))).total < 1_000_000
    with torch.device("meta"):
        tiny = SmolLM3ForCausalLM(model_config(SIZES["tiny"], load_tokenizer(locate_model(micro))))
    assert 6.5e6 < tiny.num_parameters() < 7.5e6
    assert all(
        shape.vocab_size % 64 == 0 and shape.hidden_size // shape.num_attention_heads >= 32
        for shape in SIZES.values()
    )


def test_the_tokenizer_keeps_every_text_and_its_ids_fit_the_embedding(micro: Path) -> None:
    tokenizer = load_tokenizer(locate_model(micro))
    text = "  naïve\t日本語 🙂 \n\n x=1;\x00"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) <= 1024


def test_the_words_of_the_template_which_stand_in_every_row_are_a_token_each(micro: Path) -> None:
    tokenizer = load_tokenizer(locate_model(micro))
    assert tokenizer.tokenize("user") == ["user"]
    assert tokenizer.tokenize("assistant") == ["assistant"]


def test_padding_end_and_start_are_the_same_in_tokenizer_model_and_generation(micro: Path) -> None:
    tokenizer, model = load_tokenizer(locate_model(micro)), load_model(locate_model(micro))
    assert tokenizer.eos_token == template.TURN_END
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (
            tokenizer.eos_token_id,
            tokenizer.pad_token_id,
            None,
        )
    assert not model.generation_config.do_sample


def test_a_folder_that_holds_something_else_is_never_replaced(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match="not made by this command") as caught:
        build_model("micro", data, tmp_path)
    assert caught.value.code == CANNOT_CREATE
    assert data.exists()


def test_build_answers_bad_data_and_sizes(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"other": 1}\n')
    with pytest.raises(UserError, match="no text") as no_text:
        build_model("micro", tmp_path / "empty.jsonl", tmp_path / "out")
    with pytest.raises(UserError, match="unknown size") as size:
        build_model("huge", tmp_path, tmp_path / "out")
    with pytest.raises(UserError) as missing:
        build_model("micro", tmp_path / "absent", tmp_path / "out")
    assert (no_text.value.code, size.value.code, missing.value.code) == (DATA, USAGE, NO_INPUT)
    assert not (tmp_path / "out").exists()


# ---- the template ----
def test_the_template_marks_answers_with_their_stop_token_and_nothing_else(micro: Path) -> None:
    tokenizer = load_tokenizer(locate_model(micro))
    turns = [
        {"role": role, "content": text}
        for role, text in (
            ("system", "s"),
            ("user", "q"),
            ("assistant", "a b"),
            ("user", "r"),
            ("assistant", "c"),
        )
    ]
    found = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    marked = [
        token for token, trained in zip(found["input_ids"], found["assistant_masks"], strict=True) if trained
    ]
    assert tokenizer.decode(marked) == "a b<|im_end|>c<|im_end|>"
    assert tokenizer.decode(found["input_ids"]) == "".join(
        f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns
    )


def test_trl_agrees_that_the_template_trains_the_stop_token_and_keeps_prefixes(micro: Path) -> None:
    from trl.chat_template_utils import (
        is_chat_template_prefix_preserving,
        is_chat_template_stop_token_trained,
    )

    tokenizer = load_tokenizer(locate_model(micro))
    assert is_chat_template_stop_token_trained(tokenizer)
    assert is_chat_template_prefix_preserving(tokenizer)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q", "answer": "the answer"},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "the answer"}]},
        {"conversations": [{"from": "user", "value": "q"}, {"from": "assistant", "value": "the answer"}]},
        {
            "prompt": [{"role": "user", "content": "q"}],
            "completion": [{"role": "assistant", "content": "the answer"}],
        },
        {"prompt": "q\n", "completion": "the answer"},
    ],
)
def test_every_shape_scores_the_answer_and_its_stop_token(micro: Path, row: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(locate_model(micro))
    prompt, reference = template.prompt_and_answer(row)
    assert reference == "the answer"
    ids, scored = template.scored_ids(tokenizer, prompt, reference)
    assert (
        tokenizer.decode([token for token, counts in zip(ids, scored, strict=True) if counts])
        == "the answer<|im_end|>"
    )


def test_plain_text_is_scored_whole_and_unknown_columns_are_named(micro: Path) -> None:
    tokenizer = load_tokenizer(locate_model(micro))
    ids, scored = template.scored_ids(tokenizer, *template.prompt_and_answer({"text": "just text"}))  # type: ignore[arg-type]
    assert all(scored)
    assert tokenizer.decode(ids) == "just text<|im_end|>"
    with pytest.raises(UserError, match="colour, size"):
        template.prompt_and_answer({"size": 1, "colour": "red"})


# ---- answers and scores ----
def test_a_model_trained_on_the_marked_tokens_answers_and_stops(tuned: Path) -> None:
    tokenizer, model = load_tokenizer(locate_model(tuned)), load_model(locate_model(tuned))
    questions = [Question.of(row) for row in ROWS]
    assert answers_to(model, tokenizer, questions, 4, 40) == [row["answer"] for row in ROWS]


def test_scores_tell_the_tuned_model_from_its_base(micro: Path, tuned: Path) -> None:
    tokenizer = load_tokenizer(locate_model(micro))
    found = compare_with_base(locate_model(micro), tuned, tokenizer, ROWS, max_new_tokens=40, batch_size=3)
    record = found.to_json()
    assert (record["base"]["exact_match"], record["tuned"]["exact_match"]) == (0.0, 1.0)
    assert record["tuned"]["perplexity"] < 1.2 < 500 < record["base"]["perplexity"]
    assert record["samples"][1] == {
        "prompt": ROWS[1]["question"],
        "reference": "Green!",
        "base": found.samples[1]["base"],
        "tuned": "Green!",
    }


def test_the_loss_does_not_depend_on_batches_or_padding(micro: Path) -> None:
    tokenizer, model = load_tokenizer(locate_model(micro)), load_model(locate_model(micro))
    questions = [Question.of(row) for row in ROWS]
    losses = [loss_of(model, tokenizer, questions, size)["loss"] for size in (1, 4)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_an_exact_match_forgives_case_punctuation_and_articles() -> None:
    assert normalised("The  Cat, sat!") == normalised("a cat sat")
    assert normalised("cat") != normalised("cats")


# ---- counting ----
def test_counted_flops_equal_the_formula(micro: Path) -> None:
    model = load_model(locate_model(micro), attn_implementation="eager")
    config = model.config
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, 128, dtype=torch.long), use_cache=False).logits.sum().backward()
    assert counter.get_total_flops() / 128 == pytest.approx(flops_per_token(config, 128), rel=0.01)
    assert flops_per_token(config, 128, trained_share=0.0) < flops_per_token(config, 128)


def test_untied_embeddings_and_idle_experts_are_not_multiplied() -> None:
    from transformers import LlamaConfig, Qwen3MoeConfig

    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 128,
    }
    llama = parameter_count(LlamaConfig(intermediate_size=64, tie_word_embeddings=False, **sizes))
    assert llama.total - llama.multiplied == llama.total - llama.non_embedding == 128 * 64
    experts = Qwen3MoeConfig(
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        head_dim=32,
        tie_word_embeddings=True,
        **sizes,
    )
    found = parameter_count(experts)
    # layers, idle experts, three matrices of hidden by inner size
    assert found.total - found.multiplied == 2 * 6 * 3 * 64 * 32


def test_info_prints_what_the_weights_add_up_to(micro: Path) -> None:
    result = CliRunner().invoke(app, ["info", str(micro), "--json", "--sequence-length", "256"])
    found = json.loads(result.stdout)
    assert found == json.loads(json.dumps(asdict(model_info(micro, sequence_length=256))))
    assert found["parameters"]["total"] == sum(
        weight.numel() for weight in load_file(micro / "model.safetensors").values()
    )
    assert found["tokenizer"]["stop_token_trained"] is True


# ---- refusals ----
def test_weights_in_pickle_files_are_refused_and_nothing_in_them_runs(micro: Path, tmp_path: Path) -> None:
    folder = copy_of(micro, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(UserError, match="pickle"):
        load_model(locate_model(folder))
    assert not (tmp_path / "exploded").exists()


def test_code_in_the_model_folder_is_refused_and_does_not_run(micro: Path, tmp_path: Path) -> None:
    folder = copy_of(
        micro,
        tmp_path / "model",
        model_type="own",
        auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},
    )
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    with pytest.raises(UserError, match="trust_remote_code") as caught:
        load_model(locate_model(folder))
    assert caught.value.code == CONFIG
    assert not (tmp_path / "ran").exists()


def test_incomplete_and_torn_weights_are_refused(micro: Path, tmp_path: Path) -> None:
    folder = copy_of(micro, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    removed = weights.pop("model.layers.1.mlp.up_proj.weight")
    assert removed.numel()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack 1 tensors .*layers\.1\.mlp\.up_proj"):
        load_model(locate_model(folder))
    whole = (micro / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cannot be loaded"):
        load_model(locate_model(folder))


def test_what_is_no_model_is_said_so(tmp_path: Path) -> None:
    for name, words in ((tmp_path / "absent", "no such folder"), (tmp_path, "no config.json")):
        with pytest.raises(UserError, match=words) as caught:
            load_tokenizer(locate_model(name))
        assert caught.value.code == NO_INPUT
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="no such folder"):
        load_model(locate_model(tmp_path / "file"))


def test_a_name_that_is_as_likely_a_path_is_called_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"runs/nope: no such folder; as a hub id"):
        locate_model("runs/nope")
    with pytest.raises(UserError, match="neither a local path nor in the cache"):
        locate_model("owner/nope")


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one model, which is gated."""

    def do_GET(self) -> None:
        gated = self.path.endswith("/auth-check")
        self.send_response(403 if gated else 200)
        if gated:
            self.send_header("X-Error-Code", "GatedRepo")
        body = (
            b"{}"
            if gated
            else json.dumps(
                {"id": "some/model", "gated": "auto", "siblings": [{"rfilename": "config.json"}]}
            ).encode()
        )
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    from huggingface_hub import constants

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield endpoint
    server.shutdown()


def test_a_gated_model_without_a_token_says_what_to_do(hub: str) -> None:
    with pytest.raises(UserError, match="gated and HF_TOKEN is not set") as caught:
        locate_model("some/model")
    assert caught.value.code == NO_PERMISSION


@pytest.mark.parametrize("chat_template", ["{{ ''.__class__.__mro__ }}", "{{ range(10 ** 9) | list }}"])
def test_a_hostile_chat_template_is_a_sentence(micro: Path, chat_template: str) -> None:
    tokenizer = load_tokenizer(locate_model(micro))
    tokenizer.chat_template = chat_template
    for ask in (
        lambda: template.prompt_ids(tokenizer, [{"role": "user", "content": "a"}]),
        lambda: template.scored_ids(tokenizer, [{"role": "user", "content": "a"}], "b"),
    ):
        with pytest.raises(UserError, match="the chat template fails") as caught:
            ask()
        assert caught.value.code == DATA


# ---- adapters ----
@pytest.fixture(scope="module")
def adapter(tuned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter on the tuned model whose weights are not zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(
        load_model(locate_model(tuned)),
        LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False),
    )
    model.peft_config["default"].base_model_name_or_path = str(tuned)
    folder = tmp_path_factory.mktemp("adapter") / "final"
    model.save_pretrained(folder)
    return folder


def test_a_merged_adapter_gives_the_logits_of_adapter_and_base(adapter: Path, tmp_path: Path) -> None:
    merge_adapter(adapter, tmp_path / "merged")
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= {
        path.name for path in (tmp_path / "merged").iterdir()
    }
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    ids = load_tokenizer(locate_model(tmp_path / "merged"))("What do red and blue make?", return_tensors="pt")
    with torch.inference_mode():
        logits = [load_model(locate_model(name))(**ids).logits for name in (adapter, tmp_path / "merged")]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_a_merge_that_went_wrong_leaves_nothing(adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(adapter, tmp_path / "adapter")
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    broken = {name: torch.full_like(weight, float("nan")) for name, weight in weights.items()}
    save_file(broken, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(UserError, match="cannot be merged"):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_only_an_adapter_can_be_merged_and_an_adapter_needs_its_base(
    micro: Path, adapter: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="is not an adapter"):
        merge_adapter(micro, tmp_path / "merged")
    lost = tmp_path / "lost"
    shutil.copytree(adapter, lost)
    config = json.loads((lost / "adapter_config.json").read_text()) | {
        "base_model_name_or_path": str(tmp_path / "gone")
    }
    (lost / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"gone: no such folder"):
        load_model(locate_model(lost))
