"""Parameters of a model, and the floating-point operations of one token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from podtune.sft.source.model import explained

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Parameters:
    """Counts of a model."""

    total: int
    non_embedding: int  # outside the input embedding
    # in matrix products for one token: without experts that it is not routed to, and without an embedding
    # that is only looked up (one tied to the head is multiplied with)
    multiplied: int


def parameter_count(config: PreTrainedConfig) -> Parameters:
    """Count parameters from the configuration, so that sharded or quantized weights count in full."""
    import torch
    from transformers import AutoModelForCausalLM

    trusted = type(config).__module__.startswith("transformers_modules")  # then its code has run already
    with torch.device("meta"), explained(str(config.name_or_path or config.model_type), "architecture"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=trusted)
    total = sum(weight.numel() for weight in model.parameters())
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    lookup_only = head is None or head.weight is not embedding
    text = config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    idle, experts = 0, next(filter(None, (getattr(text, name, None) for name in names)), None)
    if experts:
        routed = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
        idle = routed * (experts - text.num_experts_per_tok) // experts
    return Parameters(
        total, total - embedding.numel(), total - idle - (embedding.numel() if lookup_only else 0)
    )


def flops_per_token(config: PreTrainedConfig, sequence_length: int, *, trained_share: float = 1.0) -> float:
    """Compute the model FLOPs of a token, forward and backward, in a row of T tokens: 6 N + 12 L H Q T.

    PaLM (Chowdhery et al. 2022, appendix B): N parameters in matrix products, L layers, H heads of Q, T
    tokens; attention counts all T x T products, as is usual, although a causal kernel needs half.
    Recomputation never counts. ``trained_share`` is the share of N whose weight gradients are computed: about
    0 for LoRA, where 2 of the 6 fall away.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    attention = 12 * text.num_hidden_layers * heads * head_dim * sequence_length
    return float((4 + 2 * trained_share) * parameter_count(config).multiplied + attention)
