"""Attention of padding-free batches: each row attends to itself alone.

Such a batch comes as one long row with the boundaries beside it (``cu_seq_lens``). transformers' SDPA
would build a T x T mask for it, most of it empty. :func:`register_attention` adds an implementation under
:data:`PER_ROW` that builds no mask and attends row by row: with torch's variable-length kernel on a GPU, in
:mod:`podtune.sft.cpu.attention` on a CPU, one SDPA call a row elsewhere. Any other batch
(generation, padded evaluation, a mask that we do not know) takes plain SDPA.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from podtune.sft.cpu import attention as cpu_attention

PER_ROW = "podtune_per_row"

# What a layer may hand on and attention row by row either uses or can do without. ``sliding_window`` is the
# word of flash attention; here, as in SDPA, the mask alone says what a token sees.
_KNOWN = {
    *("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
    *("sliding_window", "use_cache", "is_causal"),
    *("output_attentions", "output_hidden_states", "output_router_logits"),
}
# The parts of transformers.masking_utils that :func:`per_row_attention` does without a mask.
_PLAIN = {
    "causal_mask_function",
    "and_masks.<locals>.and_mask",
    "packed_sequence_mask_function.<locals>.inner_mask",
    "remap_positions_for_packed_sequence.<locals>.inner_mask",
}
_WINDOW = "sliding_window_overlay.<locals>.inner_mask"


def choose_attention(device_type: str, *, half_precision: bool = True) -> tuple[str, str]:
    """Choose the fastest ``attn_implementation`` for ``cuda`` or ``cpu``, with the reason as one phrase.

    ``half_precision``: the run computes in bf16 or fp16, which every fused kernel of a GPU needs. Calls
    :func:`register_attention`, so that the name can be given to ``from_pretrained`` at once.
    """
    from transformers.utils import is_flash_attn_2_available

    register_attention()
    if device_type == "cuda" and half_precision:
        if is_flash_attn_2_available():
            return "flash_attention_2", "flash-attn is installed"
        if _has_varlen():
            return PER_ROW, "torch's variable-length kernel, no mask"
    return PER_ROW, "one SDPA call a row, no mask"


def register_attention() -> None:
    """Register :data:`PER_ROW` with transformers, as an attention and as a mask; twice is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PER_ROW, per_row_attention)
    AttentionMaskInterface.register(PER_ROW, per_row_mask)


def per_row_mask(
    batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any
) -> torch.Tensor | None:
    """Build transformers' SDPA mask, or for a padding-free batch what :func:`per_row_attention` needs of it.

    That is None where a token sees all of its row before it, and under a sliding window a vector as long as
    the window: its length is all that it says, and reading that waits for no GPU. A mask with a pattern of
    the model's own (chunks, blocks) is built as ever.
    """
    from transformers.masking_utils import sdpa_mask

    # transformers forbids the causal short cut exactly when it finds that position_ids start again in a row
    starts_again = not kwargs.get("allow_is_causal_skip", True)
    one_row = batch_size == 1 and q_length == kv_length > 1 and kwargs.get("attention_mask") is None
    if one_row and starts_again and (parts := _parts(kwargs["mask_function"])) <= {*_PLAIN, _WINDOW}:
        window = kwargs.get("local_size") or 0
        return torch.empty(window, dtype=torch.bool) if _WINDOW in parts else None
    built: torch.Tensor | None = sdpa_mask(batch_size, q_length, kv_length, *args, **kwargs)
    return built


def _parts(mask_function: Callable[..., Any]) -> set[str]:
    """Name the functions that a mask function of transformers is put together from."""
    held = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    held += [each for cell in held if isinstance(cell, tuple) for each in cell]
    inner = (_parts(each) for each in held if callable(each) and not isinstance(each, torch.Tensor))
    return {mask_function.__qualname__}.union(*inner)


