"""Naive model parallelism: each rank holds consecutive blocks, and only one rank works at a time.

Activations are sent forward and their gradients back, each the size of the boundary, so with P ranks of equal
cost the machine runs at 1/P of what it could: the reason why pipelines exist.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from podtune.bench.options import Options
from podtune.bench.strategies.contract import Batch, BuildModel, BuildOptimizer
from podtune.bench.strategies.split import cut
from podtune.bench.strategies.step import Arithmetic
from podtune.run.world import World

DTYPES = (torch.float32, torch.bfloat16)
HEADER = 8  # dtype, number of dimensions, then the dimensions


class NaiveModelParallel:
    """Every rank: some blocks, all rows. The first reads the inputs, the last the targets."""

    rows = (0, 1)

    def __init__(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, world: World, options: Options
    ) -> None:
        self.rank, self.last, self.device = world.rank, world.world_size - 1, world.device
        self.model, self.tied = cut(build_model, world, options)
        self.optimizer = build_optimizer(self.model.parameters())
        self.arithmetic = Arithmetic(options, world)
        self.accumulation = options.accumulation
        self.incoming: tuple[torch.dtype, list[int]] | None = None
        self.announced = False

    def train_step(self, batch: Batch) -> Tensor:
        """The pieces of an accumulation one after the other, then one update."""
        loss = torch.stack([self._forward_backward(piece) for piece in batch.split(self.accumulation)]).sum()
        self.tied.add_up()
        self.arithmetic.update(self.optimizer)
        dist.broadcast(loss, self.last)
        return loss

    def predict(self, batch: Batch) -> Tensor | None:
        """One rank after the other."""
        outputs = []
        with torch.no_grad(), self.arithmetic.autocast():
            for piece in batch.split(self.accumulation):
                y: Tensor = self.model(piece.inputs if self.rank == 0 else self._receive_activations())
                if self.rank == self.last:
                    outputs.append(y)
                else:
                    self._send_activations(y)
        return torch.cat(outputs) if outputs else None

    def _forward_backward(self, batch: Batch) -> Tensor:
        x = batch.inputs if self.rank == 0 else self._receive_activations()
        with self.arithmetic.autocast():
            y = self.model(x)
        if self.rank == self.last:
            loss = self.arithmetic.loss(y, batch.targets) / self.accumulation
            torch.autograd.backward(loss)
        else:
            self._send_activations(y.detach())
            gradient = torch.empty_like(y)
            dist.recv(gradient, self.rank + 1)
            torch.autograd.backward(y, gradient)
            loss = torch.zeros((), device=self.device)
        if self.rank > 0:
            assert x.grad is not None
            dist.send(x.grad, self.rank - 1)
        return loss.detach()

    def _send_activations(self, activations: Tensor) -> None:
        """The first time, what is coming goes ahead; every step has the same shape."""
        if not self.announced:
            header = torch.zeros(HEADER, dtype=torch.long)
            header[0], header[1] = DTYPES.index(activations.dtype), activations.dim()
            header[2 : 2 + activations.dim()] = torch.tensor(activations.shape)
            dist.send(header, self.rank + 1)
            self.announced = True
        dist.send(activations.contiguous(), self.rank + 1)

    def _receive_activations(self) -> Tensor:
        if self.incoming is None:
            header = torch.zeros(HEADER, dtype=torch.long)
            dist.recv(header, self.rank - 1)
            dtype, dimensions, *shape = header.tolist()
            self.incoming = DTYPES[dtype], shape[:dimensions]
        activations = torch.empty(self.incoming[1], dtype=self.incoming[0], device=self.device)
        dist.recv(activations, self.rank - 1)
        return activations.requires_grad_()


setup = NaiveModelParallel
