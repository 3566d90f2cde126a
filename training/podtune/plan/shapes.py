"""Parameters, FLOPs, activations and boundaries of a model, from its shape alone. Needs no torch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

Checkpointing = Literal["none", "selective", "every-second", "full", "sequential"]


@dataclass(frozen=True)
class Kept:
    """Widths that decide how many bytes a layer keeps.

    Args:
        stored: bytes of an element of the residual stream: 4 on 32-bit weights, also under autocast.
        compute: bytes of what the products put out.
        norms_trained: whether the norms' gains are, whose gradient needs their input.
        adapter_dropout: each LoRA adapter drops some of its input, and so keeps a copy of its own.
    """

    stored: float
    compute: float
    norms_trained: bool = True
    adapter_dropout: bool = False
    selective: bool = False


@dataclass(frozen=True)
class Transformer:
    """A decoder like GPT-2 (``gated`` False, learned ``positions``, biases) or like Llama (``gated`` alone).

    ``vocabulary`` counts the rows of the embedding; ``folder`` is that of the config.json it was read from.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    sequence_length: int
    head_dim: int
    gated: bool = True
    tied: bool = True
    positions: int = 0
    biases: bool = False
    folder: str = ""

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of a layer's linear maps: query, key, value, output, then the MLP's."""
        h, q, kv, i = self.hidden, self.attention_width, self.kv_heads * self.head_dim, self.intermediate
        mlp = ((h, i), (h, i), (i, h)) if self.gated else ((h, i), (i, h))
        return ((h, q), (h, kv), (h, kv), (q, h), *mlp)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: linear maps, their biases, two norms."""
        weights = sum(inputs * outputs + (outputs if self.biases else 0) for inputs, outputs in self.linears)
        return weights + 2 * self.hidden * (2 if self.biases else 1)

    @property
    def parameters(self) -> int:
        """All parameters; tied embeddings once."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2) + self.positions * self.hidden
        return embeddings + self.layers * self.layer_parameters + self.hidden * (2 if self.biases else 1)

    @property
    def flops_per_sample(self) -> float:
        """Forward and backward FLOPs of one sequence: 6 a weight and token, and attention's 12 L d T a token.

        PaLM (Chowdhery et al. 2022), appendix B, which counts the whole T x T square also under a causal
        mask. Looking up an embedding is free; the output head is not.
        """
        weights = self.divisible + self.vocabulary * self.hidden
        return self.sequence_length * (
            6.0 * weights + 12.0 * self.layers * self.attention_width * self.sequence_length
        )

    @property
    def units(self) -> int:
        """Blocks that are wrapped, cut or checkpointed one by one."""
        return self.layers

    @property
    def divisible(self) -> int:
        """Parameters that tensor parallelism divides: the layers' linear maps."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linears)

    def lora_parameters(self, rank: int) -> int:
        """Parameters of LoRA of ``rank`` on every linear map of every layer (Hu et al. 2021, section 4.1)."""
        return self.layers * sum(rank * (inputs + outputs) for inputs, outputs in self.linears)

    def layer_bytes(self, kept: Kept, tensor_ranks: int = 1) -> float:
        """Bytes that one layer keeps for its backward pass, for one sequence.

        Korthikanti et al. 2022 (Reducing Activation Recomputation), section 4.1, without dropout's masks and
        with flash attention (no T x T scores, a log-sum-exp of 4 bytes a head and token). For GPT-2's shape
        in 16 bits this is 32 h a token: the paper's 34 less its two bytes of masks. Over ``tensor_ranks``
        everything is split but the norms' and the linear maps' full-width inputs (equation 2).

        A Llama-like layer keeps what transformers' modules do: the norm's input and quotient in 32 bits, and,
        where autocast runs on 32-bit weights, a 16-bit copy of the norm's output for each linear map.
        """
        h, q, kv, i = self.hidden, self.attention_width, self.kv_heads * self.head_dim, self.intermediate
        c = kept.compute
        maps = (3, 2) if self.gated else (1, 1)  # linear maps behind the first norm and behind the second
        attention = c * (2 * q + 2 * kv) + 4 * self.heads
        # gate, its activation, up and their product; or up and its activation
        mlp = c * (4 if self.gated else 2) * i
        norms = 0.0
        for count in maps:
            if not self.gated:
                norms += kept.stored * h + c * h
            elif kept.stored == 4:
                norms += 8 * h + (c * count if c < 4 else 4) * h
            else:
                norms += 4 * h + (2 * h if kept.norms_trained else 0) + 2 * h
        if kept.adapter_dropout:  # each adapter's own 16-bit copy of its input, and dropout's mask of a byte
            inputs = sum(width for width, _ in self.linears)
            shared = c * (2 * h + q + i)
            norms += 3 * inputs - shared
        if kept.selective:
            # the layer's input and what the matmuls and attention gave; the rest is computed again
            half = c * (2 if self.gated else 1) * i
            return self.sequence_length * (kept.stored * 3.0 * h + (attention + half) / tensor_ranks)
        return self.sequence_length * (norms + (attention + mlp) / tensor_ranks)

    def backward_bytes(self, kept: Kept, tensor_ranks: int = 1) -> float:
        """Bytes of gradients alive at once in a layer's backward pass, for one sequence.

        Of its widest tensors, and of the residual stream before and behind it.
        """
        widest = kept.compute * (2.0 if self.gated else 1.0) * self.intermediate / tensor_ranks
        widest += 2.0 * kept.adapter_dropout * self.intermediate  # the input of the last map is the widest
        return self.sequence_length * (widest + 2 * kept.stored * self.hidden)

    @property
    def head_elements(self) -> int:
        """Logits of one sequence."""
        return self.sequence_length * self.vocabulary

    @property
    def boundary_elements(self) -> int:
        """Elements that cross from one layer to the next for one sequence."""
        return self.sequence_length * self.hidden

    @property
    def largest_unit(self) -> int:
        """Parameters of the largest unit that FSDP gathers at once."""
        return max(self.layer_parameters, self.parameters - self.layers * self.layer_parameters)


