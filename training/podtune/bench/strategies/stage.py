"""One rank's part of a model cut by layers, and its messages to the ranks before and after it.

Naive model parallelism and GPipe are made of the same four things (receive, compute, send, and the same back)
in another order; the order is in their own files.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from podtune.bench.strategies.contract import Batch, SetupContext
from podtune.bench.strategies.split import cut
from podtune.bench.strategies.step import Arithmetic, TorchState

CPU = torch.device("cpu")


class Kept(NamedTuple):
    """What a piece's backward pass needs: what came in, and what went out (on the last rank the loss)."""

    x: Tensor
    y: Tensor


class Stage(TorchState):
    """Every rank: some blocks, all rows. The first reads the inputs, the last the targets."""

    rows = (0, 1)

    def __init__(self, context: SetupContext) -> None:
        world, options = context.world, context.options
        self.stage = self.rank = world.rank
        self.last, self.device = world.world_size - 1, world.device
        self.model, self.tied = cut(context)
        self.optimizer = context.build_optimizer(self.model.parameters())
        self.arithmetic = Arithmetic(context)
        self.pieces = options.micro_batches or options.accumulation  # no strategy takes both
        self._incoming: list[Any] = []  # shape and type of what the rank before sends
        self._announced = False
        self._sending: list[tuple[dist.Work | None, Tensor]] = []  # a tensor may not go before its message

    def forward(self, piece: Batch) -> Kept:
        """Receive what the rank before has computed, compute, and send it on without waiting."""
        # a leaf, so that backward leaves the gradient to send back in x.grad
        x = piece.inputs if self.rank == 0 else self._receive_activations().requires_grad_()
        with self.arithmetic.autocast():
            y: Tensor = self.model(x)
        if self.rank == self.last:
            return Kept(x, self.arithmetic.loss(y, piece.targets) / self.pieces)
        self._send_activations(y.detach())
        return Kept(x, y)

    def backward(self, kept: Kept) -> Tensor:
        """Receive the gradient of what went out, and send that of what came in; the loss, or 0 elsewhere."""
        gradient = None
        if self.rank < self.last:
            gradient = torch.empty_like(kept.y)
            dist.recv(gradient, self.rank + 1)
        torch.autograd.backward(kept.y, gradient)
        if self.rank > 0:
            assert kept.x.grad is not None
            self._send(kept.x.grad, self.rank - 1)
        return kept.y.detach() if self.rank == self.last else torch.zeros((), device=self.device)

    def update(self, losses: list[Tensor]) -> Tensor:
        """Once all pieces are back: the optimizer's step, and the loss of the batch on every rank."""
        self._wait()
        self.tied.add_up()
        self.arithmetic.update(self.optimizer)
        loss = torch.stack(losses).sum()
        dist.broadcast(loss, self.last)
        return loss

    def predict(self, batch: Batch) -> Tensor | None:
        outputs = []
        with torch.no_grad(), self.arithmetic.autocast():
            for piece in batch.split(self.pieces):
                y: Tensor = self.model(piece.inputs if self.rank == 0 else self._receive_activations())
                if self.rank == self.last:
                    outputs.append(y)
                else:
                    self._send_activations(y)
        self._wait()
        return torch.cat(outputs) if outputs else None

    def _send(self, tensor: Tensor, rank: int) -> None:
        message = tensor.contiguous()
        self._sending.append((dist.isend(message, rank), message))

    def _wait(self) -> None:
        for work, _ in self._sending:
            if work is not None:
                work.wait()
        self._sending.clear()

    def _send_activations(self, activations: Tensor) -> None:
        """The first time, what is coming goes ahead; every piece has the same shape."""
        if not self._announced:
            # by gloo, also beside NCCL
            dist.send_object_list([activations.shape, activations.dtype], self.rank + 1, device=CPU)
            self._announced = True
        self._send(activations, self.rank + 1)

    def _receive_activations(self) -> Tensor:
        if not self._incoming:
            self._incoming = [None, None]
            dist.recv_object_list(self._incoming, self.rank - 1, device=CPU)
        shape, dtype = self._incoming
        activations = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(activations, self.rank - 1)
        return activations
