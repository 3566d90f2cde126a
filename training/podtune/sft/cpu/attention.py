"""Attention of padding-free batches on a CPU, forward and backward, as one step of autograd.

Row by row through autograd, half of the time goes into slices, paddings and their zero-filled gradients.
Here every row writes into one result, and its gradient into one gradient.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

# With bf16 instructions, matrix products in bf16 outrun torch's flash kernel in fp32 or bf16 for long rows
# (two and a half times at 256 to 1,024 tokens, forward and backward); between 24 and 160 tokens it made no
# difference from where on they are taken. Above, the probabilities that they keep for the backward pass would
# weigh too much.
_BY_PRODUCTS = range(96, 2049)
_BLOCK = 256  # queries of one product: what a causal mask throws away is at most this many keys a query
_MULTIPLE = 32  # oneDNN builds a kernel for every length of a row: they are rounded up to few


@torch.compiler.disable  # type: ignore[untyped-decorator] # it would compile a graph for every list of lengths
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    scaling: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Causal attention of each row to itself, ``(1, T, heads, head_dim)`` in ``dtype``.

    Args:
        query: ``(1, heads, T, head_dim)``; ``key`` and ``value`` may have fewer heads (grouped queries), and
            all have one ``head_dim``.
        lengths: tokens of each row, T in all.
        dtype: of the result. With bf16, rows of middle length are computed by matrix products in bf16 if the
            CPU has instructions for them; all else is computed in fp32.
    """
    products = dtype == torch.bfloat16 and _multiplies_bf16()
    plan = [(length, products and length in _BY_PRODUCTS) for length in lengths]
    with torch.autocast("cpu", enabled=False):
        attended: torch.Tensor = Rows.apply(  # type: ignore[no-untyped-call]
            query, key, value, plan, scaling, dtype
        )
    return attended


