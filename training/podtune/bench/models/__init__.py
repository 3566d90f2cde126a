"""What the benchmark trains: sizes by name, known without torch. :func:`build` makes the module.

No file of this package imports torch.distributed: a model says what it is made of (its blocks in order, which
linear layers divide by column or row), and the strategies decide what to do with that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from podtune.plan.shapes import Transformer, shape_of
from podtune.plan.sizes import SIZES, ResNetSize, TransformerSize
from podtune.run.errors import NO_INPUT, USAGE, UserError, near

if TYPE_CHECKING:
    from podtune.bench.models.stack import Stack


@dataclass(frozen=True)
class TransformersSize:
    """What a transformers ``config.json`` says of a decoder."""

    path: str
    layers: int
    heads: int
    kv_heads: int
    sequence_length: int
    vocabulary: int


Size = TransformerSize | ResNetSize | TransformersSize


def find_size(name: str) -> Size:
    """The size behind ``name``, or of the transformers model in ``hf:PATH``. Needs no torch.

    Raises:
        UserError: an unknown name (with the nearest one), or a path without a causal language model's
        config.json.
    """
    if name in SIZES:
        return SIZES[name]
    if not name.startswith("hf:"):
        raise UserError(
            f"there is no benchmark model '{name}'{near(name, list(SIZES))}",
            where="--model",
            fix=f"choose one of {', '.join(SIZES)}, or hf:PATH for a transformers model",
            code=USAGE,
        )
    path = name.removeprefix("hf:")
    if not (Path(path) / "config.json").is_file():
        raise UserError(
            f"{path or 'the empty path'} has no config.json",
            where="--model",
            fix="name a folder that transformers' save_pretrained wrote",
            code=NO_INPUT,
        )
    shape = shape_of(name)
    assert isinstance(shape, Transformer)  # what shape_of makes of every config.json
    return TransformersSize(
        path, shape.layers, shape.heads, shape.kv_heads, shape.sequence_length, shape.vocabulary
    )


def shared_blocks(size: Size) -> int:
    """Equal blocks that model-parallel strategies share out: layers, or residual blocks."""
    return sum(size.blocks) if isinstance(size, ResNetSize) else size.layers


def build(size: Size, *, norm: str = "group", pretrained: bool = False) -> Stack:
    """The model on the current default device, initialised from the current random state.

    ``norm`` (group or batch) is for residual networks; ``pretrained`` loads the weights of an ``hf:`` path.
    """
    if isinstance(size, ResNetSize):
        from podtune.bench.models.resnet import ResNet

        return ResNet(size, norm=norm)
    if isinstance(size, TransformersSize):
        from podtune.bench.models.transformers_decoder import TransformersDecoder

        return TransformersDecoder(size.path, pretrained=pretrained)
    from podtune.bench.models.tinygpt import TinyGPT

    return TinyGPT(size)
