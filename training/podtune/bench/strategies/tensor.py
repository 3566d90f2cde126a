"""Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM") by DTensor: the linear layers of every block cut
over the ranks.

The first of a pair is cut by column, the second by row, so that a block needs two all-reduces forward and two
backward, each of rows x time x width. Embedding and head are whole on every rank.
"""

from __future__ import annotations

import re

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from podtune.bench.models.stack import Stack
from podtune.bench.options import Options
from podtune.bench.strategies.contract import Batch, BuildModel, BuildOptimizer
from podtune.bench.strategies.step import Arithmetic, forward_backward, prepare
from podtune.run.distributed import World
from podtune.run.errors import ConfigError

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


class TensorParallel:
    """Every rank: a slice of every block, all rows."""

    rows = (0, 1)

    def __init__(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, world: World, options: Options
    ) -> None:
        self.model = prepare(build_model(), options, world.device)
        mesh = init_device_mesh(world.device_type, (world.world_size,))
        parallelize_module(
            self.model, mesh, {name: STYLES[how]() for name, how in layers(self.model, options).items()}
        )
        parameters = list(self.model.parameters())
        cut: list[nn.Parameter] = [p for p in parameters if isinstance(p, DTensor)]
        whole = [p for p in parameters if not isinstance(p, DTensor)]
        # a fused step takes one kind of tensor
        self.optimizer = build_optimizer([{"params": cut}, {"params": whole}])
        self.arithmetic = Arithmetic(options, world)
        self.accumulation = options.accumulation

    def train_step(self, batch: Batch) -> Tensor:
        """All ranks work on the same rows and end with the same loss."""
        loss = forward_backward(self.model, batch, self.arithmetic, self.accumulation)
        self.arithmetic.update(self.optimizer)
        return loss


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


setup = TensorParallel
