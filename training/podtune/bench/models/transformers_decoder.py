"""A transformers causal language model as a stack of blocks: embedding, layers, norm and head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from podtune.bench.models.stack import Stack
from podtune.run.errors import ConfigError

DIVISIBLE = {"colwise", "rowwise"}


class Layer(nn.Module):
    """One decoder layer, which works out the rotary position embeddings that its model would hand it.

    No mask is passed: the batches are full, and transformers' SDPA attention is then causal.
    """

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        output: Any = self.layer(
            x, attention_mask=None, position_ids=positions, position_embeddings=self.rotary(x, positions)
        )
        # some families' layers give a tuple
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        return hidden


class Head(nn.Module):
    """The last norm and the projection to the vocabulary."""

    def __init__(self, norm: nn.Module, linear: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to (batch, time, vocabulary)."""
        logits: Tensor = self.linear(self.norm(x))
        return logits


class TransformersDecoder(Stack):
    """Decoders built like Llama's (Llama, SmolLM3, Qwen, Mistral, ...).

    Raises:
        UserError: a model with other parts.
    """

    def __init__(self, path: str, *, pretrained: bool) -> None:
        import transformers

        options: dict[str, Any] = {"attn_implementation": "sdpa", "dtype": torch.float32}
        if pretrained:
            model = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
        else:
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.from_pretrained(path), **options
            )
        decoder = model.get_decoder()
        parts: list[Any] = [
            getattr(decoder, name, None) for name in ("embed_tokens", "layers", "norm", "rotary_emb")
        ]
        if any(part is None for part in parts) or model.get_output_embeddings() is None:
            raise ConfigError(
                f"{type(model).__name__} is not built like Llama (embed_tokens, layers, norm, rotary_emb, "
                "lm_head)",
                where=f"--model hf:{path}",
                fix="take a decoder of the Llama family: Llama, SmolLM3, Qwen, Mistral, Gemma",
            )
        embedding, layers, norm, rotary = parts
        super().__init__(
            [
                embedding,
                *(Layer(layer, rotary) for layer in layers),
                Head(norm, model.get_output_embeddings()),
            ]
        )
        # transformers states the division itself: "layers.*.self_attn.q_proj": "colwise".
        plan = getattr(model.config, "base_model_tp_plan", None) or {}
        self.tensor_plan = {
            name.replace("layers.*", "blocks.*.layer"): how
            for name, how in plan.items()
            if how in DIVISIBLE and name.startswith("layers.*")
        }
