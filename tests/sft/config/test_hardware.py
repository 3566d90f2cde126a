"""What podtune chooses on a GPU and refuses there, by what torch says of the card; nothing is computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.gpus import A100, CARDS, H100, L40S, T4, Card, on_cards

from podtune.run.distributed import setup_distributed
from podtune.run.errors import UNAVAILABLE, UserError
from podtune.run.world import World
from podtune.sft.config import hardware
from podtune.sft.config import settings as config
from podtune.sft.config.hardware import hardware_choices, refuse_unfit

NEEDED = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"]
ON_GPU = World(device_type="cuda")


def choices(*words: str, world: World = ON_GPU, strategy: str = "single") -> tuple[dict[str, Any], str]:
    chosen, notes = hardware_choices(config.read([*NEEDED, *words], {}), world, strategy)
    return chosen, ", ".join(notes)


def refusal(*words: str, world: World = ON_GPU) -> UserError:
    with pytest.raises(UserError) as caught:
        refuse_unfit(config.read([*NEEDED, *words], {}), world)
    return caught.value


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_bf16_is_chosen_where_the_card_computes_in_it_and_not_where_it_is_emulated(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cards(monkeypatch, card)
    chosen, notes = choices()
    assert (chosen["bf16"], chosen["fp16"]) == (card is not T4, card is T4)
    assert ("variable-length kernel" in notes) == (card is not T4)
    assert chosen["activation_checkpointing"] is True


def test_batches_are_copied_while_the_gpu_computes_and_made_by_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_cards(monkeypatch, L40S)
    chosen, notes = choices("--accelerator_config", '{"split_batches": false}')
    assert chosen["accelerator_config"] == {"split_batches": False, "non_blocking": True}
    assert chosen["dataloader_num_workers"] == 2
    assert "2 data loader workers" in notes
    chosen, _ = choices("--accelerator_config", '{"non_blocking": false}', "--dataloader_num_workers", "0")
    assert not {"accelerator_config", "dataloader_num_workers"} & set(chosen), "the user's word stands"
    chosen, _ = choices(world=World())
    assert not {"accelerator_config", "dataloader_num_workers"} & set(chosen), "a CPU has nothing to copy"


def test_an_adapters_base_model_is_loaded_in_half_precision_and_said_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_cards(monkeypatch, A100)
    chosen, notes = choices("--use_peft")
    assert chosen["dtype"] == "bfloat16"
    assert "base model in bfloat16 (it is not trained)" in notes
    assert "dtype" not in choices("--use_peft", "--dtype", "float32")[0]
    assert "dtype" not in choices()[0], "weights that are trained stay in fp32"
    assert "dtype" not in choices("--use_peft", "--bf16", "false")[0]
    on_cards(monkeypatch, T4)
    assert choices("--use_peft")[0]["dtype"] == "float16"


def test_four_bit_weights_are_stored_so_that_fsdp_can_shard_them(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cards(monkeypatch, L40S)
    quantized = ("--use_peft", "--load_in_4bit")
    assert choices(*quantized, strategy="fsdp")[0]["bnb_4bit_quant_storage"] == "bfloat16"
    assert "bnb_4bit_quant_storage" not in choices(*quantized, strategy="ddp")[0]


def test_one_process_that_sees_several_gpus_is_told_how_to_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cards(monkeypatch, H100, 2)
    error = refusal()
    assert "one process sees 2 GPUs" in error.what
    assert "torchrun --nproc-per-node 2" in error.fix
    refuse_unfit(config.read(NEEDED, {}), World(device_type="cuda", backend="cpu:gloo,cuda:nccl"))


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cards(monkeypatch, H100, 1)
    for name, value in (
        *(("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")),
        *(("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="local rank 1 has no GPU") as caught:
        setup_distributed()
    assert caught.value.code == 69


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (["--dtype", "float16"], "weights in float16 cannot be trained", 78),
        (["--fsdp", "full_shard auto_wrap"], "fsdp divides a model over processes, and one was started", 78),
        (["--attn_implementation", "flash_attention_2"], "flash-attn is not installed", 78),
        (["--optim", "adamw_8bit"], "adamw_8bit needs the package bitsandbytes", 69),
        (["--optim", "paged_lion_32bit"], "needs the package bitsandbytes", 69),
        (["--use_liger_kernel"], "need a GPU and the package liger-kernel", 69),
    ],
)
def test_what_is_not_there_is_one_sentence_before_weights_are_read(
    words: list[str], says: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr(hardware, "importlib", nothing)  # here alone: libraries remember what they find
    error = refusal(*words, world=World())
    assert says in error.what
    assert error.fix
    assert error.code == code


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_quantization_without_a_gpu_says_so() -> None:
    error = refusal("--load_in_4bit", "--use_peft", world=World())
    assert "need a GPU" in error.what
    assert error.code == UNAVAILABLE


def test_optimizers_of_torch_need_no_package() -> None:
    for name in ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"):
        refuse_unfit(config.read([*NEEDED, "--optim", name], {}), World())
