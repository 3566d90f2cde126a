"""Attention and loss as a GPU computes them, against the same in fp32 and plain torch (checks 1 to 5)."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch.nn import functional as F

LENGTHS = (1, 7, 513, 2048)


def test_the_machine_has_what_a_gpu_run_needs() -> None:
    from podtune.machine.building import c_compiler

    free, total = torch.cuda.mem_get_info()
    print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(), torch.cuda.nccl.version())
    print(torch.cuda.get_device_capability(), shutil.which("nvidia-smi"), free / 2**30, total / 2**30)
    assert c_compiler()
    assert free > 0.5 * total, "somebody else is on this GPU"


def rows_end_to_end(heads: int, shared: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    total = sum(LENGTHS)
    shapes = [(1, heads, total, 64), (1, shared, total, 64), (1, shared, total, 64)]
    tensors = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to("cuda", torch.int32)
    return tensors, ends


def reference(tensors: list[torch.Tensor], window: int | None) -> torch.Tensor:
    """Row by row with matrix products in fp32."""
    rows, group = [], tensors[0].shape[1] // tensors[1].shape[1]
    for q, k, v in zip(*(x.float().split(LENGTHS, 2) for x in tensors), strict=True):
        length = q.shape[2]
        band = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
        band = band if window is None else band.triu(1 - window)
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
        rows.append((scores.masked_fill(~band, float("-inf")).softmax(-1) @ v).transpose(1, 2))
    return torch.cat(rows, 1)


def attend(tensors: list[torch.Tensor], ends: torch.Tensor, window: int | None) -> torch.Tensor:
    from podtune.sft.model.attention import per_row_attention

    return per_row_attention(
        torch.nn.Module(),
        *tensors,
        None if window is None else torch.empty(window, dtype=torch.bool),
        cu_seq_lens_q=ends,
        max_length_q=max(LENGTHS),
    )[0]


@pytest.mark.parametrize(("heads", "shared"), [(16, 4), (16, 16)])
@pytest.mark.parametrize("window", [None, 64])
def test_the_variable_length_kernel_attends_as_fp32_does_row_by_row(
    heads: int, shared: int, window: int | None
) -> None:
    tensors, ends = rows_end_to_end(heads, shared, torch.bfloat16)
    ours = attend(tensors, ends, window)
    wide = [x.detach().float().requires_grad_() for x in tensors]
    expected = reference(wide, window)
    weight = torch.randn_like(expected)
    (ours.float() * weight).sum().backward()
    (expected * weight).sum().backward()
    pairs = [(ours, expected), *((x.grad, y.grad) for x, y in zip(tensors, wide, strict=True))]
    for mine, theirs in pairs:
        assert mine is not None
        assert theirs is not None
        assert float((mine.float() - theirs).norm() / theirs.norm()) < 1e-2
    with torch.no_grad():
        changed = [x.clone() for x in tensors]
        changed[1][:, :, : LENGTHS[0] + LENGTHS[1]] += 1.0  # keys of the first two rows
        tail = sum(LENGTHS[:2])
        assert torch.equal(attend(changed, ends, window)[:, tail:], ours[:, tail:]), "rows see each other"


def test_flash_kernels_run_and_memory_grows_with_the_tokens() -> None:
    def peak(times: int) -> tuple[float, set[str]]:
        global LENGTHS
        before, LENGTHS = LENGTHS, LENGTHS * times
        try:
            tensors, ends = rows_end_to_end(16, 4, torch.bfloat16)
            torch.cuda.reset_peak_memory_stats()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                attend(tensors, ends, None).sum().backward()
                torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated(), {event.key for event in profile.key_averages()}
        finally:
            LENGTHS = before

    (small, names), (large, _) = peak(4), peak(8)
    assert any("flash" in name.lower() for name in names), names
    assert not any("_scaled_dot_product" in name for name in names)
    assert large < 2.2 * small


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-3)])
def test_the_fused_head_gives_the_loss_and_gradients_of_logits_in_pieces(
    dtype: torch.dtype, tolerance: float
) -> None:
    from transformers import SmolLM3Config, SmolLM3ForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    from podtune.sft.model.attention import PER_ROW, register_attention
    from podtune.sft.train.loss import _fused

    register_attention()
    tokens, vocabulary = 28_672, 128_256
    config = SmolLM3Config(
        vocab_size=vocabulary, hidden_size=2048, intermediate_size=512, num_hidden_layers=1, pad_token_id=0,
        num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = SmolLM3ForCausalLM(config).to(dtype)
    model.set_attn_implementation(PER_ROW)
    ids = torch.randint(1, vocabulary, (1, tokens), device="cuda")
    positions = torch.arange(1024, device="cuda").repeat(tokens // 1024)[None]
    ends = torch.arange(0, tokens + 1, 1024, device="cuda", dtype=torch.int32)
    batch = {"input_ids": ids, "position_ids": positions, "cu_seq_lens_q": ends, "max_length_q": 1024}
    hidden = model.model(**batch, use_cache=False).last_hidden_state[:, :-1].detach()
    total, weight_grad = torch.zeros((), device="cuda"), torch.zeros(vocabulary, 2048, device="cuda")
    head = model.lm_head.weight.detach().float().requires_grad_()
    for piece, labels in zip(hidden[0].split(2048), ids[0, 1:].split(2048), strict=True):
        part = F.cross_entropy(piece.float() @ head.T, labels, reduction="sum")
        weight_grad += torch.autograd.grad(part, head)[0]
        total += part.detach()
    add_fused_lm_head(model, outputs=("log_probs", "is_top1"))
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    loss, _, scored = _fused(model, {**batch, "labels": ids, "use_cache": False})
    loss.backward()
    assert int(scored) == tokens - 1
    assert float(abs(loss - total) / total) < tolerance
    assert (
        float((model.lm_head.weight.grad.float() - weight_grad).norm() / weight_grad.norm()) < 5 * tolerance
    )
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    assert torch.cuda.max_memory_allocated() - held - gradients < 2.5 * 2**30


def test_a_batch_without_a_trained_token_gives_zero_with_gradients() -> None:
    from transformers import SmolLM3Config, SmolLM3ForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    from podtune.sft.train.loss import _fused

    config = SmolLM3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, pad_token_id=0,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    with torch.device("cuda"):
        model: Any = SmolLM3ForCausalLM(config)
    add_fused_lm_head(model, outputs=("log_probs", "is_top1"))
    ids = torch.randint(1, 64, (1, 33), device="cuda")
    for labels, scored in ((torch.full_like(ids, -100), False), (ids, True)):
        model.zero_grad()
        loss, _, _ = _fused(model, {"input_ids": ids, "labels": labels, "use_cache": False})
        loss.backward()
        assert bool(torch.isfinite(loss))
        assert (float(loss) > 0) == scored
        assert all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters())
