"""Size and cost of a model, from its configuration alone: no weights are read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from podtune.plan.models import shape_of
from podtune.plan.plan import Plan, estimate
from podtune.plan.setup import TrainingSetup
from podtune.plan.shapes import Opaque, Shape
from podtune.run.errors import UserError
from podtune.sft.data.tokenizer import load_tokenizer
from podtune.sft.model.flops import Parameters, counted_flops_per_token, flops_per_token, parameter_count
from podtune.sft.source.model import Origin, base_of, load_config, locate_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

STRATEGIES = ("ddp", "fsdp", "fsdp-grad-op")
RANKS = (2, 8)


@dataclass(frozen=True)
class FlopsPerToken:
    """Floating-point operations of one token, forward and backward.

    ``counted`` by torch (None for a mixture of experts), by the ``formula`` 6 N + 12 L H Q T, and by 6 N
    alone.
    """

    sequence_length: int
    counted: float | None
    formula: float
    six_n: float


@dataclass(frozen=True)
class TokenizerInfo:
    """Special tokens and chat template; ``stop_token_trained`` is None without generation markers."""

    size: int
    fits_embedding: bool
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    pad_is_eos: bool
    chat_template: bool
    generation_markers: bool
    stop_token_trained: bool | None


@dataclass(frozen=True)
class PlannedMemory:
    """Planned memory of a rank, by kind."""

    strategy: str
    world_size: int
    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    buffers_gib: float
    total_gib: float

    @classmethod
    def of(cls, plan: Plan) -> PlannedMemory:
        """Take the memory of ``plan``."""
        return cls(**{name: getattr(plan, name) for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class ModelInfo:
    """Answer of ``podtune model info``; its fields are the keys of ``--json``."""

    model: str
    architecture: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int | None
    parameters: Parameters
    flops_per_token: FlopsPerToken
    tokenizer: TokenizerInfo
    batch_size_per_rank: int
    precision: str
    memory: list[PlannedMemory]


def model_info(
    name: str | os.PathLike[str],
    *,
    sequence_length: int | None = None,
    batch_size: int = 8,
    precision: str = "bf16-mixed",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> ModelInfo:
    """Read a model's configuration and tokenizer, and plan its memory for ``batch_size`` rows a rank.

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
    shape = _planned_shape(origin, parameters, length)
    return ModelInfo(
        model=str(name),
        architecture=(config.architectures or [config.model_type])[0],
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        vocabulary=text.vocab_size,
        context=context,
        parameters=parameters,
        flops_per_token=FlopsPerToken(
            sequence_length=length,
            counted=counted_flops_per_token(config, length),
            formula=flops_per_token(config, length),
            six_n=6.0 * parameters.multiplied,
        ),
        tokenizer=_tokenizer_info(origin, config, trust_remote_code),
        batch_size_per_rank=batch_size,
        precision=precision,
        memory=[PlannedMemory.of(plan) for plan in _plans(shape, batch_size, precision)],
    )


def _tokenizer_info(origin: Origin, config: PreTrainedConfig, trust_remote_code: bool) -> TokenizerInfo:
    from trl.chat_template_utils import has_generation_markers, is_chat_template_stop_token_trained

    tokenizer = load_tokenizer(origin, trust_remote_code=trust_remote_code)
    markers = has_generation_markers(tokenizer.chat_template or "")
    return TokenizerInfo(
        size=len(tokenizer),
        fits_embedding=max(tokenizer.get_vocab().values()) < config.get_text_config().vocab_size,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        pad_is_eos=tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id,
        chat_template=bool(tokenizer.chat_template),
        generation_markers=markers,
        stop_token_trained=is_chat_template_stop_token_trained(tokenizer) if markers else None,
    )


def _planned_shape(origin: Origin, parameters: Parameters, sequence_length: int) -> Shape:
    """Read the planner's shape; of an architecture that the planner does not know, the parameters alone."""
    try:
        return shape_of(str(origin.file("config.json")), sequence_length)
    except UserError:
        return Opaque(parameters.total, sequence_length)


def _plans(shape: Shape, batch_size: int, precision: str) -> list[Plan]:
    """Plan one process, then each strategy over 2 and 8 ranks with the same rows a rank."""
    worlds = [("single", 1), *((strategy, ranks) for strategy in STRATEGIES for ranks in RANKS)]
    return [
        estimate(TrainingSetup(shape, strategy, ranks, precision, batch_size * ranks))
        for strategy, ranks in worlds
    ]