def per_row_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally from each row to itself, in transformers' calling convention.

    Args:
        query: ``(1, heads, T, head_dim)``; ``key`` and ``value`` may have fewer heads (grouped queries).
        attention_mask: what :func:`per_row_mask` gave: None or a window for a padding-free batch; anything
            else goes to transformers' SDPA.
        kwargs: ``cu_seq_lens_q`` ``(rows + 1,)`` and ``max_length_q`` from TRL's collator, or
        ``position_ids`` ``(1, T)``.

    Returns:
        ``(1, T, heads, head_dim)``, and no weights.

    Raises:
        RuntimeError: the model needs more than plain attention, or does not pass the rows' boundaries.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    window = None
    if attention_mask is not None and attention_mask.dim() == 1:
        window, attention_mask = len(attention_mask), None
    boundaries = None if attention_mask is not None else _boundaries(module, query, key, kwargs, window)
    if boundaries is None:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return plain
    unknown = [name for name, given in kwargs.items() if given is not None and name not in _KNOWN]
    if unknown or kwargs.get("is_causal") is False:
        extra = (unknown or ["is_causal false"])[0]
        raise RuntimeError(
            f"{type(module).__name__} attends with {extra}, which attention row by row does not have: "
            "use --padding_free false --attn_implementation eager"
        )
    device, dtype = query.device.type, query.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    if query.is_cuda and dtype != torch.float32 and dropout == 0.0 and _has_varlen():
        longest = kwargs.get("max_length_q") or int(boundaries.diff().max())
        return _varlen((query, key, value), dtype, boundaries, longest, scaling, window), None
    lengths = boundaries.diff().tolist()
    return _row_by_row(query, key, value, lengths, dtype, dropout, scaling, window), None


def _boundaries(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, kwargs: dict[str, Any], window: int | None
) -> torch.Tensor | None:
    """Find the rows' boundaries, ``(rows + 1,)``; None for an ordinary batch."""
    length = query.shape[2]
    if query.shape[0] != 1 or length != key.shape[2] or length == 1:
        return None
    if (given := kwargs.get("cu_seq_lens_q")) is not None:
        return torch.as_tensor(given)
    positions = kwargs.get("position_ids")
    if positions is None or positions.shape[-1] != length or positions.dim() != 2:
        # the batch may be padding-free, and attending across its rows would go unseen
        if module.training or window:
            raise RuntimeError(
                f"{type(module).__name__} is told neither cu_seq_lens_q nor position_ids, so it cannot keep "
                "the rows of a batch apart: this model needs attn_implementation sdpa"
            )
        return None
    # A position that does not follow the one before begins a row, as in transformers'
    # find_packed_sequence_indices.
    starts = (positions[0].diff() != 1).nonzero().flatten() + 1
    if not len(starts):
        return None
    return torch.cat((starts.new_zeros(1), starts, starts.new_full((1,), length))).to(torch.int32)


def _row_by_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    dtype: torch.dtype,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """Attend by one call a row."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    on_cpu = query.device.type == "cpu"
    whole = sliding_window is None or max(lengths) <= sliding_window
    if on_cpu and dropout == 0.0 and whole and key.shape == value.shape:
        attended: torch.Tensor = cpu_attention.attend(query, key, value, lengths, scaling, dtype)
        return attended
    grouped = query.shape[1] != key.shape[1]
    with torch.autocast(query.device.type, enabled=False):
        wide = torch.float32 if on_cpu else dtype
        rows = []
        # splitting and cat keep the backward pass linear in T: a slice's gradient fills all of T
        for q, k, v in zip(
            *(x.to(wide).split_with_sizes(lengths, 2) for x in (query, key, value)), strict=True
        ):
            length, band = q.shape[2], None
            if sliding_window is not None and length > sliding_window:
                # a token sees itself and the window - 1 tokens before it
                band = torch.ones(length, length, dtype=torch.bool, device=q.device)
                band.tril_().triu_(1 - sliding_window)
            row = F.scaled_dot_product_attention(
                q, k, v, band, dropout, is_causal=band is None, scale=scaling, enable_gqa=grouped
            )
            rows.append(row.transpose(1, 2))
        return torch.cat(rows, 1).to(dtype)


def _varlen(
    tensors: tuple[torch.Tensor, ...],
    dtype: torch.dtype,
    boundaries: torch.Tensor,
    longest: int,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (x.to(dtype)[0].transpose(0, 1) for x in tensors)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    # torch 2.11 shares heads unasked and does not know the word
    named = "enable_gqa" in inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if named else {}
    rows = (boundaries, boundaries, longest, longest)
    out: Any = varlen_attn(query, key, value, *rows, scale=scaling, window_size=window, **options)
    attended: torch.Tensor = out[None]
    return attended


def _has_varlen() -> bool:
    """Return whether torch's variable-length kernel runs: on a GPU of compute capability 8.0 or newer."""
    return (
        torch.cuda.is_available()
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability() >= (8, 0)
    )
