"""The choices that follow from the hardware where the user made none, and refusals of what it cannot do."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from podtune.run.errors import ConfigError, Unavailable, UserError
from podtune.run.world import World
from podtune.sft.config.keys import Settings

if TYPE_CHECKING:
    from podtune.sft.model.end_to_end import Architecture


def hardware_choices(
    settings: Settings, world: World, strategy: str, architecture: Architecture | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Choose precision, activation checkpointing, attention, padding and data loading for this device.

    Returns the choices and a note of each for the start line. ``architecture`` is the model's; None if
    it is not known.
    """
    values = settings.values
    chosen: dict[str, Any] = {**_precision(settings, world)}
    notes = ["bf16 autocast" if chosen["bf16"] else "fp16 autocast" if chosen["fp16"] else "fp32"]
    if not any(settings.given(key) for key in ("activation_checkpointing", "gradient_checkpointing")):
        # On the CPU memory is not what is short, and recomputing costs a fifth of the speed.
        chosen["activation_checkpointing"] = world.gpu_path
    checkpointing = any(
        (values | chosen).get(key) for key in ("activation_checkpointing", "gradient_checkpointing")
    )
    notes.append(f"activation checkpointing {'on' if checkpointing else 'off'}")
    attention, attention_notes = _attention(
        settings, world, half=bool(chosen["bf16"] or chosen["fp16"]), architecture=architecture
    )
    chosen |= attention
    notes += attention_notes
    notes.append("compiled" if values.get("torch_compile") else "not compiled")
    half = "bfloat16" if chosen["bf16"] else "float16" if chosen["fp16"] else ""
    if half and values.get("use_peft") and world.gpu_path and not settings.given("dtype"):
        # nobody trains these weights: autocast would cast them anew in every use, from twice the bytes
        chosen["dtype"] = half
        notes.append(f"base model in {half} (it is not trained)")
    sharded = strategy in ("fsdp", "fsdp-grad-op", "hsdp")
    if values.get("load_in_4bit") and sharded and not settings.given("bnb_4bit_quant_storage"):
        chosen["bnb_4bit_quant_storage"] = "bfloat16"  # FSDP leaves bytes whole on every rank
        notes.append("4-bit weights stored as bfloat16, which FSDP can shard")
    if world.device_type == "cuda":
        if "expandable_segments:True" in os.environ.get("PYTORCH_ALLOC_CONF", ""):
            notes.append("memory in segments that grow (batches differ in length)")
        data, data_notes = _data_loading(settings)
        chosen |= data
        notes += data_notes
    elif world.gpu_path:
        notes.append("the GPU's branch, forced (PODTUNE_FORCE_GPU_PATH)")
    return chosen, notes


def _precision(settings: Settings, world: World) -> dict[str, bool]:
    import torch

    if settings.given("bf16") or settings.given("fp16"):
        return {key: bool(settings.values.get(key)) for key in ("bf16", "fp16")}
    if world.device_type == "cpu":
        # without the instructions the CPU stays in fp32
        return {"bf16": world.gpu_path or torch.cpu._is_avx512_bf16_supported(), "fp16": False}
    # a GPU that would emulate bf16 (T4) computes in fp16
    fast = torch.cuda.is_bf16_supported(including_emulation=False)
    return {"bf16": fast, "fp16": not fast}


def _attention(
    settings: Settings, world: World, *, half: bool, architecture: Architecture | None
) -> tuple[dict[str, Any], list[str]]:
    from podtune.sft.model.attention import PER_ROW, choose_attention
    from podtune.sft.model.end_to_end import why_padded

    values = settings.values
    if architecture and (why := why_padded(architecture)):
        # what the user chose stands
        padded: dict[str, Any] = {"loss": "trl"}
        if not settings.given("padding_free"):
            padded["padding_free"] = False
        attention = values.get("attn_implementation") or "its own"
        return padded, [f"{attention} attention, padded rows, TRL's loss ({architecture.name}: {why})"]
    attention, reason = choose_attention(world.device_type, half_precision=half)
    if settings.given("attn_implementation"):
        attention, reason = values["attn_implementation"], "as asked"
    chosen: dict[str, Any] = {"attn_implementation": attention}
    if not settings.given("padding_free") and not values.get("packing"):
        # rows end to end need an attention that keeps them apart without a mask
        # NEFTune's noise goes by the length of a row, which would be that of all rows together
        apart = attention in (PER_ROW, "flash_attention_2", "flash_attention_3")
        chosen["padding_free"] = apart and not values.get("neftune_noise_alpha")
    if values.get("packing"):
        padding = "packed rows"
    else:
        padding = "no padding" if (values | chosen).get("padding_free") else "padded rows"
    return chosen, [f"{attention} attention ({reason})", padding]


