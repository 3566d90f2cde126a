"""Rows lie end to end only where an architecture was seen to train the same that way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import Gemma3Config, LlamaConfig, Qwen3_5Config

from podtune.run.errors import UserError
from podtune.run.world import World
from podtune.sft.config import settings as config
from podtune.sft.config.hardware import hardware_choices
from podtune.sft.config.resolve import resolve
from podtune.sft.model.attention import PER_ROW
from podtune.sft.model.end_to_end import why_padded
from podtune.sft.model.load import _refuse_kernel, architecture
from podtune.sft.source.model import locate_model

NEEDED = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"]


@pytest.mark.parametrize(
    "name", ["SmolLM3ForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"]
)
def test_plain_decoders_need_no_padding(name: str) -> None:
    assert why_padded(name) == ""
    chosen, _ = hardware_choices(config.read(NEEDED, {}), World(), "single", name)
    assert (chosen["attn_implementation"], chosen["padding_free"]) == (PER_ROW, True)
    assert "loss" not in chosen


@pytest.mark.parametrize(
    "name",
    [
        *("MambaForCausalLM", "JambaForCausalLM", "GptOssForCausalLM", "BloomForCausalLM"),
        *("Qwen3_5ForCausalLM", "Gemma2ForCausalLM", "SomethingNewForCausalLM"),
    ],
)
def test_state_sinks_and_the_unknown_run_padded_as_trl_runs_them(name: str) -> None:
    chosen, notes = hardware_choices(config.read(NEEDED, {}), World(), "single", name)
    assert "attn_implementation" not in chosen
    assert (chosen["padding_free"], chosen["loss"]) == (False, "trl")
    assert any("padded rows" in note and name in note for note in notes)


def test_neftune_s_noise_goes_by_rows_of_their_own() -> None:
    settings = config.read([*NEEDED, "--neftune_noise_alpha", "5"], {})
    assert hardware_choices(settings, World(), "single", "LlamaForCausalLM")[0]["padding_free"] is False


def test_an_adapter_sits_where_peft_puts_it() -> None:
    arguments = resolve(config.read([*NEEDED, "--use_peft"], {}), World(), "LlamaForCausalLM")
    known, unknown = arguments.peft_config("llama"), arguments.peft_config("something-new")
    assert known is not None
    assert unknown is not None
    assert (known.target_modules, unknown.target_modules) == (None, "all-linear")
    assert resolve(config.read(NEEDED, {}), World()).peft_config("llama") is None


def test_a_multimodal_model_is_loaded_whole() -> None:
    assert architecture(LlamaConfig(architectures=["LlamaForCausalLM"])) == "LlamaForCausalLM"
    for kind, name in (
        (Qwen3_5Config, "Qwen3_5ForConditionalGeneration"),
        (Gemma3Config, "Gemma3ForConditionalGeneration"),
    ):
        assert architecture(kind(architectures=[name])) == name
    assert why_padded("Qwen3_5ForConditionalGeneration")  # its layers keep state from row to row


def test_a_model_s_config_cannot_choose_code_from_the_hub(tmp_path: Path) -> None:
    for asked in (
        '{"text_config": {"attn_implementation": "org/kernel"}}',
        r'{"attn\u005fimplementation": "org\/kernel"}',
        '{"_attn_implementation": {"": "org/kernel"}}',
    ):
        (tmp_path / "config.json").write_text(asked)
        with pytest.raises(UserError, match="asks for the attention org/kernel, which is code"):
            _refuse_kernel(locate_model(tmp_path))
    (tmp_path / "config.json").write_text("[" * 10_000)
    with pytest.raises(UserError, match=r"config.json cannot be loaded"):
        _refuse_kernel(locate_model(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"_attn_implementation": "sdpa"}))
    _refuse_kernel(locate_model(tmp_path))
