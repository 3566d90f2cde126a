"""Data parallelism (Li et al. 2020, "PyTorch Distributed"): a copy of the model on every rank, gradients
all-reduced.

A step moves the gradients once: 2 (N-1)/N x 4 bytes x parameters sent by every rank, in buckets, during
backward.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from podtune.bench.options import Options
from podtune.bench.strategies.contract import Batch, BuildModel, BuildOptimizer
from podtune.bench.strategies.step import Arithmetic, forward_backward, mean_over, prepare
from podtune.run.distributed import World


class DataParallel:
    """Every rank: all weights, its share of the rows."""

    def __init__(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, world: World, options: Options
    ) -> None:
        self.rows = (world.rank, world.world_size)
        self.ranks = world.world_size
        self.model = DistributedDataParallel(
            prepare(build_model(), options, world.device),
            device_ids=[world.local_rank] if world.device_type == "cuda" else None,
            gradient_as_bucket_view=options.gradient_as_bucket_view is not False,
        )
        self.optimizer = build_optimizer(self.model.parameters())
        self.arithmetic = Arithmetic(options, world)
        self.accumulation = options.accumulation

    def train_step(self, batch: Batch) -> Tensor:
        """Gradients are reduced once, in the last backward of an accumulation."""
        loss = forward_backward(self.model, batch, self.arithmetic, self.accumulation, self._communicate_last)
        self.arithmetic.update(self.optimizer)
        return mean_over(loss, self.ranks)

    def _communicate_last(self, last: bool) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if last else self.model.no_sync()


setup = DataParallel
