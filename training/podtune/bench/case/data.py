"""The rows that are trained on: synthetic ones with something to learn, or CIFAR-10.

Row ``i`` depends on the seed and on ``i`` alone, so every rank makes exactly its part of the one global batch
and no other, whatever the world size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from podtune.bench.case import cifar10
from podtune.bench.models import Size
from podtune.bench.options import Options
from podtune.bench.strategies.contract import Batch
from podtune.plan.shapes import ConvNet
from podtune.run.errors import DataError

SYNTHETIC_EPOCH = 4096  # rows; there is no end of them


class Rows(Protocol):
    """A source of rows by number."""

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        ...

    def batch(self, numbers: range) -> Batch:
        """The rows of these numbers; numbers beyond the end start again at the first row."""
        ...


def share(step: int, global_batch_size: int, part: int, parts: int) -> range:
    """Row numbers of ``part`` of the global batch of ``step``: disjoint, and together all of it."""
    size = global_batch_size // parts
    start = step * global_batch_size + part * size
    return range(start, start + size)


def open_rows(options: Options, size: Size) -> Rows:
    """The source that ``--data`` names.

    Raises:
        UserError: it cannot be read, or does not fit the model.
    """
    path = Path(options.data)
    if isinstance(size, ConvNet):
        if options.data == "synthetic":
            return SyntheticImages(size.classes, size.image_size, options.seed)
        if (size.classes, size.image_size) != (cifar10.CLASSES, cifar10.SIDE):
            raise DataError(
                f"CIFAR-10 has {cifar10.CLASSES} classes and {cifar10.SIDE} pixels a side, "
                f"{options.model} reads {size.classes} and {size.image_size}",
                where="--model",
                fix="use resnet18-cifar or resnet34-cifar",
            )
        return cifar10.Cifar10(path, "train", options.seed)
    if options.data == "synthetic":
        return SyntheticTokens(size.vocabulary, options.sequence_length, options.seed)
    raise DataError(
        f"{options.model} reads tokens, which are synthetic alone", where="--data", fix="leave it out"
    )


def open_test_rows(options: Options, size: Size) -> Rows | None:
    """The rows that are not trained on; None where the source has no test split."""
    if isinstance(size, ConvNet) and (Path(options.data) / cifar10.FILE).exists():
        return cifar10.Cifar10(Path(options.data), "test", options.seed)
    return HeldOut(open_rows(options, size)) if options.data == "synthetic" else None


class HeldOut:
    """Synthetic rows with numbers that no training comes to."""

    rows, first = 256, 10**9

    def __init__(self, source: Rows) -> None:
        self.source = source

    def batch(self, numbers: range) -> Batch:
        return self.source.batch(range(self.first + numbers.start, self.first + numbers.stop))


class SyntheticTokens:
    """A Markov chain: nine times of ten the next token is a fixed function of the last one, else any.

    A model that learns the function ends near 0.1 ln(alphabet) + 0.33 nats; it starts at ln(vocabulary).
    """

    rows = SYNTHETIC_EPOCH

    def __init__(self, vocabulary: int, length: int, seed: int) -> None:
        self.alphabet, self.length, self.seed = min(vocabulary, 256), length, seed
        self.successor = torch.randperm(self.alphabet, generator=cifar10.generator_of(seed, -1))

    def batch(self, numbers: range) -> Batch:
        """Ids (rows, length) and, as targets, the same shifted by one."""
        noise = torch.empty(len(numbers), self.length + 1, dtype=torch.long)
        surprise = torch.empty(len(numbers), self.length + 1)
        for row, number in enumerate(numbers):
            generator = cifar10.generator_of(self.seed, number)
            torch.randint(self.alphabet, (self.length + 1,), generator=generator, out=noise[row])
            torch.rand(self.length + 1, generator=generator, out=surprise[row])
        tokens = noise
        for t in range(1, self.length + 1):
            tokens[:, t] = torch.where(surprise[:, t] < 0.1, noise[:, t], self.successor[tokens[:, t - 1]])
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


class SyntheticImages:
    """Images of classes: a class has a pattern of 8 x 8 colours, an image is that, enlarged, in noise."""

    rows = SYNTHETIC_EPOCH

    def __init__(self, classes: int, side: int, seed: int) -> None:
        self.classes, self.side, self.seed = classes, side, seed
        self.patterns = torch.randn(classes, 3, 8, 8, generator=cifar10.generator_of(seed, -1))

    def batch(self, numbers: range) -> Batch:
        """Images (rows, 3, side, side) with mean 0 and deviation about 1.4, and class numbers (rows,)."""
        images = torch.empty(len(numbers), 3, self.side, self.side)
        labels = torch.empty(len(numbers), dtype=torch.long)
        for row, number in enumerate(numbers):
            generator = cifar10.generator_of(self.seed, number)
            labels[row] = torch.randint(self.classes, (), generator=generator)
            torch.randn(3, self.side, self.side, generator=generator, out=images[row])
        images += torch.nn.functional.interpolate(self.patterns[labels], size=(self.side, self.side))
        return Batch(images, labels)
