"""The reference case, 3B, on one large GPU: memory against the plan, and speed (checks 17 to 24)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpus import Train
from support.launch import metrics

pytestmark = pytest.mark.slow
LORA = ("--use_peft", "--lora_r", 16)
FULL = ("--max_length", 1024)  # of long_rows: each is cut to it


def speed(record: dict[str, Any]) -> float:
    return float(record["measurements"]["tokens_per_s"])


def peak(record: dict[str, Any]) -> float:
    return float(record["measurements"]["peak_memory_gib"]["max"])


def needs(gib: float) -> None:
    if torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"needs {gib:.0f} GiB of GPU memory")


def test_lora_of_3b_fits_its_plan_and_is_faster_without_cast_and_dropout(
    train: Train, large: Path, long_rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from podtune.sft.train import trainer

    needs(20)
    words = (
        *LORA,
        *FULL,
        "--max_steps",
        8,
        "--per_device_train_batch_size",
        8,
        "--activation_checkpointing",
    )
    lean = train(*words, "--lora_dropout", 0, model=large, data=long_rows, name="lean")
    assert peak(lean) < 12
    assert abs(lean["measurements"]["memory_estimate"]["error"]) < 0.15
    monkeypatch.setattr(trainer, "leave_casts_to_autocast", lambda model: None)
    plain = train(*words, "--lora_dropout", 0.05, model=large, data=long_rows, name="plain")
    assert speed(lean) >= 1.15 * speed(plain)  # counted: 1.33 on an H100, 1.27 on an H200


def test_lora_of_3b_at_28_rows_of_2048_tokens_fits_an_l40s(
    train: Train, large: Path, long_rows: Path
) -> None:
    needs(44)
    words = (*LORA, "--max_length", 2048, "--max_steps", 3, "--lora_dropout", 0)
    words = (*words, "--per_device_train_batch_size", 28, "--activation_checkpointing")
    record = train(*words, model=large, data=long_rows)
    assert peak(record) < 42
    assert abs(record["measurements"]["memory_estimate"]["error"]) < 0.1


@pytest.mark.parametrize("checkpointing", [True, False])
def test_full_training_of_3b_fits_its_plan(
    train: Train, large: Path, long_rows: Path, checkpointing: bool
) -> None:
    needs(60 if checkpointing else 110)
    words = ("--max_steps", 8, "--per_device_train_batch_size", 8, *FULL)
    words = (*words, "--activation_checkpointing", str(checkpointing).lower())
    record = train(*words, model=large, data=long_rows)
    assert abs(record["measurements"]["memory_estimate"]["error"]) < 0.15
    if "H200" in torch.cuda.get_device_name():
        assert speed(record) >= (15e3 if checkpointing else 20e3)


def test_full_training_of_3b_outruns_plain_trl_with_equal_losses(
    train: Train, large: Path, tmp_path: Path
) -> None:
    """TRL's own loss and padded rows stand for it, in the same program."""
    needs(110)
    words = ("--max_steps", 6, "--per_device_train_batch_size", 8, "--max_length", 1024)
    ours = train(*words, model=large, name="ours")
    plain = ("--loss", "trl", "--padding_free", "false", "--attn_implementation", "sdpa")
    theirs = train(*words, *plain, "--activation_checkpointing", "true", model=large, name="theirs")
    mine, other = metrics(tmp_path / "ours"), metrics(tmp_path / "theirs")
    assert max(abs(mine[step] - other[step]) / other[step] for step in mine) < 2e-3
    assert speed(ours) > speed(theirs)


def test_what_is_measured_costs_at_most_a_percent(
    train: Train, medium: Path, long_rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from podtune.sft.train.meter import Meter
    from podtune.sft.train.stop import CoordinatedStop, Decision

    words = ("--max_steps", 40, "--per_device_train_batch_size", 32, *FULL)
    with_all = train(*words, model=medium, data=long_rows, name="with")
    monkeypatch.setattr(Meter, "_look", lambda self: {})
    monkeypatch.setattr(
        CoordinatedStop, "all_reduce_decision", lambda self, requested, certain: Decision.CONTINUE
    )
    without = train(*words, model=medium, data=long_rows, name="without")
    p50 = [run["measurements"]["step_time_s"]["p50"] for run in (with_all, without)]
    assert p50[0] <= 1.01 * p50[1]


def test_rows_of_changing_length_leave_few_gaps_in_memory(train: Train, medium: Path) -> None:
    train("--max_steps", 40, "--per_device_train_batch_size", 16, model=medium)
    assert torch.cuda.max_memory_reserved() < 1.15 * torch.cuda.max_memory_allocated()


def test_a_compiled_model_meets_changing_lengths_without_compiling_anew(
    train: Train, medium: Path, tmp_path: Path
) -> None:
    from torch._dynamo.utils import counters

    words = ("--max_steps", 15, "--per_device_train_batch_size", 16)
    train(*words, name="eager", model=medium)
    counters.clear()
    train(*words, "--torch_compile", "true", name="compiled", model=medium)
    assert counters["stats"]["unique_graphs"] <= 40
    eager, compiled = metrics(tmp_path / "eager"), metrics(tmp_path / "compiled")
    assert max(abs(compiled[step] - eager[step]) / eager[step] for step in eager) < 2e-2


@pytest.mark.parametrize("words", [("--load_in_4bit", "--use_peft"), ("--optim", "adamw_8bit")])
def test_bitsandbytes_trains_where_it_is_installed_and_is_asked_for_elsewhere(
    words: tuple[str, ...], train: Train, micro_model: Path, tmp_path: Path
) -> None:
    there = importlib.util.find_spec("bitsandbytes") is not None
    train("--max_steps", 6, "--learning_rate", "2e-3", *words, code=0 if there else 69)
    if there:
        losses = metrics(tmp_path / "run")
        assert losses[6] < losses[1]
