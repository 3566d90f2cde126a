"""What a model asks of a machine, from its shape alone: parameters, FLOPs, activations, boundaries. Needs no
torch.

Activations count **elements kept for the backward pass**; the planner multiplies by the width of the
precision.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

from podtune.run.errors import USAGE, UserError

Checkpointing = Literal["none", "selective", "full", "sequential"]


@dataclass(frozen=True)
class Transformer:
    """A decoder: GPT-2 like (``gated`` False, learned ``positions``, biases) or Llama like (``gated`` True,
    neither).

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

    sample = "sequence"

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
        weights = (
            self.layers * sum(inputs * outputs for inputs, outputs in self.linears)
            + self.vocabulary * self.hidden
        )
        return self.sequence_length * (
            6.0 * weights + 12.0 * self.layers * self.attention_width * self.sequence_length
        )

    @property
    def units(self) -> int:
        """Blocks that are wrapped, cut or checkpointed one by one."""
        return self.layers

    @property
    def divisible(self) -> int:
        """Parameters that tensor parallelism divides: the layers' linear maps. Embedding, head and norms stay
        whole.
        """
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linears)

    def lora_parameters(self, rank: int) -> int:
        """Trainable parameters of LoRA of ``rank`` on every linear map of every layer (Hu et al. 2021,
        section 4.1).
        """
        return self.layers * sum(rank * (inputs + outputs) for inputs, outputs in self.linears)

    def layer_elements(self, checkpointing: Checkpointing = "none", tensor_ranks: int = 1) -> float:
        """Elements that one layer keeps for one sequence.

        Korthikanti et al. 2022 (Reducing Activation Recomputation), section 4.1, without dropout's masks,
        with flash attention (no T x T scores; its log-sum-exp is one fp32 a head and token, here two
        elements), grouped key and value heads and, for a gated MLP, four tensors of its width (gate, up,
        activated gate, product) in place of two. For GPT-2's shape this is 16 h a token: the paper's 34 s b h
        bytes less its two bytes of masks. Over ``tensor_ranks`` everything is split but the norms' and the
        linear maps' full-width inputs (equation 2).
        """
        h, q, kv = self.hidden, self.attention_width, self.kv_heads * self.head_dim
        if checkpointing in ("full", "sequential"):
            return float(self.boundary_elements)
        # q, k, v, context, up (gate)
        matmuls = q + 2 * kv + q + 2 * self.heads + (2 if self.gated else 1) * self.intermediate
        pointwise = (2 if self.gated else 1) * self.intermediate  # activated (gate, product)
        full_width = 4 * h  # two norms' inputs, and their outputs, which the linear maps keep
        # the layer's input and what the matmuls and attention gave; the rest is computed again
        if checkpointing == "selective":
            return self.sequence_length * (3.0 * h + matmuls / tensor_ranks)
        return self.sequence_length * (full_width + (matmuls + pointwise) / tensor_ranks)

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
    """A ResNet for square RGB images. ``blocks`` counts the residual blocks of the four stages."""

    block: Literal["basic", "bottleneck"]
    blocks: tuple[int, int, int, int]
    stem: Literal["3x3", "7x7"]
    classes: int
    image_size: int

    sample = "image"
    WIDTHS = (64, 128, 256, 512)

    @property
    def expansion(self) -> int:
        """Output channels of a block over its width."""
        return 4 if self.block == "bottleneck" else 1

    @property
    def features(self) -> int:
        """Channels that the classifier reads."""
        return self.WIDTHS[-1] * self.expansion

    @functools.cached_property
    def convolutions(self) -> tuple[tuple[int, int, int, int], ...]:
        """(input channels, output channels, kernel, output side) of each convolution.

        He et al. 2015 (Deep Residual Learning), table 1; the bottleneck's stride sits in its 3 x 3
        convolution.
        """
        large = self.stem == "7x7"
        side = self.image_size // 2 if large else self.image_size
        convolutions = [(3, 64, 7 if large else 3, side)]
        side = side // 2 if large else side
        channels = 64
        for stage, (width, count) in enumerate(zip(self.WIDTHS, self.blocks, strict=True)):
            for block in range(count):
                before, outputs = side, width * self.expansion
                if stage and not block:
                    side = math.ceil(side / 2)
                if self.block == "basic":
                    convolutions += [(channels, width, 3, side), (width, width, 3, side)]
                else:
                    convolutions += [
                        (channels, width, 1, before),
                        (width, width, 3, side),
                        (width, outputs, 1, side),
                    ]
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

    def layer_elements(self, checkpointing: Checkpointing = "none", tensor_ranks: int = 1) -> float:
        """Elements that one block keeps for one image, on average: each convolution's output twice (before
        and after norm).
        """
        kept = 2.0 * sum(outputs * side * side for _, outputs, _, side in self.convolutions) / self.units
        # of the tensors of a block, its input alone is kept
        checkpoints = len(self.convolutions) / self.units * 2
        return kept / checkpoints if checkpointing in ("full", "sequential") else kept / tensor_ranks

    @property
    def head_elements(self) -> int:
        """Scores of one image."""
        return self.classes

    @property
    def boundary_elements(self) -> int:
        """Elements that cross the cut in the middle of the network, after the second stage, for one image."""
        side = self.image_size // (8 if self.stem == "7x7" else 2)
        return self.WIDTHS[1] * self.expansion * side * side

    @property
    def largest_unit(self) -> int:
        """Parameters of the largest block, about: the last stage's share."""
        return max(k * k * inputs * outputs for inputs, outputs, k, _ in self.convolutions) * 2

    def lora_parameters(self, rank: int) -> int:
        """LoRA is for transformers.

        Raises:
            UserError: always.
        """
        raise UserError(
            "LoRA needs a transformer", where="--lora-r", fix="leave it out for a ResNet", code=USAGE
        )


@dataclass(frozen=True)
class Opaque:
    """A model of which only the count of parameters is known: no activations, 6 FLOPs a parameter and
    token.
    """

    parameters: int
    sequence_length: int = 1024

    sample = "sequence"
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

    def layer_elements(self, checkpointing: Checkpointing = "none", tensor_ranks: int = 1) -> float:
        """Unknown, hence not counted."""
        return 0.0

    def lora_parameters(self, rank: int) -> int:
        """The shape decides how large adapters are.

        Raises:
            UserError: always.
        """
        raise UserError(
            ("LoRA's size follows from the layers' shapes"),
            where="--lora-r",
            fix="give --model instead of --params",
            code=USAGE,
        )


Shape = Transformer | ConvNet | Opaque
