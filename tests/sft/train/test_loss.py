"""The lean loss has TRL's value and TRL's gradient, padded and padding-free, and says where it would not."""

from __future__ import annotations

import copy
import types
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, SmolLM3Config, SmolLM3ForCausalLM
from trl import SFTConfig, SFTTrainer

from podtune.sft.cpu import cross_entropy
from podtune.sft.cpu.cross_entropy import summed_cross_entropy
from podtune.sft.cpu.padded_batches import REAL_TOKENS, PaddedBatches
from podtune.sft.model.attention import PER_ROW, register_attention
from podtune.sft.train import loss as lean
from podtune.sft.train.loss import fused_loss, fused_loss_unsupported_reason

ROWS = [
    {"input_ids": [5, 9, 12, 7, 3, 8], "labels": [-100, -100, 12, 7, 3, 8]},
    {"input_ids": [4, 6], "labels": [-100, 6]},
    {"input_ids": [11, 2, 30, 31, 5, 6, 7, 8, 9], "labels": [-100, 2, -100, 31, 5, -100, 7, 8, 9]},
]
UNTRAINED = [{"input_ids": row["input_ids"], "labels": [-100] * len(row["input_ids"])} for row in ROWS]


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Any]:
    """A trainer for padded and one for padding-free batches, from the same weights, in fp32."""
    register_attention()
    torch.manual_seed(0)
    config = SmolLM3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    model = SmolLM3ForCausalLM(config)
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, 64)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
    return {
        free: trainer(copy.deepcopy(model), tokenizer, tmp_path_factory.mktemp("trainer"), free)
        for free in (False, True)
    }


def trainer(model: Any, tokenizer: Any, folder: Path, padding_free: bool, **settings: Any) -> Any:
    model.set_attn_implementation(PER_ROW if padding_free else "sdpa")
    settings = {
        "per_device_train_batch_size": 3,
        "padding_free": padding_free,
        "max_length": None,
        **settings,
    }
    args = SFTConfig(
        str(folder), bf16=False, use_cpu=True, report_to="none", gradient_checkpointing=False, **settings
    )
    made = SFTTrainer(
        model=model, args=args, train_dataset=datasets.Dataset.from_list(ROWS), processing_class=tokenizer
    )
    made.model.train()
    return made


def value_and_gradients(
    trainer: Any, compute: Any, rows: list[dict[str, Any]], items: torch.Tensor | None
) -> tuple[float, list[torch.Tensor]]:
    trainer.model.zero_grad()
    loss = compute(trainer.model, trainer.data_collator(rows), num_items_in_batch=items)
    loss.backward()
    return loss.item(), [p.grad.clone() for p in trainer.model.parameters()]


