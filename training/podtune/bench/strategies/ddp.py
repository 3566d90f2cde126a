"""Data parallelism (Li et al. 2020, "PyTorch Distributed"): a copy of the model on every rank.

A step all-reduces the gradients once: 2 (N-1)/N x 4 bytes x parameters sent by every rank, in buckets, during
backward. ``--gradient-compression`` halves them (fp16, bf16), or sends two factors of rank r in place of each
matrix of n rows and m columns: (n + m) r of its n m elements (Vogels et al. 2019, "PowerSGD").
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from podtune.bench.strategies.contract import SetupContext
from podtune.bench.strategies.step import WholeModel, prepare

HOOKS: dict[str, Callable[..., Any]] = {
    "fp16": fp16_compress_hook,
    "bf16": bf16_compress_hook,
    "powersgd": powerSGD_hook,
}
RANK, UNCOMPRESSED_STEPS = 4, 2  # the paper's for a language model; DDP lays its buckets out in the first two


class InOrder(dist.ProcessGroup):
    """The default group, whose all-reduces are over when they return."""

    # PowerSGD sends its second and third message when the one before has come. Gloo says so in a thread of
    # its own, where two ranks would mix up those of several buckets, and none would be counted.

    def __init__(self) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())  # type: ignore[call-arg]
        assert dist.group.WORLD is not None
        self.all = dist.group.WORLD

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> dist.Work:  # type: ignore[override]
        """The all-reduce of the default group, waited for."""
        work = self.all.allreduce(tensors, opts)
        work.wait()
        return work


def setup(context: SetupContext) -> WholeModel:
    """Every rank: all weights, its share of the rows."""
    world, options = context.world, context.options
    model = DistributedDataParallel(
        prepare(context.build_model(), context),
        device_ids=[world.local_rank] if world.device_type == "cuda" else None,
        gradient_as_bucket_view=options.gradient_as_bucket_view is not False,
    )
    if options.gradient_compression != "none":
        state = None  # the casts' hooks need none: they reduce in the default group
        if options.gradient_compression == "powersgd":
            group = InOrder() if world.device_type == "cpu" else None
            state = PowerSGDState(group, RANK, UNCOMPRESSED_STEPS)
        model.register_comm_hook(state, HOOKS[options.gradient_compression])

    def reduce_in_the_last(last: bool) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if last else model.no_sync()

    return WholeModel(context, model, (world.rank, world.world_size), before_piece=reduce_in_the_last)