def _data_loading(settings: Settings) -> tuple[dict[str, Any], list[str]]:
    """Choose how batches are copied and by how many workers they are made."""
    chosen: dict[str, Any] = {}
    notes = []
    given = settings.values.get("accelerator_config")
    pinned = settings.values.get("dataloader_pin_memory", True)
    # a blocking copy waits for the work of the step before, which would count as waiting for data
    if pinned and (given is None or (isinstance(given, dict) and "non_blocking" not in given)):
        chosen["accelerator_config"] = {**(given or {}), "non_blocking": True}
        notes.append("batches copied while the GPU computes")
    if not settings.given("dataloader_num_workers"):
        workers = 1 if settings.sources.streaming else 2  # one reads a stream
        chosen["dataloader_num_workers"] = workers
        notes.append(f"{workers} data loader worker{'s' if workers > 1 else ''}")
    return chosen, notes


#: true if it holds; the error, its key, what is wrong and the fix
Refusal = tuple[object, type[UserError], str, str, str]


def refuse_unfit(settings: Settings, world: World) -> None:
    """Refuse what this hardware or installation cannot do. Raises :class:`UserError`."""
    import torch
    from transformers.utils import is_flash_attn_2_available

    values, on_cpu = settings.values, world.device_type == "cpu"
    count = 1 if on_cpu or world.backend else torch.cuda.device_count()
    flash = values.get("attn_implementation") == "flash_attention_2" and not is_flash_attn_2_available()
    refusals: list[Refusal] = [
        (
            count > 1,
            ConfigError,
            "environment",
            f"one process sees {count} GPUs and would use one",
            f"torchrun --nproc-per-node {count} -m podtune.training ..., or CUDA_VISIBLE_DEVICES=0",
        ),
        (
            values.get("fsdp") and world.world_size == 1 and not world.backend,
            ConfigError,
            "fsdp",
            "fsdp divides a model over processes, and one was started",
            "torchrun --nproc-per-node N -m podtune.training ..., or leave fsdp out",
        ),
        (
            values.get("dtype") == "float16" and not values.get("use_peft"),
            ConfigError,
            "dtype",
            "weights in float16 cannot be trained: their gradients are too coarse to be scaled",
            "--dtype float32 with --fp16, or --dtype bfloat16; or LoRA (--use_peft)",
        ),
        (
            flash,
            ConfigError,
            "attn_implementation",
            "FlashAttention2 is asked for and flash-attn is not installed, or this machine cannot run it",
            "leave it out: torch's variable-length kernel does the same on a GPU; or install flash-attn",
        ),
        (
            values.get("use_liger_kernel") and (on_cpu or importlib.util.find_spec("liger_kernel") is None),
            Unavailable,
            "use_liger_kernel",
            "Liger's kernels need a GPU and the package liger-kernel",
            "pip install 'podtune[liger]', or leave it off",
        ),
        *_bitsandbytes(values),
    ]
    for broken, kind, key, problem, fix in refusals:
        if broken:
            raise kind(problem, where=settings.source.get(key, key), fix=fix)


def _bitsandbytes(values: Mapping[str, Any]) -> list[Refusal]:
    import torch

    optim, quantized = str(values.get("optim", "")), values.get("load_in_4bit") or values.get("load_in_8bit")
    needed = quantized or any(part in optim for part in ("8bit", "paged", "bnb"))
    return [
        (
            quantized and not torch.cuda.is_available(),
            Unavailable,
            "load_in_4bit",
            "load_in_4bit and load_in_8bit (QLoRA) need a GPU, and this machine shows none",
            "run on a GPU, or leave quantization out and use LoRA alone (use_peft: true)",
        ),
        (
            needed and importlib.util.find_spec("bitsandbytes") is None,
            Unavailable,
            "load_in_4bit" if quantized else "optim",
            f"{'QLoRA' if quantized else optim} needs the package bitsandbytes, which is not installed",
            "pip install 'podtune[qlora]'",
        ),
    ]
