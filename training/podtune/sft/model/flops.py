"""Parameters of a model, and the floating-point operations of one token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from podtune.sft.source.model import explained

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Parameters:
    """Counts of a model: all, those outside the input embedding, and those in matrix products for one token.

    The last leaves out an embedding that is only looked up (one tied to the head is multiplied with) and
    experts that a token is not routed to.
    """

    total: int
    non_embedding: int
    multiplied: int


def parameter_count(model_or_config: PreTrainedModel | PreTrainedConfig) -> Parameters:
    """Count parameters from the configuration, so that sharded or quantized weights count in full."""
    config = _config(model_or_config)
    model = meta_model(config)
    total = sum(weight.numel() for weight in model.parameters())
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    lookup_only = head is None or head.weight is not embedding
    text = config.get_text_config()
    experts = next(
        (
            value
            for name in ("num_experts", "num_local_experts", "n_routed_experts")
            if (value := getattr(text, name, None))
        ),
        None,
    )
    idle = 0
    if experts:
        routed = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
        idle = routed * (experts - text.num_experts_per_tok) // experts
    return Parameters(
        total, total - embedding.numel(), total - idle - (embedding.numel() if lookup_only else 0)
    )


def flops_per_token(
    model_or_config: PreTrainedModel | PreTrainedConfig, sequence_length: int, *, trained_share: float = 1.0
) -> float:
    """Compute the model FLOPs of a token, forward and backward, in a row of T tokens: 6 N + 12 L H Q T.

    PaLM (Chowdhery et al. 2022, appendix B): N parameters in matrix products, L layers, H heads of Q, T
    tokens; attention counts all T x T products, as is usual, although a causal kernel needs half.
    Recomputation never counts. ``trained_share`` is the share of N whose weight gradients are computed: about
    0 for LoRA, where 2 of the 6 fall away.
    """
    text = _config(model_or_config).get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    attention = 12 * text.num_hidden_layers * heads * head_dim * sequence_length
    return float((4 + 2 * trained_share) * parameter_count(model_or_config).multiplied + attention)


def counted_flops_per_token(config: PreTrainedConfig, sequence_length: int) -> float | None:
    """Count the same by ``torch.utils.flop_counter`` over one row on the meta device.

    None for a mixture of experts, whose grouped products the counter does not know.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    parameters = parameter_count(config)
    lookup = parameters.total - parameters.non_embedding
    if parameters.multiplied not in (parameters.total, parameters.total - lookup):
        return None
    with torch.device("meta"):
        model = meta_model(config, attn_implementation="eager")
        row = torch.zeros(1, sequence_length, dtype=torch.long)
        # a ready mask: making one looks at values, which meta tensors do not have
        mask = torch.zeros(1, 1, sequence_length, sequence_length, dtype=model.dtype)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=row, attention_mask=mask, use_cache=False).logits.sum().backward()
    return float(counter.get_total_flops()) / sequence_length


def meta_model(config: PreTrainedConfig, attn_implementation: str | None = None) -> PreTrainedModel:
    """Build the architecture without weights: shapes only, no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    trusted = type(config).__module__.startswith("transformers_modules")  # then its code has run already
    with torch.device("meta"), explained(str(config.name_or_path or config.model_type), "architecture"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attn_implementation, dtype=torch.bfloat16, trust_remote_code=trusted
        )
    return model


def _config(model_or_config: PreTrainedModel | PreTrainedConfig) -> PreTrainedConfig:
    config: PreTrainedConfig = getattr(model_or_config, "config", model_or_config)
    return config