@dataclass(frozen=True)
class ConvNet:
    """A ResNet for square RGB images: ``blocks`` of the four stages, the first of ``width`` channels."""

    block: Literal["basic", "bottleneck"]
    blocks: tuple[int, int, int, int]
    stem: Literal["3x3", "7x7"]
    classes: int
    image_size: int
    width: int = 64

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of the four stages, before a bottleneck widens them."""
        return tuple(self.width * 2**stage for stage in range(4))

    @property
    def expansion(self) -> int:
        """Output channels of a block over its width."""
        return 4 if self.block == "bottleneck" else 1

    @property
    def features(self) -> int:
        """Channels that the classifier reads."""
        return self.widths[-1] * self.expansion

    @functools.cached_property
    def convolutions(self) -> tuple[tuple[int, int, int, int], ...]:
        """(input channels, output channels, kernel, output side) of each convolution.

        He et al. 2015 (Deep Residual Learning), table 1; the bottleneck's stride sits in its 3 x 3
        convolution.
        """
        large = self.stem == "7x7"
        side = self.image_size // 2 if large else self.image_size
        convolutions = [(3, self.width, 7 if large else 3, side)]
        side = side // 2 if large else side
        channels = self.width
        for stage, (width, count) in enumerate(zip(self.widths, self.blocks, strict=True)):
            outputs = width * self.expansion
            for block in range(count):
                before = side
                if stage and not block:
                    side = math.ceil(side / 2)
                if self.block == "basic":
                    convolutions += [(channels, width, 3, side), (width, width, 3, side)]
                else:
                    convolutions += [(channels, width, 1, before), (width, width, 3, side)]
                    convolutions.append((width, outputs, 1, side))
                if channels != outputs:
                    convolutions.append((channels, outputs, 1, side))
                channels = outputs
        return tuple(convolutions)

    @property
    def parameters(self) -> int:
        """Convolutions without bias, batch norm's gain and bias, the classifier with bias."""
        weights = sum(k * k * inputs * outputs + 2 * outputs for inputs, outputs, k, _ in self.convolutions)
        return weights + (self.features + 1) * self.classes

    @property
    def flops_per_sample(self) -> float:
        """Forward and backward FLOPs of one image: three times 2 k^2 C_in C_out H W a convolution."""
        forward = sum(
            2.0 * k * k * inputs * outputs * side * side for inputs, outputs, k, side in self.convolutions
        )
        return 3 * (forward + 2.0 * self.features * self.classes)

    @property
    def units(self) -> int:
        """Residual blocks."""
        return sum(self.blocks)

    divisible = 0  # convolutions are not divided

    def layer_bytes(self, kept: Kept, tensor_ranks: int = 1) -> float:
        """Bytes that one block keeps for one image, on average: each output before and after its norm."""
        outputs = sum(outputs * side * side for _, outputs, _, side in self.convolutions)
        return 2.0 * kept.compute * outputs / self.units / tensor_ranks

    def backward_bytes(self, kept: Kept, tensor_ranks: int = 1) -> float:
        """Of the largest block: two gradients as wide as its output."""
        largest = max(outputs * side * side for _, outputs, _, side in self.convolutions)
        return 2.0 * kept.compute * largest / tensor_ranks

    @property
    def head_elements(self) -> int:
        """Scores of one image."""
        return self.classes

    @property
    def boundary_elements(self) -> int:
        """Elements that cross the cut in the middle of the network, after the second stage, for one image."""
        side = self.image_size // (8 if self.stem == "7x7" else 2)
        return self.widths[1] * self.expansion * side * side

    @property
    def largest_unit(self) -> int:
        """Parameters of the largest block, about: the last stage's share."""
        return max(k * k * inputs * outputs for inputs, outputs, k, _ in self.convolutions) * 2


@dataclass(frozen=True)
class Opaque:
    """A model known by its count of parameters: no activations, 6 FLOPs a parameter and token."""

    parameters: int
    sequence_length: int = 1024

    units = 1
    head_elements = 0
    boundary_elements = 0
    largest_unit = 0

    @property
    def divisible(self) -> int:
        """Taken as all, for want of the shape."""
        return self.parameters

    @property
    def flops_per_sample(self) -> float:
        """6 N a token (Kaplan et al. 2020, section 2.1)."""
        return 6.0 * self.parameters * self.sequence_length

    def layer_bytes(self, kept: Kept, tensor_ranks: int = 1) -> float:
        """Unknown, and counted as nothing."""
        return 0.0

    backward_bytes = layer_bytes


Shape = Transformer | ConvNet | Opaque
