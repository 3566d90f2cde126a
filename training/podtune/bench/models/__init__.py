"""Models of the benchmark: found by name without torch; :func:`build` makes the module.

No file of this package imports torch.distributed: a model says what it is made of (its blocks in order, which
linear layers divide by column or row), and the strategies decide what to do with that.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from podtune.plan.models import BENCHMARK_MODELS, shape_of
from podtune.plan.shapes import ConvNet, Transformer
from podtune.run.errors import NotFound, unknown

if TYPE_CHECKING:
    from podtune.bench.models.stack import Stack

Size = Transformer | ConvNet


def find_size(name: str) -> Size:
    """The shape behind ``name``, or of the transformers model in ``hf:PATH``. Needs no torch.

    Raises:
        UserError: an unknown name (with the nearest one), or a path without a causal language model's
        config.json.
    """
    if name not in BENCHMARK_MODELS and not name.startswith("hf:"):
        raise unknown("model", name, [*BENCHMARK_MODELS, "hf:PATH of a transformers model"], where="--model")
    path = name.removeprefix("hf:")
    if name.startswith("hf:") and not (Path(path) / "config.json").is_file():
        raise NotFound(
            f"{path or 'the empty path'} has no config.json",
            where="--model",
            fix="name a folder that transformers' save_pretrained wrote",
        )
    return shape_of(name)


def build(size: Size, *, norm: str = "group", pretrained: bool = False) -> Stack:
    """The model on the current default device, initialised from the current random state.

    ``norm`` (group or batch) is for residual networks; ``pretrained`` loads the weights of an ``hf:`` path.
    """
    if isinstance(size, ConvNet):
        from podtune.bench.models.resnet import ResNet

        return ResNet(size, norm=norm)
    if size.folder:
        from podtune.bench.models.transformers_decoder import TransformersDecoder

        return TransformersDecoder(size.folder, pretrained=pretrained)
    from podtune.bench.models.tinygpt import TinyGPT

    return TinyGPT(size)
