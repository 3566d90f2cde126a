"""LoRA as products alone: PEFT's values and gradients, and PEFT's own where it does something else."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from podtune.sft.train.lora import FusedLora, fuse_adapters
from podtune.sft.train.parameters import leave_casts_to_autocast

Step = list[Tensor]  # output, gradient of the input, gradients of the adapters


class Mlp(nn.Module):
    """Two maps, one with a bias, beside a residual stream; an embedding that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 64)
        self.up, self.down = nn.Linear(64, 192, bias=False), nn.Linear(192, 64)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


def adapted(dtype: torch.dtype = torch.float32, **options: Any) -> PeftModel:
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=32, target_modules=["up", "down"], **options)
    model = get_peft_model(Mlp(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
        elif "lora" not in name:
            parameter.data = parameter.data.bfloat16().to(dtype)  # rounded alike in every dtype
    return model


def step(model: nn.Module, *, amp: bool = False, again: bool = False) -> Step:
    torch.manual_seed(1)
    wide = next(model.parameters()).dtype
    x = torch.randn(2, 5, 64).bfloat16().to(wide).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        y = checkpoint(model, x, use_reentrant=False) if again else model(x)
    (y * torch.randn(2, 5, 64).to(wide)).sum().backward()
    trained = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    return [y.detach(), *[grad for grad in (x.grad, *trained) if grad is not None]]


def error(found: Step, exact: Step) -> list[float]:
    pairs = zip(found, exact, strict=True)
    return [float((one.double() - other.double()).norm() / other.double().norm()) for one, other in pairs]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}])
def test_values_and_gradients_are_pefts_in_fp32(options: dict[str, Any], again: bool) -> None:
    plain, fused = adapted(**options), adapted(**options)
    assert fuse_adapters(fused) == 2
    assert max(error(step(fused, again=again), step(plain))) < 1e-6


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_in_bf16_it_is_nearer_to_the_exact_step_than_peft(base: torch.dtype) -> None:
    exact = step(adapted().double())
    plain, fused = adapted(base), adapted(base)
    assert fuse_adapters(fused, torch.bfloat16, cast_base=True) == 2
    assert {layer.weight.dtype for layer in fused.modules() if type(layer) is nn.Linear} == {
        torch.bfloat16,  # the base's: autocast has nothing to cast
        torch.float32,  # the adapters'
    }
    for model in (plain, fused):
        leave_casts_to_autocast(model)
    theirs, mine = error(step(plain, amp=True), exact), error(step(fused, amp=True), exact)
    assert max(mine) < 0.01
    assert sum(mine) < sum(theirs)


@pytest.mark.parametrize("options", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}])
def test_what_is_more_than_plain_lora_stays_pefts(options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a layer without a bias gets one for its adapter
        model = adapted(**options)
    assert fuse_adapters(model, torch.bfloat16, cast_base=True) == 0
    assert model.base_model.model.up.base_layer.weight.dtype == torch.float32


def test_a_base_that_is_trained_or_is_the_embedding_stays_pefts() -> None:
    model = adapted()
    model.base_model.model.up.base_layer.weight.requires_grad_(True)
    model.base_model.model.embedding.weight = model.base_model.model.down.base_layer.weight
    assert fuse_adapters(model) == 0


def test_adapters_are_saved_as_pefts(tmp_path: Path) -> None:
    fused = adapted()
    fuse_adapters(fused)
    assert isinstance(fused.base_model.model.up.lora_variant["default"], FusedLora)
    fused.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(copy.deepcopy(Mlp()), tmp_path)
    saved = {name: weight for name, weight in loaded.state_dict().items() if "lora" in name}
    assert saved
    assert all(torch.equal(weight, fused.state_dict()[name]) for name, weight in saved.items())
