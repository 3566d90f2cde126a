"""Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM") by DTensor.

The linear layers of every block are cut over the ranks: the first of a pair by column, the second by row, so
that a block needs two all-reduces forward and two backward, each of rows x time x width. Embedding and head
are whole on every rank. ``tensor+fsdp`` shards those slices and what is whole over the second dimension of a
mesh: groups of ``--shard-size`` ranks have a share of the rows each.
"""

from __future__ import annotations

import re

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from podtune.bench.models.stack import Stack
from podtune.bench.options import Options
from podtune.bench.strategies.contract import SetupContext
from podtune.bench.strategies.step import WholeModel, prepare
from podtune.run.errors import ConfigError

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def setup(context: SetupContext) -> WholeModel:
    """Every rank: a slice of every block, all rows; all ranks end a step with the same loss."""
    world, options = context.world, context.options
    model = prepare(context.build_model(), context)
    ranks = options.shard_size or world.world_size
    shape = (world.world_size // ranks, ranks)
    mesh = init_device_mesh(world.device_type, shape, mesh_dim_names=("data", "tensor"))
    parallelize_module(
        model, mesh["tensor"], {name: STYLES[how]() for name, how in layers(model, options).items()}
    )
    parameters = list(model.parameters())
    cut: list[nn.Parameter] = [p for p in parameters if isinstance(p, DTensor)]
    whole = [p for p in parameters if not isinstance(p, DTensor)]
    if shape[0] > 1:
        cut, whole = _shard(model, mesh["data"], cut)
    groups = [{"params": cut}, {"params": whole}]  # a fused step takes one kind of tensor
    return WholeModel(context, model, (world.rank // ranks, shape[0]), groups)


def _shard(
    model: Stack, mesh: DeviceMesh, cut: list[nn.Parameter]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Shard every slice over the ranks that hold the same one; the parameters on both meshes, and on one."""
    sliced = {name for name, parameter in model.named_parameters() if any(parameter is one for one in cut)}
    for block in [*model.inner, model]:  # tensor parallelism first: FSDP then shards each rank's slices
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    parameters = dict(model.named_parameters())
    return (
        [parameters[name] for name in parameters if name in sliced],
        [parameters[name] for name in parameters if name not in sliced],
    )


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
