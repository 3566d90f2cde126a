"""Rows lie end to end only where an architecture was seen to train the same that way."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, Gemma3Config, LlamaConfig, LlamaForCausalLM, Qwen3_5Config

from podtune.run.errors import UserError
from podtune.run.world import World
from podtune.sft.config import settings as config
from podtune.sft.config.hardware import hardware_choices
from podtune.sft.config.resolve import resolve
from podtune.sft.model.attention import PER_ROW
from podtune.sft.model.end_to_end import Architecture, architecture, why_padded
from podtune.sft.model.load import _refuse_kernel, load_model
from podtune.sft.source.model import locate_model

NEEDED = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"]
LLAMA = Architecture("LlamaForCausalLM", frozenset({"full_attention"}))
SCRIPT = Path(__file__).parents[3] / "scripts" / "end_to_end.py"


@pytest.fixture(scope="module")
def script() -> Any:
    """The script that made the list: it trains a small model padded and end to end."""
    spec = importlib.util.spec_from_file_location("end_to_end_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name", ["SmolLM3ForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"]
)
def test_plain_decoders_need_no_padding(name: str) -> None:
    model = Architecture(name, frozenset({"full_attention"}))
    assert why_padded(model) == ""
    chosen, _ = hardware_choices(config.read(NEEDED, {}), World(), "single", model)
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
    chosen, notes = hardware_choices(config.read(NEEDED, {}), World(), "single", Architecture(name))
    assert "attn_implementation" not in chosen
    assert (chosen["padding_free"], chosen["loss"]) == (False, "trl")
    assert any("padded rows" in note and name in note for note in notes)


@pytest.mark.parametrize(
    ("model_type", "kind", "more"),
    [
        ("qwen2_moe", "sliding_attention", {}),
        ("smollm3", "sliding_attention", {"use_sliding_window": False}),  # the layers say it, the switch not
        ("mistral", "sliding_attention", {}),
    ],
)
def test_a_window_holds_end_to_end_whoever_names_it(
    script: Any, model_type: str, kind: str, more: dict[str, Any]
) -> None:
    tried = script.small_config(model_type, kind)
    for name, value in more.items():
        setattr(tried, name, value)
    assert kind in architecture(tried).layers
    assert why_padded(architecture(tried)) == ""
    assert script.judged(tried) == ""


@pytest.mark.parametrize(
    ("model_type", "layers", "says"),
    [
        ("minimax_m3_vl_text", ["full_attention", "minimax_m3_sparse"], "with minimax_m3_sparse"),
        ("lfm2", ["conv", "full_attention"], "with conv"),
        ("llama4_text", None, "end to end: losses or gradient norms differ"),  # its temperature
    ],
)
def test_layers_that_differ_end_to_end_run_padded(
    model_type: str, layers: list[str] | None, says: str
) -> None:
    made = CONFIG_MAPPING[model_type](num_hidden_layers=2, **({"layer_types": layers} if layers else {}))
    model = architecture(made)
    assert says in why_padded(model)
    chosen, notes = hardware_choices(config.read(NEEDED, {}), World(), "single", model)
    assert (chosen["padding_free"], chosen["loss"]) == (False, "trl")
    assert "attn_implementation" not in chosen
    assert any(says in note for note in notes)


def test_code_of_the_model_s_own_runs_padded_where_it_is_trusted() -> None:
    own = LlamaConfig(auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})
    assert architecture(own, trust_remote_code=False).name == "LlamaForCausalLM"
    trusted = architecture(own, trust_remote_code=True)
    assert (trusted.name, why_padded(trusted)) == (
        "modeling_own.OwnForCausalLM",
        "it was not tried end to end",
    )


OWN = """
from torch import nn
from transformers import LlamaModel, LlamaPreTrainedModel
class OwnForCausalLM(LlamaPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
"""


def test_a_class_of_its_own_that_cannot_generate_is_loaded(tmp_path: Path) -> None:
    """TRL's trainer writes its padding token to the generation config of every model."""
    small = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    made = LlamaForCausalLM(LlamaConfig(**small, num_attention_heads=2, tie_word_embeddings=False))
    made.save_pretrained(tmp_path)
    (tmp_path / "modeling_own.py").write_text(OWN)
    written = json.loads((tmp_path / "config.json").read_text())
    written |= {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    (tmp_path / "config.json").write_text(json.dumps(written))
    loaded = load_model(locate_model(tmp_path), trust_remote_code=True)
    assert type(loaded).__name__ == "OwnForCausalLM"
    assert loaded.generation_config is not None
    assert architecture(loaded.config, trust_remote_code=True).name == "modeling_own.OwnForCausalLM"


def test_neftune_s_noise_goes_by_rows_of_their_own() -> None:
    settings = config.read([*NEEDED, "--neftune_noise_alpha", "5"], {})
    assert hardware_choices(settings, World(), "single", LLAMA)[0]["padding_free"] is False


def test_an_adapter_sits_where_peft_puts_it() -> None:
    arguments = resolve(config.read([*NEEDED, "--use_peft"], {}), World(), LLAMA)
    known, unknown = arguments.peft_config("llama"), arguments.peft_config("something-new")
    assert known is not None
    assert unknown is not None
    assert (known.target_modules, unknown.target_modules) == (None, "all-linear")
    assert resolve(config.read(NEEDED, {}), World()).peft_config("llama") is None


def test_a_multimodal_model_is_loaded_whole() -> None:
    assert architecture(LlamaConfig(architectures=["LlamaForCausalLM"])) == LLAMA
    for kind, name in (
        (Qwen3_5Config, "Qwen3_5ForConditionalGeneration"),
        (Gemma3Config, "Gemma3ForConditionalGeneration"),
    ):
        assert architecture(kind(architectures=[name])).name == name
    assert why_padded(Architecture("Qwen3_5ForConditionalGeneration"))  # layers keep state from row to row


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
