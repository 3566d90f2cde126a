"""Residual networks (He et al. 2015), with the stem for CIFAR or for ImageNet.

The norm is GroupNorm unless batch is asked for. Batch norm's statistics belong to whatever part of the batch
a process happens to see, so with it every way of splitting the batch is another function, and equal losses
cannot be expected. GroupNorm (Wu and He 2018) has the same parameters and looks at one image at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from podtune.bench.models.stack import Stack
from podtune.plan.shapes import ConvNet

GROUPS = 32


def norm_layer(kind: str, channels: int) -> nn.Module:
    """``group`` or ``batch``, over ``channels``."""
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(GROUPS, channels)


def convolution(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Without bias, since a norm follows, and padded so that only the stride shrinks the image."""
    return nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=kernel // 2, bias=False)


class Residual(nn.Module):
    """Convolutions with a shortcut: two 3x3, or the 1x1, 3x3, 1x1 bottleneck with its stride on the 3x3."""

    def __init__(self, channels_in: int, channels: int, stride: int, expansion: int, norm: str) -> None:
        super().__init__()
        channels_out = channels * expansion
        if expansion > 1:
            plan = [
                (channels_in, channels, 1, 1),
                (channels, channels, 3, stride),
                (channels, channels_out, 1, 1),
            ]
        else:
            plan = [(channels_in, channels, 3, stride), (channels, channels_out, 3, 1)]
        layers: list[nn.Module] = []
        for wide_in, wide_out, kernel, step in plan:
            layers += [convolution(wide_in, wide_out, kernel, step), norm_layer(norm, wide_out), nn.ReLU()]
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                convolution(channels_in, channels_out, 1, stride), norm_layer(norm, channels_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels_in, height, width) to (batch, channels_out, height/stride, width/stride)."""
        return nn.functional.relu(self.body(x) + self.shortcut(x))


class Classifier(nn.Module):
    """The mean over the image, then one linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to (batch, classes)."""
        logits: Tensor = self.linear(x.mean(dim=(2, 3)))
        return logits


class ResNet(Stack):
    """Stem, residual blocks, classifier."""

    def __init__(self, size: ConvNet, norm: str = "group") -> None:
        if size.stem == "3x3":
            stem = nn.Sequential(convolution(3, size.width, 3), norm_layer(norm, size.width), nn.ReLU())
        else:
            stem = nn.Sequential(
                convolution(3, size.width, 7, 2),
                norm_layer(norm, size.width),
                nn.ReLU(),
                nn.MaxPool2d(3, stride=2, padding=1),
            )
        blocks: list[nn.Module] = [stem]
        channels_in = size.width
        for stage, depth in enumerate(size.blocks):
            channels = size.widths[stage]
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Residual(channels_in, channels, stride, size.expansion, norm))
                channels_in = channels * size.expansion
        super().__init__([*blocks, Classifier(channels_in, size.classes)])
        self.image_size = size.image_size
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def example_row(self, sequence_length: int) -> Tensor:
        """One image (1, 3, side, side)."""
        return torch.zeros(1, 3, self.image_size, self.image_size)
