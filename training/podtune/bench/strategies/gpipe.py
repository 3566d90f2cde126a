"""GPipe (Huang et al. 2019), written out: what ``pipeline-gpipe`` has from torch, to be read and measured.

The batch is cut into M micro-batches. A rank runs a micro-batch through its blocks, sends the result on at
once and takes the next, so that P ranks work on P micro-batches at a time; when all are through, the
gradients come back in reverse (section 2.3). With P = 2 and M = 4, a box a micro-batch:

    rank 0   F0 F1 F2 F3  .  .  B3 B2 B1 B0
    rank 1    . F0 F1 F2 F3 B3 B2 B1 B0  .

A rank idles for (P-1)/(M+P-1) of the step, against (P-1)/P under naive model parallelism, and keeps the
activations of all M micro-batches until their backward pass; the bytes sent are the same.
"""

from __future__ import annotations

from torch import Tensor

from podtune.bench.strategies.contract import Batch
from podtune.bench.strategies.stage import Stage


class GPipe(Stage):
    """All micro-batches forward, then all of them backward, then one update."""

    def train_step(self, batch: Batch) -> Tensor:
        """Gradients add up in the weights; the loss of each micro-batch is divided by M."""
        kept = [self.forward(piece) for piece in batch.split(self.pieces)]
        losses = []
        while kept:
            losses.append(self.backward(kept.pop()))  # the last first, whose activations are let go here
        return self.update(losses)


setup = GPipe
