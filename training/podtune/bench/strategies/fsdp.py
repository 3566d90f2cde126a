"""Fully sharded data parallelism (Zhao et al. 2023) by ``fully_shard``.

Weights, gradients and optimizer state are cut over the ranks, one unit per block and one for the rest.
``fsdp`` gathers every unit for forward and again for backward: with S bytes of weights and N ranks, a rank
sends 3 (N-1)/N S. ``fsdp-grad-op`` keeps the gathered weights in between: 2 (N-1)/N S. ``hsdp`` shards inside
groups (a node) and all-reduces the gradient shards between them. ``fsdp-offload`` is fsdp with its shards,
and the optimizer, in the memory of the CPU.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from podtune.bench.models.stack import Stack
from podtune.bench.options import Options
from podtune.bench.strategies.contract import SetupContext
from podtune.bench.strategies.step import AUTOCAST, WholeModel, prepare
from podtune.run.world import World


def setup(context: SetupContext) -> WholeModel:
    """Every rank: a shard of every parameter, its share of the rows."""
    world, options = context.world, context.options
    model = prepare(context.build_model(), context)
    sharded = shard(model, device_mesh(world, options), AUTOCAST.get(options.precision), options)

    def reduce_in_the_last(last: bool) -> AbstractContextManager[object]:
        sharded.set_requires_gradient_sync(last)  # until then the gradients are kept whole
        return contextlib.nullcontext()

    return WholeModel(context, model, (world.rank, world.world_size), before_piece=reduce_in_the_last)


def device_mesh(world: World, options: Options) -> DeviceMesh:
    """All ranks in a row, or for hsdp (groups, ranks of a group)."""
    if options.strategy == "hsdp":
        shape = (world.world_size // options.shard_size, options.shard_size)
        return init_device_mesh(world.device_type, shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(world.device_type, (world.world_size,))


def shard(model: Stack, mesh: DeviceMesh, dtype: torch.dtype | None, options: Options) -> FSDPModule:
    """Wrap in place. Embedding and head share a weight, so they stay together in the outer unit."""
    # In mixed precision the gathers move the low-precision weights and the gradients are summed in fp32.
    # Inputs stay as they are: ids have no other type, and autocast casts the rest.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None, cast_forward_inputs=False
    )
    again = options.strategy != "fsdp-grad-op"
    offload = OffloadPolicy()
    if options.strategy == "fsdp-offload":
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    wrap = partial(
        fully_shard, mesh=mesh, reshard_after_forward=again, mp_policy=policy, offload_policy=offload
    )
    units = [wrap(block) for block in model.inner]
    outer = wrap(model)
    ahead = options.prefetch or 0
    for index, unit in enumerate(units if ahead else []):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + ahead])
        unit.set_modules_to_backward_prefetch(units[max(0, index - ahead) : index][::-1])
    return outer
