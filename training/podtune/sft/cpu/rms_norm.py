"""RMSNorm for bf16 training on a CPU, as one step of autograd instead of eight.

Its result is in bf16 at once; autocast would round a copy for each linear layer that reads it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

_EPSILON = ("variance_epsilon", "eps")  # its names in models


def patch_rms_norm(model: nn.Module) -> int:
    """Replace the forward of each RMSNorm that :class:`RMSNorm` equals; return how many were replaced.

    The replacement acts under autocast alone. Equality is tried on random numbers, once for each class.
    """
    same: dict[type, bool] = {}
    count = 0
    for module in model.modules():
        kind = type(module)
        epsilon = next((getattr(module, name) for name in _EPSILON if hasattr(module, name)), None)
        if not kind.__name__.endswith("RMSNorm") or not isinstance(epsilon, float):
            continue
        if kind not in same:  # models write norms in their own ways: Gemma adds one to the weight
            same[kind] = _computes_the_same(module, epsilon)
        if same[kind]:
            module.forward = MethodType(_forward(module.forward, epsilon), module)
            count += 1
    return count


def _computes_the_same(module: nn.Module, epsilon: float) -> bool:
    if len(inspect.signature(module.forward).parameters) != 1:
        return False  # a gate beside the input, given or not
    weight = getattr(module, "weight", None)
    # a weight on another device, or empty because it is sharded, cannot be tried
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or not len(weight):
        return False
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, len(weight), generator=generator, requires_grad=True)
    theirs = module(rows)
    ours = RMSNorm.apply(rows, weight, epsilon, torch.float32)  # type: ignore[no-untyped-call]
    theirs_back, ours_back = (torch.autograd.grad(each.square().sum(), rows)[0] for each in (theirs, ours))
    return torch.allclose(theirs, ours, 1e-5, 1e-6) and torch.allclose(theirs_back, ours_back, 1e-4, 1e-5)


def _forward(original: Callable[[torch.Tensor], torch.Tensor], epsilon: float) -> Callable[..., torch.Tensor]:
    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dtype != torch.float32 or not torch.is_autocast_enabled("cpu"):
            return original(hidden_states)
        dtype = torch.get_autocast_dtype("cpu")
        out: torch.Tensor = RMSNorm.apply(hidden_states, self.weight, epsilon, dtype)  # type: ignore[no-untyped-call]
        return out

    return forward


class RMSNorm(torch.autograd.Function):
    """``weight * x / sqrt(mean(x ** 2) + epsilon)`` over the last dimension, rounded to ``dtype``."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float, dtype: torch.dtype
    ) -> torch.Tensor:
        size = x.shape[-1]
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(size).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        out = torch.empty_like(x, dtype=dtype)
        return torch.mul(x * scale, weight, out=out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return ``s g w - x s**3 sum(g w x) / n`` for x, with g the gradient, s the scale and n the size."""
        x, weight, scale = ctx.saved_tensors
        product = (gradient * x).flatten(0, -2)
        of_weight = torch.mv(product.t(), scale.flatten()) if ctx.needs_input_grad[1] else None
        along = torch.mv(product, weight).view_as(scale).mul_(scale.pow(3)).div_(x.shape[-1])
        of_x = torch.mul(gradient, weight).mul_(scale).addcmul_(x, along, value=-1)
        return of_x, of_weight, None, None