class Rows(torch.autograd.Function):
    """Attention for a ``plan``: each row's length, and True where it takes matrix products in ``dtype``."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: list[tuple[int, bool]],
        scaling: float,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        _, heads, total, width = query.shape
        out = torch.empty(total, heads, width, dtype=dtype)
        wide: tuple[torch.Tensor, ...] = ()  # query, key and value in fp32, if any row needs them
        if not all(products for _, products in plan):
            group = heads // key.shape[1]
            wide = query.float(), _repeat(key.float(), group), _repeat(value.float(), group)
        kept: list[torch.Tensor] = []
        start = 0
        for length, products in plan:
            row = slice(start, start + length)
            if products:
                kept += _products(query[0, :, row], key[0, :, row], value[0, :, row], scaling, out[row])
            else:
                attended, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                    *(x[:, :, row] for x in wide), 0.0, True, scale=scaling
                )
                out[row] = attended[0].transpose(0, 1)
                kept += [attended, logsumexp]
            start += length
        # all of it as saved tensors, which activation checkpointing drops and offloading moves
        ctx.save_for_backward(*wide, *kept)
        ctx.plan, ctx.scaling, ctx.is_wide = plan, scaling, bool(wide)
        ctx.shape, ctx.dtypes = (total, heads, key.shape[1], width), (query.dtype, key.dtype, value.dtype)
        return out[None]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, heads, shared, width = ctx.shape
        saved = iter(ctx.saved_tensors)
        wide = [next(saved) for _ in range(3 * ctx.is_wide)]
        of_query, of_key, of_value = grads = tuple(
            torch.empty(total, of, width, dtype=dtype)
            for of, dtype in zip((heads, shared, shared), ctx.dtypes, strict=True)
        )
        start = 0
        for length, products in ctx.plan:
            row = slice(start, start + length)
            if products:
                _products_backward(gradient[0, row], saved, ctx.scaling, [each[row] for each in grads])
            else:
                q, k, v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    gradient[:, row].transpose(1, 2).float(),
                    *(x[:, :, row] for x in wide),
                    next(saved),
                    next(saved),
                    0.0,
                    True,
                    scale=ctx.scaling,
                )
                of_query[row] = q[0].transpose(0, 1)
                for of, each in ((of_key, k), (of_value, v)):
                    of[row] = each.view(shared, heads // shared, length, width).sum(1).transpose(0, 1)
            start += length
        return *(each.transpose(0, 1)[None] for each in grads), None, None, None


def _products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, out: torch.Tensor
) -> list[torch.Tensor]:
    """Write one row's causal attention, computed by matrix products, to ``out``; return what backward needs.

    A block of queries at a time, against the keys up to it. Shapes ``(heads, length, width)``, out ``(length,
    heads, width)``. Queries that share a key share one product. The padding of the length comes after every
    token, which therefore does not attend to it.
    """
    heads, length, width = query.shape
    shared, group = key.shape[0], heads // key.shape[0]
    q, k, v = (_padded(row, out.dtype, times) for row, times in ((query, scaling), (key, 1.0), (value, 1.0)))
    by_group, to = q.view(shared, group, -1, width), out.view(length, shared, group, width)
    probabilities = []
    for begin, end in _blocks(q.shape[1]):
        size, real = end - begin, min(end, length) - begin
        scores = torch.bmm(_queries(by_group, begin, end), k[:, :end].transpose(1, 2))
        scores.view(-1, size, end)[..., begin:] += _future(size, q.dtype)
        probabilities.append(torch.softmax(scores, -1))
        attended = torch.bmm(probabilities[-1], v[:, :end]).view(shared, group, size, width)
        to[begin : begin + real] = attended[:, :, :real].permute(2, 0, 1, 3)
    return [q, k, v, *probabilities]


def _products_backward(gradient: torch.Tensor, saved: Any, scaling: float, grads: list[torch.Tensor]) -> None:
    """Write the gradients of :func:`_products` to ``grads`` (of query, key and value).

    All are ``(length, heads, width)``. The tensors that the forward pass returned are taken from ``saved``.
    """
    q, k, v = next(saved), next(saved), next(saved)
    length, heads, width = gradient.shape
    shared, group = k.shape[0], heads // k.shape[0]
    given = _padded(gradient.transpose(0, 1), gradient.dtype).view(shared, group, -1, width)
    by_group, of_query = q.view(shared, group, -1, width), grads[0].view(length, shared, group, width)
    of_key, of_value = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
    for begin, end in _blocks(q.shape[1]):
        size, real = end - begin, min(end, length) - begin
        weights, mine = next(saved), _queries(given, begin, end)
        of_weights = torch.bmm(mine, v[:, :end].transpose(1, 2))
        of_scores = torch.ops.aten._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        of_value[:, :end] += torch.bmm(weights.transpose(1, 2), mine)
        of_key[:, :end] += torch.bmm(of_scores.transpose(1, 2), _queries(by_group, begin, end))
        of_block = torch.bmm(of_scores, k[:, :end]).view(shared, group, size, width)
        of_query[begin : begin + real] = of_block[:, :, :real].permute(2, 0, 1, 3)
    grads[0].mul_(scaling)
    grads[1].copy_(of_key[:, :length].transpose(0, 1))
    grads[2].copy_(of_value[:, :length].transpose(0, 1))


def _padded(row: torch.Tensor, dtype: torch.dtype, times: float = 1.0) -> torch.Tensor:
    """Pad ``(heads, length, width)`` with zeros to a multiple of :data:`_MULTIPLE`, in ``dtype``."""
    heads, length, width = row.shape
    filled = torch.empty(heads, length + -length % _MULTIPLE, width, dtype=dtype)
    torch.mul(row, times, out=filled[:, :length])
    filled[:, length:].zero_()
    return filled


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + _BLOCK, length)) for begin in range(0, length, _BLOCK)]


def _queries(by_group: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Take tokens ``begin`` to ``end`` of ``(shared, group, length, width)`` as ``(shared, -1, width)``."""
    shared, _, _, width = by_group.shape
    return by_group[:, :, begin:end].reshape(shared, -1, width)


@cache
def _future(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Causal mask of a block, added to its scores: minus infinity above the diagonal, zero elsewhere."""
    return torch.full((size, size), float("-inf"), dtype=dtype).triu_(1)


def _repeat(x: torch.Tensor, group: int) -> torch.Tensor:
    """Repeat keys or values for every query head that shares them."""
    return x if group == 1 else x.repeat_interleave(group, 1)


def _multiplies_bf16() -> bool:
    """True where the CPU has instructions for bf16 matrix products, without which they are slow."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
