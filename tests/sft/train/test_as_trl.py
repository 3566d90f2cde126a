"""Logs that are TRL's: of a mixture of experts, and of a trained adapter that is trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from support.launch import Launcher, metrics
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from trl import SFTConfig, SFTTrainer

from podtune.sft.model.merge import merge_adapter

STEPS = 4
ROWS = [{"text": f"{'red ' * (number % 5)}and blue make purple, number {number}"} for number in range(24)]


@pytest.fixture
def options(tmp_path: Path) -> list[object]:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    words = ["--dataset_name", tmp_path / "rows.jsonl", "--bf16", "false", "--logging_steps", 1]
    return [*words, "--per_device_train_batch_size", 4, "--save_steps", 2, "--learning_rate", 1e-2]


def trls_log(model: Any, folder: Path, name: Path, **settings: Any) -> dict[str, dict[int, float]]:
    """Values by step of what TRL logs, by name."""
    shape = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "max_steps": STEPS}
    quiet = {"bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1}
    trainer = SFTTrainer(
        model,
        SFTConfig(str(folder), gradient_checkpointing=False, **shape, **quiet, **settings),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=AutoTokenizer.from_pretrained(name),
    )
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {key: {entry["step"]: entry[key] for entry in entries} for key in entries[0]}


def test_the_balancing_loss_of_experts_is_logged_as_trl_does(
    micro_model: Path, launcher: Launcher, options: list[object], tmp_path: Path
) -> None:
    folder, tokenizer = tmp_path / "experts", AutoTokenizer.from_pretrained(micro_model)
    small = {"hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=len(tokenizer), **small, **heads)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    words = ["--model_name_or_path", folder, *options, "--max_steps", STEPS, "--router_aux_loss_coef", 0.5]
    launcher.run(*words, "--output_dir", tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = trls_log(model, tmp_path / "trl", folder, router_aux_loss_coef=0.5)
    for name in ("aux_loss", "loss"):
        assert metrics(tmp_path / "run", name=name) == pytest.approx(expected[name], rel=1e-5)


def test_a_multimodal_model_learns_text_on_two_ranks_as_trl_does_on_one(
    micro_model: Path, launcher: Launcher, options: list[object], tmp_path: Path
) -> None:
    folder, tokenizer = tmp_path / "sees", AutoTokenizer.from_pretrained(micro_model)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": len(tokenizer) + 4}
    rotary = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    names = ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"]
    special = {name: len(tokenizer) + index for index, name in enumerate(names)}
    torch.manual_seed(0)
    text = {**shape, **sizes, "rope_parameters": rotary, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **special)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    words = ["--model_name_or_path", folder, *options, "--max_steps", STEPS]
    half = [*words, "--per_device_train_batch_size", 2]
    output = launcher.run(*half, "--output_dir", tmp_path / "run", ranks=2)
    assert "parameters for images and sound frozen (rows are text)" in output
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    expected = trls_log(model, tmp_path / "trl", folder)["loss"]
    # its class takes the mean of each rank's tokens, and the ranks' are of different lengths
    assert metrics(tmp_path / "run") == pytest.approx(expected, rel=5e-3)
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "run" / "final"))
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert changed
    assert not [name for name in changed if "visual" in name]
    launcher.run(*half, "--use_peft", "--lora_r", 4, "--output_dir", tmp_path / "adapter", ranks=2)


def test_a_trained_adapter_goes_on_as_with_trl_over_a_resume(
    micro_model: Path, launcher: Launcher, options: list[object], tmp_path: Path
) -> None:
    run, adapter = tmp_path / "run", tmp_path / "first" / "final"
    lora = ["--use_peft", "--lora_r", 4, "--lora_dropout", 0, "--max_steps", 2]
    launcher.run("--model_name_or_path", micro_model, *options, *lora, "--output_dir", tmp_path / "first")

    words = ["--model_name_or_path", adapter, *options, "--max_steps", STEPS, "--output_dir", run]
    assert "lora_r: the model is an adapter" in launcher.run(*words, "--lora_r", 8, codes=[78])
    launcher.run(*words)
    for name in ("checkpoint-4", "final"):
        shutil.rmtree(run / name)
    assert "resuming from" in launcher.run(*words)
    assert json.loads((run / "run.json").read_text())["config"]["lora_r"] == 4
    base = AutoModelForCausalLM.from_pretrained(micro_model)
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    assert metrics(run) == pytest.approx(trls_log(model, tmp_path / "trl", micro_model)["loss"], rel=1e-5)

    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, run / "final"))
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before)
    merge_adapter(run / "final", tmp_path / "merged")
    ids = AutoTokenizer.from_pretrained(run / "final")("blue and red", return_tensors="pt")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(**ids).logits
    adapted = AutoPeftModelForCausalLM.from_pretrained(run / "final")(**ids).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-5)
    code, answer, said = launcher.podtune("generate", run / "final", "--prompt", "red and blue").end()
    assert (code, bool(answer.strip())) == (0, True), said


def test_an_adapter_of_another_kind_is_refused_in_a_sentence(
    micro_model: Path, launcher: Launcher, options: list[object], tmp_path: Path
) -> None:
    made = {"peft_type": "PROMPT_TUNING", "base_model_name_or_path": str(micro_model)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(made))
    words = ["--model_name_or_path", tmp_path, *options, "--output_dir", tmp_path / "run"]
    output = launcher.run(*words, codes=[65])
    assert "it is of the kind PROMPT_TUNING" in output
    assert "Traceback" not in output
