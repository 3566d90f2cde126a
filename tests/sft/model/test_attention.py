"""Rows laid end to end: the same numbers as a block-diagonal mask, and no row sees another."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from podtune.sft.cpu import attention as cpu_attention
from podtune.sft.model import attention
from podtune.sft.model.attention import (
    PER_ROW,
    choose_attention,
    per_row_attention,
    register_attention,
)

LENGTHS = (5, 1, 130, 40)
HEADS, SHARED, WIDTH = 4, 2, 8


def qkv(length: int, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    shapes = [(1, heads, length, WIDTH) for heads in (HEADS, SHARED, SHARED)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def row_of_token(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def masked_sdpa(
    tensors: list[torch.Tensor], lengths: tuple[int, ...], window: int | None = None
) -> torch.Tensor:
    row, place = row_of_token(lengths), torch.arange(sum(lengths))
    seen = (row[:, None] == row) & (place[:, None] >= place)
    if window is not None:
        seen &= place[:, None] - place < window
    return F.scaled_dot_product_attention(*tensors, attn_mask=seen, enable_gqa=True).transpose(1, 2)


def boundaries(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def positions(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def assert_same_forward_and_backward(
    ours: torch.Tensor, mine: list[torch.Tensor], theirs: torch.Tensor, other: list[torch.Tensor]
) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 7])
def test_attention_per_row_equals_a_block_diagonal_mask_forward_and_backward(window: int | None) -> None:
    mine, other = qkv(sum(LENGTHS)), qkv(sum(LENGTHS))
    mask = None if window is None else torch.empty(window, dtype=torch.bool)
    ours, weights = per_row_attention(torch.nn.Module(), *mine, mask, cu_seq_lens_q=boundaries(LENGTHS))
    assert weights is None
    assert_same_forward_and_backward(ours, mine, masked_sdpa(other, LENGTHS, window), other)


def test_boundaries_are_found_in_the_positions_when_the_collator_gave_none() -> None:
    mine, other = qkv(sum(LENGTHS)), qkv(sum(LENGTHS))
    ours, _ = per_row_attention(torch.nn.Module(), *mine, None, position_ids=positions(LENGTHS))
    assert_same_forward_and_backward(ours, mine, masked_sdpa(other, LENGTHS), other)


@pytest.mark.parametrize("lengths", [(100,), (256,), (600, 33, 300)])
def test_products_of_matrices_equal_causal_attention(lengths: tuple[int, ...]) -> None:
    mine, other = qkv(sum(lengths)), qkv(sum(lengths))
    plan = [(length, length > 40) for length in lengths]  # with the flash kernel beside
    ours = cpu_attention.Rows.apply(*mine, plan, WIDTH**-0.5, torch.float32)
    assert_same_forward_and_backward(ours, mine, masked_sdpa(other, lengths), other)


@pytest.mark.parametrize("products", [True, False])
def test_bf16_attention_stays_near_fp32_by_products_and_without(
    products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_attention, "_multiplies_bf16", lambda: products)
    mine, other = qkv(sum(LENGTHS)), qkv(sum(LENGTHS))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, _ = per_row_attention(torch.nn.Module(), *mine, None, cu_seq_lens_q=boundaries(LENGTHS))
    assert ours.dtype == torch.bfloat16
    theirs = masked_sdpa(other, LENGTHS)
    torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=0.03)
    weight = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    (ours * weight).sum().backward()
    (theirs * weight).sum().backward()
    for a, b in zip(mine, other, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0.1)


def test_values_of_another_width_than_the_keys_are_attended_to() -> None:
    query, key, value = qkv(sum(LENGTHS))
    wider = torch.cat((value, value), -1)
    ours, _ = per_row_attention(torch.nn.Module(), query, key, wider, None, cu_seq_lens_q=boundaries(LENGTHS))
    expected = masked_sdpa([query, key, wider], LENGTHS)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def test_checkpointed_layers_keep_nothing_of_their_attention() -> None:
    """Activation checkpointing sees what is saved for the backward pass, and drops it."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or len(saved), lambda _: None):
        out, _ = per_row_attention(
            torch.nn.Module(), *qkv(sum(LENGTHS)), None, cu_seq_lens_q=boundaries(LENGTHS)
        )
    assert len(saved) == 3 + 2 * len(LENGTHS)
    assert "tensor(" not in repr(vars(out.grad_fn))


