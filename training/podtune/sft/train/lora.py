"""LoRA's linear layer as matrix products alone: the adapter's output is added by the product that makes it.

PEFT scales and adds in passes of their own over every output, and autograd over every input's gradient: a
quarter of a step's memory traffic on a GPU. Here, with ``h = s x A'``, forward is ``y = x W'; y += h B'`` and
backward ``dx = g W; dx += (s g B) A``. Values and gradients equal PEFT's in fp32 to 1e-6; in bf16, where PEFT
rounds twice more, they are nearer to the exact ones.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear, LoraVariant
from torch import Tensor, nn


def fuse_adapters(model: Any, autocast: torch.dtype | None = None, *, cast_base: bool = False) -> int:
    """Let the adapters of ``model`` compute as this module says, and return how many do.

    Those with dropout, a bias, or a variant of their own (DoRA) stay PEFT's, and those of layers that are no
    plain, frozen linear maps. With ``cast_base`` the frozen weights are kept in ``autocast``'s dtype, to
    which it would cast them in every use.
    """
    fused = 0
    embedding = model.get_input_embeddings().weight  # a head may share it, and it is not multiplied with
    for layer in model.modules():
        if type(layer) is not Linear or type(base := layer.get_base_layer()) is not nn.Linear:
            continue
        if base.weight is embedding or any(parameter.requires_grad for parameter in base.parameters()):
            continue
        for name, adapter in layer.lora_A.items():
            plain = isinstance(layer.lora_dropout[name], nn.Identity) and not layer.lora_bias[name]
            if name in layer.lora_variant or not plain:
                continue
            if autocast or adapter.weight.dtype == base.weight.dtype:
                layer.lora_variant[name] = FusedLora()
                fused += 1
                if cast_base:
                    base.to(autocast)
    return fused


class FusedLora(LoraVariant):  # type: ignore[misc]
    """PEFT's hook for kinds of LoRA: plain LoRA computed otherwise, in training, where nothing is merged."""

    @staticmethod
    def forward(module: Linear, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """Add the adapter's output to the base layer's ``result``, ``(..., out)``, in place."""
        base, scaling = module.get_base_layer().weight, module.scaling[active_adapter]
        a, b = module.lora_A[active_adapter].weight, module.lora_B[active_adapter].weight
        # The gradient that ``result`` leads to is made in _Fused, together with the adapter's own.
        whole: Tensor = _Fused.apply(x, base, a, b, result.detach(), scaling)  # type: ignore[no-untyped-call]
        return whole


class _Fused(torch.autograd.Function):
    """Gradients of ``y = x W' + s (x A') B'``, whose first term is given as ``y`` and completed in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: Tensor, a: Tensor, b: Tensor, y: Tensor, scaling: float) -> Tensor:
        rows, a16, b16 = x.flatten(0, -2).to(y.dtype), a.to(y.dtype), b.to(y.dtype)
        hidden = torch.mm(rows, a16.t()).mul_(scaling)
        y.view(-1, y.shape[-1]).addmm_(hidden, b16.t())
        ctx.mark_dirty(y)
        ctx.save_for_backward(rows, base, a16, b16, hidden)
        ctx.scaling, ctx.shape, ctx.dtypes = scaling, x.shape, (x.dtype, a.dtype, b.dtype)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, base, a16, b16, hidden = ctx.saved_tensors
        given = gradient.flatten(0, -2)
        of_hidden = torch.mm(given, b16).mul_(ctx.scaling)
        to_x, to_a, to_b = ctx.dtypes
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = torch.mm(given, base.to(given.dtype)).addmm_(of_hidden, a16).view(ctx.shape).to(to_x)
        of_a, of_b = torch.mm(of_hidden.t(), rows).to(to_a), torch.mm(given.t(), hidden).to(to_b)
        return of_x, None, of_a, of_b, None, None
