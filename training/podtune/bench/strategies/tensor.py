"""Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM") by DTensor.

The linear layers of every block are cut over the ranks: the first of a pair by column, the second by row, so
that a block needs two all-reduces forward and two backward, each of rows x time x width. Embedding and head
are whole on every rank.
"""

from __future__ import annotations

import re

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from podtune.bench.models.stack import Stack
from podtune.bench.options import Options
from podtune.bench.strategies.contract import BuildModel, BuildOptimizer
from podtune.bench.strategies.step import Arithmetic, WholeModel, prepare
from podtune.run.errors import ConfigError
from podtune.run.world import World

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def setup(
    build_model: BuildModel, build_optimizer: BuildOptimizer, world: World, options: Options
) -> WholeModel:
    """Every rank: a slice of every block, all rows; all ranks end a step with the same loss."""
    model = prepare(build_model(), options, world.device)
    mesh = init_device_mesh(world.device_type, (world.world_size,))
    parallelize_module(model, mesh, {name: STYLES[how]() for name, how in layers(model, options).items()})
    parameters = list(model.parameters())
    cut: list[nn.Parameter] = [p for p in parameters if isinstance(p, DTensor)]
    whole = [p for p in parameters if not isinstance(p, DTensor)]
    optimizer = build_optimizer([{"params": cut}, {"params": whole}])  # a fused step takes one kind of tensor
    return WholeModel(model, optimizer, Arithmetic(options, world), options.accumulation)


def layers(model: Stack, options: Options) -> dict[str, str]:
    """The model's plan with every layer by its full name.

    Raises:
        UserError: the model does not say how it divides.
    """
    patterns = {
        re.compile(re.escape(name).replace(r"\*", r"\d+")): how for name, how in model.tensor_plan.items()
    }
    styles = {
        name: how
        for name, _ in model.named_modules()
        for pattern, how in patterns.items()
        if pattern.fullmatch(name)
    }
    if not styles:
        raise ConfigError(
            f"{options.model} does not say which layers divide by column and row",
            where="--strategy",
            fix="use fsdp",
        )
    return styles