def test_a_token_depends_on_earlier_tokens_of_its_own_row_only() -> None:
    tensors = qkv(12)
    out, _ = per_row_attention(torch.nn.Module(), *tensors, None, cu_seq_lens_q=boundaries((4, 5, 3)))
    out[0, 6].sum().backward()  # the third token of the second row
    reached = tensors[1].grad.abs().sum((0, 1, 3)) > 0  # type: ignore[union-attr]
    assert reached.tolist() == [False] * 4 + [True] * 3 + [False] * 5


def test_a_mask_that_was_built_is_obeyed_whatever_the_boundaries_say() -> None:
    tensors, lengths = qkv(9), (4, 5)
    everything = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    module = torch.nn.Module()
    module.num_key_value_groups = HEADS // SHARED  # type: ignore[assignment]
    ours, _ = per_row_attention(
        module, *tensors, everything, cu_seq_lens_q=boundaries(lengths), position_ids=positions(lengths)
    )
    expected = F.scaled_dot_product_attention(*tensors, attn_mask=everything, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def test_a_model_that_passes_neither_boundaries_nor_positions_is_refused_in_training() -> None:
    with pytest.raises(RuntimeError, match="sdpa"):
        per_row_attention(torch.nn.Module().train(), *qkv(6), None)


def test_a_model_that_caps_its_scores_is_refused_rather_than_trained_otherwise() -> None:
    with pytest.raises(RuntimeError, match="softcap"):
        per_row_attention(torch.nn.Module(), *qkv(6), None, cu_seq_lens_q=boundaries((2, 4)), softcap=30.0)


def test_a_word_that_nobody_knows_here_is_refused_and_none_is_not_one() -> None:
    with pytest.raises(RuntimeError, match="attends with block_indices"):
        per_row_attention(
            torch.nn.Module(), *qkv(6), None, cu_seq_lens_q=boundaries((2, 4)), block_indices=torch.zeros(1)
        )
    per_row_attention(torch.nn.Module(), *qkv(6), None, cu_seq_lens_q=boundaries((2, 4)), s_aux=None)


# ---- in a real model ----
@pytest.fixture(scope="module")
def model() -> Any:
    register_attention()
    torch.manual_seed(0)
    config = SmolLM3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    return SmolLM3ForCausalLM(config).eval()


def logits(model: Any, implementation: str, **batch: Any) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        found: torch.Tensor = model(**batch).logits
    return found


def test_rows_end_to_end_give_the_logits_of_each_row_alone(model: Any) -> None:
    rows = [torch.randint(1, 64, (1, n)) for n in LENGTHS]
    together = logits(
        model,
        PER_ROW,
        input_ids=torch.cat(rows, 1),
        position_ids=positions(LENGTHS),
        cu_seq_lens_q=boundaries(LENGTHS),
        use_cache=False,
    )
    alone = torch.cat([logits(model, "sdpa", input_ids=row) for row in rows], 1)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_a_model_builds_no_mask_for_rows_end_to_end(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a T x T mask was built")

    monkeypatch.setattr(masking_utils, "sdpa_mask", fail)
    ids = torch.randint(1, 64, (1, sum(LENGTHS)))
    batch = {
        "input_ids": ids,
        "position_ids": positions(LENGTHS),
        "cu_seq_lens_q": boundaries(LENGTHS),
        "use_cache": False,
    }
    logits(model, PER_ROW, **batch)


def test_padded_batches_and_generation_are_as_with_plain_sdpa(model: Any) -> None:
    ids = torch.randint(1, 64, (3, 9))
    mask = torch.ones_like(ids)
    mask[1, 5:] = mask[2, 2:] = 0
    padded = [
        logits(model, name, input_ids=ids, attention_mask=mask)[mask.bool()] for name in (PER_ROW, "sdpa")
    ]
    torch.testing.assert_close(*padded, rtol=0, atol=1e-6)
    answers = []
    for name in (PER_ROW, "sdpa"):
        model.set_attn_implementation(name)
        for prompt, seen in ((ids[:1], mask[:1]), (ids.flip(1), mask.flip(1))):
            answers.append(
                model.generate(
                    input_ids=prompt, attention_mask=seen, max_new_tokens=6, do_sample=False, pad_token_id=0
                )
            )
    assert torch.equal(answers[0], answers[2])
    assert torch.equal(answers[1], answers[3])


def test_the_cpu_attends_row_by_row_and_says_why() -> None:
    implementation, reason = choose_attention("cpu")
    assert implementation == PER_ROW
    assert "row" in reason


@pytest.mark.parametrize("names_sharing", [True, False])
def test_the_variable_length_kernel_is_called_in_the_words_of_its_torch(
    names_sharing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 has no ``enable_gqa``."""
    from torch.nn.attention import varlen

    called: dict[str, Any] = {}

    def newer(q: Any, k: Any, v: Any, a: Any, b: Any, m: int, n: int, *, scale: Any, window_size: Any,
              enable_gqa: bool = False) -> torch.Tensor:  # fmt: skip
        called.update(scale=scale, window_size=window_size, enable_gqa=enable_gqa)
        return torch.empty_like(q)

    def older(
        q: Any, k: Any, v: Any, a: Any, b: Any, m: int, n: int, *, scale: Any, window_size: Any
    ) -> torch.Tensor:
        called.update(scale=scale, window_size=window_size)
        return torch.empty_like(q)

    monkeypatch.setattr(varlen, "varlen_attn", newer if names_sharing else older)
    query, key = torch.empty(1, 4, 9, 8), torch.empty(1, 2, 9, 8)
    out = attention._varlen((query, key, key), query.dtype, boundaries((4, 5)), 5, 0.5, 3)
    assert out.shape == (1, 9, 4, 8)
    assert called == {"scale": 0.5, "window_size": (2, 0)} | ({"enable_gqa": True} if names_sharing else {})


@pytest.mark.parametrize("window", [None, 64])
def test_the_kernel_of_a_gpu_takes_what_it_is_given_and_builds_no_mask(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On fake CUDA tensors: torch's own shape rules, nothing computed."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        names: list[str] = []  # noqa: RUF012 - of this class alone
        elements = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            Largest.names.append(function._schema.name)
            sizes = [x.numel() for x in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(x)]
            Largest.elements = max([Largest.elements, *sizes])
            return out

    Largest.names, Largest.elements = [], 0
    monkeypatch.setattr(attention, "_has_varlen", lambda: True)
    # torch 2.15 asks the driver before it chooses a kernel
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    tokens, seen = 4096, None if window is None else torch.empty(window, dtype=torch.bool)
    with FakeTensorMode(), torch.no_grad():
        query = torch.empty(1, 16, tokens, 64, device="cuda")
        key = torch.empty(1, 4, tokens, 64, device="cuda")
        ends = torch.empty(9, dtype=torch.int32, device="cuda")
        # as under torch.autocast("cuda"), which asks for a driver
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
        with Largest():
            out, _ = per_row_attention(
                torch.nn.Module(), query, key, key, seen, cu_seq_lens_q=ends, max_length_q=512
            )
    assert (tuple(out.shape), out.dtype, out.device.type) == ((1, tokens, 16, 64), torch.bfloat16, "cuda")
    assert sum("varlen" in name for name in Largest.names) == 1, Largest.names
    assert Largest.elements <= query.numel(), "something of the size of tokens times tokens was made"
