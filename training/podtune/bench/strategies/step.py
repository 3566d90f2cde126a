"""Forward, backward and update as every strategy does them: precision, accumulation, optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from podtune.bench.models.stack import Stack, cross_entropy
from podtune.bench.options import Options
from podtune.bench.strategies.contract import Batch, BuildOptimizer, SetupContext

BeforePiece = Callable[[bool], AbstractContextManager[object]]
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


class Arithmetic:
    """The precision and the loss of one run. Weights, gradients and optimizer state are fp32 in every case.

    bf16 and fp16: autocast, and for fp16 a loss scaler. fp8: the linear layers multiply in fp8
    (training/podtune/bench/strategies/float8.py), the rest is bf16.
    """

    def __init__(self, context: SetupContext) -> None:
        options, self.device_type = context.options, context.world.device_type
        self.dtype = AUTOCAST.get(options.precision)
        self.scaler = torch.amp.GradScaler(
            self.device_type, enabled=options.precision == "fp16", init_scale=2.0**12
        )
        self.loss: Callable[[Tensor, Tensor], Tensor] = (
            torch.compile(cross_entropy) if options.compile else cross_entropy
        )

    def autocast(self) -> AbstractContextManager[object]:
        """Around the forward pass."""
        return torch.autocast(self.device_type, dtype=self.dtype) if self.dtype else contextlib.nullcontext()

    def update(self, optimizer: Optimizer) -> None:
        """Step, then forget the gradients."""
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=True)


def prepare(model: Stack, context: SetupContext) -> Stack:
    """Move a model, or a rank's part of one, to its device; apply fp8, checkpointing and compilation."""
    options, device = context.options, context.world.device
    model.to(device)
    if options.precision == "fp8":
        from podtune.bench.strategies.float8 import multiply_in_float8

        multiply_in_float8(model)
    model.checkpoint_activations(options.activation_checkpointing)
    if options.offload_activations:
        for block in model.blocks:
            block.forward = _keep_on_cpu(block.forward, pin=device != "cpu")
    if options.compile:
        for block in model.blocks:
            block.compile()
    return model


def _keep_on_cpu(forward: Callable[[Tensor], Tensor], pin: bool) -> Callable[[Tensor], Tensor]:
    """Keep what the backward pass needs in the CPU's memory until then."""

    def copying(x: Tensor) -> Tensor:
        with save_on_cpu(pin_memory=pin):
            return forward(x)

    return copying


def optimizer_factory(options: Options) -> BuildOptimizer:
    """AdamW, fused unless told otherwise, or SGD with momentum, over the parameters that a rank holds."""

    def build(parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> Optimizer:
        if options.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=options.learning_rate, momentum=0.9)
        return torch.optim.AdamW(
            parameters, lr=options.learning_rate, fused=options.fused_optimizer is not False
        )

    return build


def mean_over(loss: Tensor, ranks: int) -> Tensor:
    """The mean of equal shares' losses, on every rank."""
    dist.all_reduce(loss)
    return loss / ranks


class TorchState:
    """Saving and loading by torch.distributed.checkpoint; every rank writes what it alone holds.

    Its index is a pickle: a folder is loaded where it was written, and is not for others.
    """

    model: nn.Module
    optimizer: Optimizer
    arithmetic: Arithmetic
    stage = 0  # of a model that is cut by layers: names of weights are a stage's own

    def save(self, folder: Path) -> None:
        """Weights, optimizer, and the loss scale of fp16."""
        state_dict_saver.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state = self._state()
        state_dict_loader.load(state, checkpoint_id=folder)
        part = state[f"stage{self.stage}"]
        set_state_dict(
            self.model, self.optimizer, model_state_dict=part["model"], optim_state_dict=part["optimizer"]
        )
        self.arithmetic.scaler.load_state_dict(part["scaler"])

    def _state(self) -> dict[str, dict[str, Any]]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        scaler = self.arithmetic.scaler.state_dict()
        return {f"stage{self.stage}": {"model": model, "optimizer": optimizer, "scaler": scaler}}


class WholeModel(TorchState):
    """One rank of a strategy whose ranks each run the whole model, forward and backward, on their rows.

    Args:
        model: it may be wrapped, sharded or cut inside its layers.
        rows: see :class:`podtune.bench.strategies.contract.Strategy`.
        groups: the optimizer's parameter groups; by default one of all.
        before_piece: gives the context of a piece of an accumulation, told whether it is the last: until then
            the wrapper may hold back what it communicates.
    """

    def __init__(
        self,
        context: SetupContext,
        model: nn.Module,
        rows: tuple[int, int] = (0, 1),
        groups: list[dict[str, Any]] | None = None,
        before_piece: BeforePiece = contextlib.nullcontext,
    ) -> None:
        self.model, self.rows, self.before_piece = model, rows, before_piece
        self.optimizer = context.build_optimizer(groups or model.parameters())
        self.arithmetic, self.accumulation = Arithmetic(context), context.options.accumulation

    def train_step(self, batch: Batch) -> Tensor:
        """Accumulate the gradients of equal pieces, update; the mean loss of the global batch."""
        losses = []
        for index, piece in enumerate(batch.split(self.accumulation)):
            with self.before_piece(index == self.accumulation - 1):
                with self.arithmetic.autocast():
                    loss = self.arithmetic.loss(self.model(piece.inputs), piece.targets) / self.accumulation
                torch.autograd.backward(self.arithmetic.scaler.scale(loss))
            losses.append(loss.detach())
        self.arithmetic.update(self.optimizer)
        total = torch.stack(losses).sum()
        return mean_over(total, dist.get_world_size()) if self.rows[1] > 1 else total

    def predict(self, batch: Batch) -> Tensor:
        with torch.no_grad(), self.arithmetic.autocast():
            logits: Tensor = self.model(batch.inputs)
        return logits
