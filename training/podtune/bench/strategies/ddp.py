"""Data parallelism (Li et al. 2020, "PyTorch Distributed"): a copy of the model on every rank.

A step all-reduces the gradients once: 2 (N-1)/N x 4 bytes x parameters sent by every rank, in buckets, during
backward; ``--gradient-compression`` halves them.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from podtune.bench.options import Options
from podtune.bench.strategies.contract import BuildModel, BuildOptimizer
from podtune.bench.strategies.step import Arithmetic, WholeModel, prepare
from podtune.run.world import World

HOOKS = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}


def setup(
    build_model: BuildModel, build_optimizer: BuildOptimizer, world: World, options: Options
) -> WholeModel:
    """Every rank: all weights, its share of the rows."""
    model = DistributedDataParallel(
        prepare(build_model(), options, world.device),
        device_ids=[world.local_rank] if world.device_type == "cuda" else None,
        gradient_as_bucket_view=options.gradient_as_bucket_view is not False,
    )

    if options.gradient_compression != "none":
        model.register_comm_hook(None, HOOKS[options.gradient_compression])

    def reduce_in_the_last(last: bool) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if last else model.no_sync()

    return WholeModel(
        model,
        build_optimizer(model.parameters()),
        Arithmetic(options, world),
        options.accumulation,
        rows=(world.rank, world.world_size),
        before_piece=reduce_in_the_last,
    )
