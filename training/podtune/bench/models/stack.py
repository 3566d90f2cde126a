"""A model as blocks in a row: all that a strategy needs to know to cut, shard or checkpoint it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from podtune.plan.shapes import Checkpointing

# What selective checkpointing keeps: the results of the expensive operations, tensor parallelism's sums among
# them. The cheap ones are computed again.
KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.all_reduce.default,
}


class Stack(nn.Module):
    """``blocks`` applied one after the other; the first takes the inputs, the last gives the logits.

    ``tensor_plan`` maps names of linear layers (``*`` stands for a block's number) to ``colwise`` or
    ``rowwise``, as in Megatron-LM (Shoeybi et al. 2019, section 3); it is empty for a model that tensor
    parallelism cannot divide.
    """

    tensor_plan: dict[str, str]

    def __init__(self, blocks: Sequence[nn.Module], inner: Sequence[nn.Module] | None = None) -> None:
        """``inner`` are the blocks that repeat, by default all but the first and the last."""
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.inner = list(blocks[1:-1] if inner is None else inner)
        self.tensor_plan = {}
        self.segments = 0

    def forward(self, x: Tensor) -> Tensor:
        """Inputs, or the previous part's activations, to logits, or activations for the next part."""
        if self.segments and torch.is_grad_enabled():
            run: Callable[..., Tensor] = checkpoint_sequential  # torch leaves it untyped
            return run(list(self.blocks), self.segments, x, use_reentrant=False)
        for block in self.blocks:
            x = block(x)
        return x

    def checkpoint_activations(self, how: Checkpointing) -> None:
        """Trade memory for recomputation.

        ``full``: every inner block, or ``every-second``; ``selective``: every one, but matrix products and
        attention are kept; ``sequential``: torch's checkpoint_sequential over about sqrt(blocks) segments
        (Chen et al. 2016).
        """
        if how == "sequential":
            self.segments = max(1, math.isqrt(len(self.blocks)))
        elif how != "none":
            for block in self.inner[:: 2 if how == "every-second" else 1]:
                block.forward = _checkpointed(block.forward, keep=KEPT if how == "selective" else set())

    def example_row(self, sequence_length: int) -> Tensor:
        """One row of inputs of the right shape, for counting operations: token ids (1, sequence_length)."""
        return torch.zeros(1, sequence_length, dtype=torch.long)

    def part(self, start: int, end: int) -> Stack:
        """Blocks ``start`` to ``end`` (exclusive) as a model of their own, shared, not copied."""
        blocks = list(self.blocks)[start:end]
        return Stack(blocks, [block for block in blocks if block in self.inner])


def _checkpointed(
    forward: Callable[[Tensor], Tensor], keep: set[torch._ops.OpOverload]
) -> Callable[[Tensor], Tensor]:
    def policy(
        context: object, operation: torch._ops.OpOverload, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in keep else CheckpointPolicy.PREFER_RECOMPUTE

    def again(x: Tensor) -> Tensor:
        if keep:
            output: Tensor = checkpoint(
                forward,
                x,
                use_reentrant=False,
                context_fn=partial(create_selective_checkpoint_contexts, policy),
            )
        else:
            output = checkpoint(forward, x, use_reentrant=False)
        return output

    return again


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all targets; ``logits`` is (batch, classes) or (batch, time, vocabulary)."""
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
