"""Naive model parallelism: each rank holds consecutive blocks, and only one rank works at a time.

Activations are sent forward and their gradients back, each the size of the boundary, so with P ranks of equal
cost the machine runs at 1/P of what it could: the reason why pipelines exist.
"""

from __future__ import annotations

from torch import Tensor

from podtune.bench.strategies.contract import Batch
from podtune.bench.strategies.stage import Stage


class NaiveModelParallel(Stage):
    """The pieces of an accumulation one after the other, there and back, then one update."""

    def train_step(self, batch: Batch) -> Tensor:
        """Forward through all ranks, backward through all ranks, and the next piece."""
        return self.update([self.backward(self.forward(piece)) for piece in batch.split(self.pieces)])


setup = NaiveModelParallel
