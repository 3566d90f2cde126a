"""What a fine-tune will hold is reckoned before weights are read: told, refused, or recomputed less."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.gpus import A100, H100, L40S, T4, Card, on_cards

from podtune.run.errors import UserError
from podtune.run.world import World
from podtune.sft.config import settings as config
from podtune.sft.config.memory import MemoryEstimate, estimate_memory, longest_mean
from podtune.sft.config.resolve import Arguments, resolve
from podtune.sft.source.model import locate_model

# SmolLM3-3B's own config.json, as far as shapes go
SMOLLM3 = {
    "model_type": "smollm3",
    "architectures": ["SmolLM3ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 128256,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration alone: no weights are read."""
    folder = tmp_path_factory.mktemp("smollm3")
    (folder / "config.json").write_text(json.dumps(SMOLLM3))
    return folder


def arguments(model: Path, *words: str, world: World) -> Arguments:
    needed = ["--model_name_or_path", str(model), "--dataset_name", "d", "--output_dir", "o"]
    return resolve(config.read([*needed, *words], {}), world)


def foreseen(
    monkeypatch: pytest.MonkeyPatch, model: Path, card: Card, *words: str, ranks: int = 1, **world: Any
) -> tuple[MemoryEstimate, Arguments]:
    on_cards(monkeypatch, card)
    place = World(device_type="cuda", backend="gloo", world_size=ranks, local_world_size=ranks, **world)
    told = arguments(model, *words, world=place)
    monkeypatch.setattr(type(told.training), "world_size", ranks, raising=False)
    found = estimate_memory(told, locate_model(model), place, [1024] * 64)
    assert found is not None
    return found, told


def test_an_adapter_of_3b_takes_about_10_gib_and_recomputes_nothing_it_need_not(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    words = ("--use_peft", "--lora_dropout", "0", "--per_device_train_batch_size", "8")
    full, _ = foreseen(monkeypatch, model, L40S, *words, "--activation_checkpointing")
    assert 8.5 <= full.plan.total_gib <= 11
    assert full.reason == "as asked"
    roomy, told = foreseen(monkeypatch, model, H100, *words)
    assert roomy.checkpointing == "none"
    assert told.training.activation_checkpointing is told.training.gradient_checkpointing is False
    narrow, told = foreseen(monkeypatch, model, T4, *words)
    assert narrow.checkpointing == "full"
    assert told.training.activation_checkpointing is True
    assert "the least that fits" in narrow.line()


def test_every_second_layer_is_recomputed_where_that_is_enough(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    words = ("--use_peft", "--lora_dropout", "0", "--per_device_train_batch_size", "8")
    plans = {}
    for level in ("none", "full"):
        asked = "true" if level == "full" else "false"
        found, _ = foreseen(monkeypatch, model, H100, *words, "--activation_checkpointing", asked)
        plans[level] = found.plan.total_gib
    card = Card("between", (9, 0), (plans["none"] + plans["full"]) / 2 / 0.9)
    found, told = foreseen(monkeypatch, model, card, *words)
    assert found.checkpointing == "every-second"
    assert told.training.activation_checkpointing_kwargs["every_n_layers"] == 2


def test_full_training_of_3b_on_one_l40s_stops_with_the_three_cheapest_changes(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    with pytest.raises(UserError, match="does not fit") as caught:
        foreseen(monkeypatch, model, L40S, "--per_device_train_batch_size", "8")
    assert caught.value.code == 71
    assert caught.value.fix.count(" GiB)") == 3
    assert "LoRA" in caught.value.fix or "8-bit" in caught.value.fix
    fits, _ = foreseen(monkeypatch, model, A100, "--per_device_train_batch_size", "8")
    assert fits.plan.total_gib >= 48


def test_memory_check_off_trains_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreseen(monkeypatch, model, L40S, "--per_device_train_batch_size", "8", "--memory_check", "false")
    assert "does not fit" in capsys.readouterr().err


def test_the_record_holds_estimate_peak_and_error(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    found, _ = foreseen(monkeypatch, model, H100, "--use_peft", "--per_device_train_batch_size", "8")
    figures = found.for_record(found.plan.total_gib / 1.1)
    assert figures["error"] == pytest.approx(0.1, abs=1e-3)
    parts = ("weights", "gradients", "optimizer", "activations", "head", "buffers")
    # activations go as gradients come
    together = sum(figures[f"{part}_gib"] for part in parts) - figures["gradients_gib"]
    assert together == pytest.approx(figures["total_gib"], abs=0.01)
    assert "peak_gib" not in found.for_record()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp-grad-op", "hsdp"])
def test_every_strategy_has_a_plan_by_the_card_with_least_free(
    strategy: str, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setattr("accelerate.utils.gather_object", lambda own: [*own, 70 * 2**30])
    words = ("--strategy", strategy, "--per_device_train_batch_size", "2", "--use_peft")
    found, _ = foreseen(monkeypatch, model, H100, *words, ranks=4)
    assert found.card_gib == 70
    assert found.plan.strategy == strategy
    assert found.plan.world_size == 4


def test_a_cpu_has_nothing_to_estimate(model: Path) -> None:
    assert estimate_memory(arguments(model, world=World()), locate_model(model), World(), [1024]) is None


def test_the_fullest_batch_counts_and_not_the_longest_row() -> None:
    lengths = [100] * 990 + [1000] * 10
    assert longest_mean(lengths, 8, padding_free=False) == 1000, "padded to the longest"
    assert 100 < longest_mean(lengths, 8, padding_free=True) < 500
    assert longest_mean([7, 9], 8, padding_free=True) == 9