def ours(trainer: Any) -> Any:
    def compute(model: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> torch.Tensor:
        return fused_loss(trainer, model, inputs, num_items_in_batch)

    return compute


def assert_equal_to_trl(trainer: Any, rows: list[dict[str, Any]], items: torch.Tensor | None) -> None:
    value, gradients = value_and_gradients(trainer, ours(trainer), rows, items)
    expected, reference = value_and_gradients(trainer, trainer.compute_loss, rows, items)
    assert value == pytest.approx(expected, rel=1e-5, abs=1e-12)
    for mine, theirs in zip(gradients, reference, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize("items", [None, torch.tensor(37)], ids=["own count", "count of a larger step"])
def test_loss_and_gradients_are_those_of_trl(
    trainers: dict[bool, Any], padding_free: bool, items: torch.Tensor | None
) -> None:
    assert_equal_to_trl(trainers[padding_free], ROWS, items)


@pytest.mark.parametrize("padding_free", [False, True])
def test_a_batch_without_a_trained_token_gives_zero_and_zero_gradients(
    trainers: dict[bool, Any], padding_free: bool
) -> None:
    value, gradients = value_and_gradients(
        trainers[padding_free], ours(trainers[padding_free]), UNTRAINED, torch.tensor(0)
    )
    assert value == 0.0
    assert all(not g.any() for g in gradients)
    assert_equal_to_trl(trainers[padding_free], UNTRAINED, torch.tensor(0))


@pytest.mark.parametrize("padding_free", [False, True])
def test_padding_changes_nothing(trainers: dict[bool, Any], padding_free: bool) -> None:
    padded, free = (
        value_and_gradients(trainers[kind], ours(trainers[kind]), ROWS, None) for kind in (False, True)
    )
    assert padded[0] == pytest.approx(free[0], rel=1e-5)
    for mine, theirs in zip(padded[1], free[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_batch_filled_up_to_a_multiple_trains_as_its_rows_do(trainers: dict[bool, Any]) -> None:
    trainer = trainers[True]
    expected, reference = value_and_gradients(trainer, trainer.compute_loss, ROWS, torch.tensor(37))
    batch = PaddedBatches(trainer.data_collator, 8)(ROWS)
    assert (batch["input_ids"].shape, int(batch.pop(REAL_TOKENS))) == ((1, 24), 17)
    trainer.model.zero_grad()
    loss = fused_loss(trainer, trainer.model, batch, torch.tensor(37), multiple=8)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    for mine, theirs in zip(trainer.model.parameters(), reference, strict=True):
        torch.testing.assert_close(mine.grad, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_in_chunks_is_torchs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", 4 * 64 * 5)  # five rows at a time, and the last two
    targets = torch.randint(64, (12,))
    targets[[0, 7]] = -100
    mine = (torch.randn(12, 64) * 5).to(dtype).requires_grad_()
    other = mine.detach().clone().requires_grad_()
    ours = summed_cross_entropy(mine, targets, -100)
    theirs = torch.nn.functional.cross_entropy(other.float(), targets, reduction="sum")
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    (ours / 37).backward()
    (theirs / 37).backward()
    torch.testing.assert_close(mine.grad, other.grad)
    assert mine.grad is not None
    assert not mine.grad[[0, 7]].any()


def test_more_ranks_scale_the_loss_as_trl_does(
    trainers: dict[bool, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(trainers[True].accelerator), "num_processes", 2)
    monkeypatch.setattr(trainers[True].accelerator, "gather_for_metrics", lambda x: x)
    assert_equal_to_trl(trainers[True], ROWS, torch.tensor(37))


def test_logits_that_would_fill_memory_are_scored_in_chunks(
    trainers: dict[bool, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lean, "_PLAIN_LOGITS_BYTES", 0)
    monkeypatch.setattr(lean, "_plain", None)
    assert_equal_to_trl(trainers[True], ROWS, torch.tensor(37))


def test_accuracy_is_measured_at_logging_steps_only_and_is_trls(trainers: dict[bool, Any]) -> None:
    trainer = trainers[True]
    kept = trainer._metrics["train"]["mean_token_accuracy"]
    trainer.state.logging_steps = 10
    for step, measured in ((0, 0), (9, 1)):
        kept.clear()
        trainer.state.global_step = step
        value_and_gradients(trainer, ours(trainer), ROWS, None)
        assert len(kept) == measured
    value_and_gradients(trainer, trainer.compute_loss, ROWS, None)
    assert kept[0] == kept[1]


def test_where_the_fused_loss_would_be_another_loss_it_says_why(
    trainers: dict[bool, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainers[True]
    assert fused_loss_unsupported_reason(trainer) == ""
    monkeypatch.setattr(trainer, "label_smoother", object())
    assert "smoothing" in fused_loss_unsupported_reason(trainer)
    monkeypatch.setattr(trainer, "label_smoother", None)
    monkeypatch.setattr(trainer.args, "loss_type", "dft")
    assert "dft" in fused_loss_unsupported_reason(trainer)
    monkeypatch.setattr(trainer.args, "loss_type", "nll")
    monkeypatch.setattr(
        trainer.model, "active_peft_config", types.SimpleNamespace(is_prompt_learning=True), raising=False
    )
    monkeypatch.setattr(trainer.model, "get_base_model", lambda: trainer.model, raising=False)
    assert "prompt learning" in fused_loss_unsupported_reason(trainer)


def test_loras_input_cast_changes_no_bit_under_autocast() -> None:
    """Why the trainer turns it off: all outputs and gradients are the same, for half of the traffic."""
    from peft import LoraConfig, inject_adapter_in_model

    def run(cast: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        base = torch.nn.Sequential(torch.nn.Linear(48, 32, bias=False)).bfloat16()
        config = LoraConfig(r=8, lora_dropout=0.0, target_modules=["0"], init_lora_weights=False)
        model = inject_adapter_in_model(config, base)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
        model[0].cast_input_dtype_enabled = cast
        rows = torch.randn(64, 48, dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(rows)
        out.float().square().sum().backward()
        trained = [p.grad for name, p in model.named_parameters() if "lora_" in name]
        return [out, rows.grad, *trained]  # type: ignore[list-item]

    for mine, theirs in zip(run(False), run(True), strict=True):
        assert torch.equal(mine, theirs)
