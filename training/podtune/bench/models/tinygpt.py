"""TinyGPT: the decoder of GPT-2 (Radford et al. 2019), small enough to read in a minute."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from podtune.bench.models.stack import Stack
from podtune.plan.shapes import Transformer


class Embedding(nn.Module):
    """Token and learned position embeddings: (batch, time) ids to (batch, time, width)."""

    def __init__(self, size: Transformer) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.hidden)
        self.positions = nn.Embedding(size.sequence_length, size.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return embedded


class Attention(nn.Module):
    """Causal self-attention.

    ``qkv`` puts out head after head, each with its query, key and value, so that a slice of its rows is a set
    of whole heads: that is what lets tensor parallelism cut it by column without shuffling.
    """

    def __init__(self, size: Transformer) -> None:
        super().__init__()
        self.head_width = size.hidden // size.heads
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden)
        self.out = nn.Linear(size.hidden, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same; a rank may hold a part of the heads, counted off ``qkv``."""
        batch, time, _ = x.shape
        query, key, value = self.qkv(x).view(batch, time, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, -1))
        return output


class Block(nn.Module):
    """Attention and a four times wider MLP, each behind a layer norm and beside the residual stream."""

    def __init__(self, size: Transformer) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.hidden)
        self.attention = Attention(size)
        self.mlp_norm = nn.LayerNorm(size.hidden)
        self.up = nn.Linear(size.hidden, size.intermediate)
        self.down = nn.Linear(size.intermediate, size.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))
        return output


class Head(nn.Module):
    """The last norm and the projection to the vocabulary, whose weight is the token embedding's."""

    def __init__(self, size: Transformer, tied: nn.Embedding) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.hidden)
        # no memory for a weight that the next line replaces
        self.linear = nn.Linear(size.hidden, size.vocabulary, bias=False, device="meta")
        self.linear.weight = tied.weight

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to (batch, time, vocabulary)."""
        logits: Tensor = self.linear(self.norm(x))
        return logits


class TinyGPT(Stack):
    """Embedding, ``layers`` blocks, head.

    The padded rows of the vocabulary are never a target and learn to be unlikely.
    """

    def __init__(self, size: Transformer) -> None:
        embedding = Embedding(size)
        super().__init__(
            [embedding, *(Block(size) for _ in range(size.layers)), Head(size, embedding.tokens)]
        )
        self.tensor_plan = {
            "blocks.*.attention.qkv": "colwise",
            "blocks.*.attention.out": "rowwise",
            "blocks.*.up": "colwise",
            "blocks.*.down": "rowwise",
        }
        self.initialise(size.layers)

    def initialise(self, layers: int) -> None:
        """GPT-2's weights: deviation 0.02, 1/sqrt(2 layers) of it where a layer writes to the residual."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                writes_residual = name.endswith(("attention.out", "down"))
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * layers) if writes_residual else 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
