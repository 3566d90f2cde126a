"""Norms in one step of autograd: the same numbers, for models that write them as Llama does and no others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.smollm3.modeling_smollm3 import SmolLM3RMSNorm

from podtune.sft.cpu.rms_norm import RMSNorm, patch_rms_norm

SIZE = 24


def with_weights(norm: Any) -> Any:
    torch.manual_seed(0)
    norm.weight.data.uniform_(-1, 2)
    return norm


def outcome(
    norm: Any, rows: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, norm.weight.grad = rows.clone().requires_grad_(), None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = norm(rows)
    (out.float() * weight).sum().backward()
    assert rows.grad is not None
    return out, rows.grad, norm.weight.grad


@pytest.mark.parametrize("kind", [SmolLM3RMSNorm, LlamaRMSNorm])
def test_a_patched_norm_has_the_values_and_gradients_of_the_model_in_bf16(kind: Any) -> None:
    usual = with_weights(kind(SIZE, 1e-5))
    model = nn.Sequential(copy.deepcopy(usual))
    assert patch_rms_norm(model) == 1
    rows = torch.randn(2, 7, SIZE) * 3
    weight = torch.randn(2, 7, SIZE).bfloat16().float()  # what a linear layer in bf16 gives back
    ours, theirs = outcome(model[0], rows, weight), outcome(usual, rows, weight)
    assert ours[0].dtype == torch.bfloat16
    assert torch.equal(ours[0], theirs[0].bfloat16())
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_without_autocast_and_for_what_is_in_bf16_the_models_own_norm_runs() -> None:
    model = nn.Sequential(with_weights(LlamaRMSNorm(SIZE)))
    rows = torch.randn(3, SIZE)
    patch_rms_norm(model)
    assert model(rows).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(rows.bfloat16()).dtype == torch.float32  # weight in fp32 times bf16
        assert model(rows).dtype == torch.bfloat16


@pytest.mark.parametrize("trained", [True, False])
def test_the_gradient_of_a_weight_is_computed_where_it_is_trained(
    trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    products, usual = [], torch.mv
    monkeypatch.setattr(torch, "mv", lambda *both: products.append(both) or usual(*both))
    rows, weight = torch.randn(3, SIZE, requires_grad=True), torch.ones(SIZE, requires_grad=trained)
    RMSNorm.apply(rows, weight, 1e-5, torch.float32).sum().backward()
    assert rows.grad is not None
    assert (weight.grad is not None, len(products)) == (trained, 1 + trained)


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(hidden_states if gate is None else hidden_states * gate)


@pytest.mark.parametrize(
    "other",
    [GemmaRMSNorm(SIZE), GatedRMSNorm(SIZE), nn.LayerNorm(SIZE), LlamaRMSNorm(SIZE).half(), LlamaRMSNorm(0)],
    ids=["one plus the weight", "gated", "no RMSNorm", "in half precision", "sharded away"],
)
def test_a_norm_that_computes_something_else_is_left_as_it_is(other: nn.Module) -> None:
    assert patch_rms_norm(nn.Sequential(other)) == 0
    assert "forward" not in vars(other)
