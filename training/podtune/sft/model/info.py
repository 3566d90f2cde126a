"""Size and cost of a model, from its configuration alone: no weights are read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from podtune.sft.data.tokenizer import load_tokenizer
from podtune.sft.model.flops import Parameters, flops_per_token, parameter_count
from podtune.sft.source.model import Origin, base_of, load_config, locate_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class TokenizerInfo:
    """Special tokens and chat template."""

    size: int
    fits_embedding: bool
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: bool
    generation_markers: bool
    stop_token_trained: bool | None  # None without generation markers


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
    sequence_length: int
    flops_per_token: float  # forward and backward, in a row of that length
    tokenizer: TokenizerInfo


def model_info(
    name: str | os.PathLike[str],
    *,
    sequence_length: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> ModelInfo:
    """Read a model's configuration and tokenizer; of an adapter, its base's. Raises :class:`UserError`."""
    origin = locate_model(name, revision)
    if origin.is_adapter:
        origin = base_of(origin)
    config = load_config(origin, trust_remote_code)
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    length = sequence_length or min(2048, context or 2048)
    return ModelInfo(
        model=str(name),
        architecture=(config.architectures or [config.model_type])[0],
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        vocabulary=text.vocab_size,
        context=context,
        parameters=parameter_count(config),
        sequence_length=length,
        flops_per_token=flops_per_token(config, length),
        tokenizer=_tokenizer_info(origin, config, trust_remote_code),
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
        chat_template=bool(tokenizer.chat_template),
        generation_markers=markers,
        stop_token_trained=is_chat_template_stop_token_trained(tokenizer) if markers else None,
    )
