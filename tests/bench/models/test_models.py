"""The benchmark's models are what their names say, and can be cut without changing what they compute."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from podtune.bench.case.data import SyntheticImages, SyntheticTokens
from podtune.bench.case.measure import flops_per_row
from podtune.bench.models import build, find_size
from podtune.bench.models.stack import Stack, cross_entropy
from podtune.bench.strategies.float8 import linear
from podtune.bench.strategies.split import even_parts, forward_flops_by_block
from podtune.plan.models import BENCHMARK_MODELS, shape_of
from podtune.plan.shapes import Transformer


def on_meta(name: str, norm: str = "group") -> Stack:
    with torch.device("meta"):
        return build(find_size(name), norm=norm)


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "published"), [("tinygpt-124m", 124_439_808), ("tinygpt-350m", 354_823_168)]
)
def test_tinygpt_has_gpt2s_parameters_and_a_vocabulary_in_whole_tiles(name: str, published: int) -> None:
    size = BENCHMARK_MODELS[name]
    assert isinstance(size, Transformer)
    padding = (size.vocabulary - 50257) * size.hidden
    assert count(on_meta(name)) - padding == published == size.parameters - padding
    assert size.vocabulary % 64 == 0


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize(("name", "published"), [("resnet18-cifar", 11_173_962), ("resnet50", 25_557_032)])
def test_resnets_have_their_published_parameters(name: str, published: int, norm: str) -> None:
    assert count(on_meta(name, norm)) == published


@pytest.mark.parametrize("name", ["tinygpt-124m", "resnet50"])
def test_counted_operations_are_those_of_the_formula(name: str) -> None:
    shape = shape_of(name)
    counted = flops_per_row(lambda: build(find_size(name)), 1024 if "gpt" in name else 0)
    # The formula forgets that an input's gradient is not needed in the first convolution.
    assert counted == pytest.approx(shape.flops_per_sample, rel=0.02)


def test_a_new_tinygpt_knows_nothing_and_its_weights_are_tied() -> None:
    torch.manual_seed(0)
    model = build(BENCHMARK_MODELS["tinygpt-test"])
    batch = SyntheticTokens(512, 64, seed=0).batch(range(4))
    assert cross_entropy(model(batch.inputs), batch.targets).item() == pytest.approx(math.log(512), rel=0.02)
    assert model.blocks[0].tokens.weight is model.blocks[-1].linear.weight
    residual, other = model.blocks[1].attention.out.weight, model.blocks[1].attention.qkv.weight
    assert residual.std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.05)
    assert other.std().item() == pytest.approx(0.02, rel=0.05)


def test_tinygpt_does_not_look_ahead() -> None:
    model = build(BENCHMARK_MODELS["tinygpt-test"]).eval()
    ids = torch.randint(512, (1, 32))
    changed = ids.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 512
    assert torch.equal(model(ids)[:, :20], model(changed)[:, :20])
    assert not torch.equal(model(ids)[:, 20:], model(changed)[:, 20:])


def test_parts_one_after_the_other_compute_the_whole() -> None:
    model = build(BENCHMARK_MODELS["tinygpt-test"])
    ids = torch.randint(512, (2, 16))
    x: torch.Tensor = ids
    for start, end in ((0, 2), (2, 5), (5, 6)):
        part = model.part(start, end)
        assert part.inner == [block for block in part.blocks if block in model.inner]
        x = part(x)
    assert torch.equal(x, model(ids))


@pytest.mark.parametrize("how", ["selective", "every-second", "full", "sequential"])
def test_checkpointing_changes_no_gradient(how: str) -> None:
    gradients = []
    for choice in ("none", how):
        torch.manual_seed(0)
        model = build(BENCHMARK_MODELS["tinygpt-test"])
        model.checkpoint_activations(choice)
        batch = SyntheticTokens(512, 16, seed=1).batch(range(2))
        cross_entropy(model(batch.inputs), batch.targets).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_the_synthetic_tokens_can_be_learned() -> None:
    torch.manual_seed(0)
    model = build(BENCHMARK_MODELS["tinygpt-test"])
    rows = SyntheticTokens(512, 32, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(40):
        batch = rows.batch(range(16 * step, 16 * step + 16))
        loss = cross_entropy(model(batch.inputs), batch.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0]


def test_the_synthetic_images_can_be_told_apart() -> None:
    seen, unseen = (
        SyntheticImages(10, 32, seed=0).batch(numbers) for numbers in (range(400), range(400, 500))
    )
    means = torch.stack([seen.inputs[seen.targets == label].mean(dim=0) for label in range(10)])
    nearest = torch.cdist(unseen.inputs.flatten(1), means.flatten(1)).argmin(dim=1)
    assert float((nearest == unseen.targets).float().mean()) > 0.95


def test_the_cut_is_even_by_cost_and_not_by_count() -> None:
    assert even_parts([0, 1, 1, 1, 1, 4], 2) == [(0, 5), (5, 6)]
    assert even_parts([0, 5, 5, 5, 5, 1], 2) == [(0, 3), (3, 6)]
    assert even_parts([1, 1, 1], 3) == [(0, 1), (1, 2), (2, 3)]
    blocks = list(on_meta("tinygpt-124m").blocks)
    with torch.device("meta"):
        costs = forward_flops_by_block(blocks, torch.zeros(1, 1024, dtype=torch.long))
    assert len(set(costs[1:-1])) == 1
    assert even_parts([float(cost) for cost in costs], 2) == [(0, 9), (9, 14)]  # the head weighs five layers


def test_fp8_products_are_near_the_exact_ones() -> None:
    torch.manual_seed(0)
    exact = torch.nn.Linear(64, 32)
    x = torch.randn(2, 16, 64, requires_grad=True)
    upstream = torch.randn(2, 16, 32)
    outputs = [linear(exact, x).float(), exact(x)]
    gradients = [torch.autograd.grad(output, (x, exact.weight, exact.bias), upstream) for output in outputs]
    for near, true in [(outputs[0], outputs[1]), *zip(*gradients, strict=True)]:
        assert float((near - true).norm() / true.norm()) < 0.1
    assert not torch.equal(*outputs)


def test_a_transformers_decoder_in_blocks_computes_what_transformers_does(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    LlamaConfig(
        vocab_size=128, max_position_embeddings=64, tie_word_embeddings=True, **sizes
    ).save_pretrained(tmp_path)
    size = find_size(f"hf:{tmp_path}")
    torch.manual_seed(0)
    blocks = build(size)
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(
        LlamaConfig.from_pretrained(tmp_path), attn_implementation="sdpa"
    )
    ids = torch.randint(128, (2, 24))
    torch.testing.assert_close(blocks(ids), whole(ids).logits)
    assert blocks.tensor_plan["blocks.*.layer.self_attn.q_proj"] == "colwise"
