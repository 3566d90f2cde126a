"""Cross-entropy on a CPU, computed a few rows at a time.

The logits of a batch are its largest tensor, and torch makes three more of its size, in fp32.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_CHUNK_BYTES = 4 * 2**20  # of fp32 logits, which a core's cache holds


def summed_cross_entropy(logits: torch.Tensor, targets: torch.Tensor, ignored: int) -> torch.Tensor:
    """Sum ``-log softmax(logits)[target]`` over the rows, in fp32 whatever the logits are in.

    Args:
        logits: ``(rows, vocabulary)``; their gradient comes in their own dtype.
        targets: ``(rows,)``; a row whose target is ``ignored`` adds nothing.
    """
    total: torch.Tensor = _Summed.apply(logits, targets, ignored)  # type: ignore[no-untyped-call]
    return total


class _Summed(torch.autograd.Function):
    """The sum with powers of two: on a CPU torch takes three times as long for ``exp`` as for ``exp2``."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, ignored: int) -> torch.Tensor:
        scored = targets != ignored
        places = torch.where(scored, targets, 0)[:, None]
        log2sumexp = torch.empty(len(logits), 1)
        for rows in _chunks(logits):
            chunk = _in_twos(logits[rows])
            highest = chunk.amax(-1, keepdim=True)
            total = chunk.sub_(highest).exp2_().sum(-1, keepdim=True)
            log2sumexp[rows] = total.log2_().add_(highest)
        ctx.save_for_backward(logits, log2sumexp, places, scored)
        return ((log2sumexp * math.log(2) - logits.gather(1, places))[:, 0] * scored).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return ``softmax(logits)``, less one at the target, times the gradient of the sum."""
        logits, log2sumexp, places, scored = ctx.saved_tensors
        of_logits = torch.empty_like(logits)
        times = (scored * gradient)[:, None]
        for rows in _chunks(logits):
            chunk = _in_twos(logits[rows]).sub_(log2sumexp[rows]).exp2_()
            chunk.scatter_add_(1, places[rows], chunk.new_full((len(chunk), 1), -1.0))
            of_logits[rows] = chunk.mul_(times[rows])
        return of_logits, None, None


def _in_twos(logits: torch.Tensor) -> torch.Tensor:
    """Copy logits to fp32 and scale them, so that ``exp2`` of the copy is ``exp(logits)``."""
    return logits.to(torch.float32, copy=True).mul_(math.log2(math.e))


def _chunks(logits: torch.Tensor) -> list[slice]:
    rows = max(1, _CHUNK_BYTES // (4 * logits.shape[1]))
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]
