"""What a model is and costs, from its configuration alone: no weights are read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from podtune.plan.models import shape_of
from podtune.plan.plan import Plan, estimate
from podtune.plan.setup import TrainingSetup
from podtune.plan.shapes import Opaque, Shape
from podtune.run.errors import UserError
from podtune.sft.data.tokenizer import load_tokenizer
from podtune.sft.model.flops import Parameters, counted_flops_per_token, flops_per_token, parameter_count
from podtune.sft.model.template import has_generation_markers, stop_token_trained
from podtune.sft.source.model import Origin, base_of, load_config, locate_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

STRATEGIES = ("ddp", "fsdp", "fsdp-grad-op")
RANKS = (2, 8)


def model_info(
    name: str | os.PathLike[str],
    *,
    sequence_length: int | None = None,
    batch_size: int = 8,
    precision: str = "bf16-mixed",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Sizes, parameters, FLOPs a token, tokenizer, and memory a rank by strategy for ``batch_size`` rows a
    rank.

    Raises:
        UserError: the model or its tokenizer cannot be found or read.
    """
    origin = locate_model(name, revision)
    if origin.is_adapter:
        origin = base_of(origin)
    config = load_config(origin, trust_remote_code)
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    length = sequence_length or min(2048, context or 2048)
    parameters = parameter_count(config)
    return {
        "model": str(name),
        "architecture": (config.architectures or [config.model_type])[0],
        "layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "heads": text.num_attention_heads,
        "kv_heads": getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        "vocabulary": text.vocab_size,
        "context": context,
        "parameters": {
            "total": parameters.total,
            "non_embedding": parameters.non_embedding,
            "multiplied": parameters.multiplied,
        },
        "flops_per_token": {
            "sequence_length": length,
            "counted": counted_flops_per_token(config, length),
            "formula": flops_per_token(config, length),
            "six_n": 6.0 * parameters.multiplied,
        },
        "tokenizer": tokenizer_info(origin, config, trust_remote_code),
        "batch_size_per_rank": batch_size,
        "precision": precision,
        "memory": [
            plan_row(plan) for plan in plans(model_shape(origin, parameters, length), batch_size, precision)
        ],
    }


def tokenizer_info(
    origin: Origin, config: PreTrainedConfig, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Special tokens and what the chat template can do; ``stop_token_trained`` is None without generation
    markers.
    """
    tokenizer = load_tokenizer(origin, trust_remote_code=trust_remote_code)
    markers = has_generation_markers(tokenizer)
    return {
        "size": len(tokenizer),
        "fits_embedding": max(tokenizer.get_vocab().values()) < config.get_text_config().vocab_size,
        **{f"{role}_token": getattr(tokenizer, f"{role}_token") for role in ("bos", "eos", "pad")},
        "pad_is_eos": tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id,
        "chat_template": bool(tokenizer.chat_template),
        "generation_markers": markers,
        "stop_token_trained": stop_token_trained(tokenizer) if markers else None,
    }


def model_shape(origin: Origin, parameters: Parameters, sequence_length: int) -> Shape:
    """The planner's shape of the model; for an architecture that it does not know, the parameters alone."""
    try:
        return shape_of(str(origin.file("config.json")), sequence_length)
    except UserError:
        return Opaque(parameters.total, sequence_length)


def plans(shape: Shape, batch_size: int, precision: str) -> list[Plan]:
    """One process, then each strategy over 2 and 8 ranks with the same rows a rank."""
    worlds = [("single", 1), *((strategy, ranks) for strategy in STRATEGIES for ranks in RANKS)]
    return [
        estimate(TrainingSetup(shape, strategy, ranks, precision, batch_size * ranks))
        for strategy, ranks in worlds
    ]


def plan_row(plan: Plan) -> dict[str, Any]:
    """The memory figures of a plan, GiB a rank."""
    kinds = ("weights", "gradients", "optimizer", "activations", "buffers", "total")
    return {"strategy": plan.strategy, "world_size": plan.world_size} | {
        f"{kind}_gib": getattr(plan, f"{kind}_gib") for kind in kinds
    }
