"""Linear layers that multiply in fp8 (Micikevicius et al. 2022): e4m3 forward, e5m2 gradients.

Weights stay fp32. Each operand is scaled by its own largest magnitude just before the product; results are
bf16.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from podtune.bench.models.stack import Stack

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
TILE = 16  # the sizes that fp8 matrix units take


def multiply_in_float8(model: Stack) -> None:
    """Change the linear layers of the inner blocks in place; embedding and head keep their precision."""
    for block in model.inner:
        for module in block.modules():
            if (
                isinstance(module, nn.Linear)
                and module.in_features % TILE == 0
                and module.out_features % TILE == 0
            ):
                module.forward = partial(linear, module)  # type: ignore[method-assign]


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    """(..., in) to (..., out) in bf16; the leading dimensions together are a multiple of 16 rows."""
    rows = x.flatten(0, -2).to(torch.bfloat16)
    product: Tensor = Float8Product.apply(rows, module.weight)  # type: ignore[no-untyped-call]
    if module.bias is not None:
        product = product + module.bias.to(torch.bfloat16)
    return product.view(*x.shape[:-1], -1)


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` over its scale in fp8, and the scale () that brings it back."""
    scale = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def product(a: Tensor, b: Tensor, a_dtype: torch.dtype, b_dtype: torch.dtype) -> Tensor:
    """``a @ b.T`` for (m, k) and (n, k): in bf16, from fp8 operands. Forward sums fast, gradients exactly."""
    a8, a_scale = quantise(a, a_dtype)
    b8, b_scale = quantise(b, b_dtype)
    return torch._scaled_mm(
        a8.contiguous(),
        b8.contiguous().t(),  # the second operand is taken by column alone
        scale_a=a_scale,
        scale_b=b_scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=a_dtype == b_dtype == FORWARD,
    )


class Float8Product(torch.autograd.Function):
    """``x @ weight.T`` with both gradients in fp8 too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """(rows, in), (out, in) to (rows, out)."""
        ctx.save_for_backward(x, weight)
        return product(x, weight, FORWARD, FORWARD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of ``x`` (bf16) and of ``weight`` (as it is)."""
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        to_x = product(gradient, weight.t(), BACKWARD, FORWARD)
        to_weight = product(gradient.t(), x.t(), BACKWARD, FORWARD)
        return to_x, to_weight.to(weight.dtype)
