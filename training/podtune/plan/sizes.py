"""The sizes of the benchmark's models, as plain numbers. Needs no torch: the planner, the sweep and the
models share them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VOCABULARY_MULTIPLE = 64  # a row count that matrix units like; the padding rows are never a target


@dataclass(frozen=True)
class TransformerSize:
    """A GPT-2 shaped decoder: tied embeddings, learned positions, an MLP four times as wide as the model.

    ``vocabulary`` counts real tokens; the embedding has :attr:`padded_vocabulary` rows.
    """

    layers: int
    heads: int
    hidden: int
    sequence_length: int
    vocabulary: int

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding: ``vocabulary`` rounded up to a multiple of 64."""
        return -(-self.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def intermediate(self) -> int:
        """Width of the MLP."""
        return 4 * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters without the padding rows, so that 124M is GPT-2's own 124,439,808.

        A layer holds 12 h^2 weights (query, key, value, output: 4; MLP: 8) and 13 h biases and norm gains.
        """
        h = self.hidden
        return (self.vocabulary + self.sequence_length) * h + self.layers * (12 * h * h + 13 * h) + 2 * h


@dataclass(frozen=True)
class ResNetSize:
    """A ResNet for square RGB images. ``blocks`` counts the residual blocks of the four stages."""

    block: Literal["basic", "bottleneck"]
    blocks: tuple[int, int, int, int]
    stem: Literal["3x3", "7x7"]
    classes: int
    image_size: int

    WIDTHS = (64, 128, 256, 512)

    @property
    def expansion(self) -> int:
        """Output channels of a block over its width."""
        return 4 if self.block == "bottleneck" else 1


SIZES: dict[str, TransformerSize | ResNetSize] = {
    "tinygpt-test": TransformerSize(layers=4, heads=4, hidden=128, sequence_length=128, vocabulary=512),
    "tinygpt-124m": TransformerSize(layers=12, heads=12, hidden=768, sequence_length=1024, vocabulary=50257),
    "tinygpt-350m": TransformerSize(layers=24, heads=16, hidden=1024, sequence_length=1024, vocabulary=50257),
    "resnet18-cifar": ResNetSize(block="basic", blocks=(2, 2, 2, 2), stem="3x3", classes=10, image_size=32),
    "resnet50": ResNetSize(block="bottleneck", blocks=(3, 4, 6, 3), stem="7x7", classes=1000, image_size=224),
}
