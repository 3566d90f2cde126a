"""One process, no communication: the reference for every loss and every speed."""

from __future__ import annotations

from torch import Tensor

from podtune.bench.options import Options
from podtune.bench.strategies.contract import Batch, BuildModel, BuildOptimizer
from podtune.bench.strategies.step import Arithmetic, forward_backward, prepare
from podtune.run.distributed import World


class Single:
    """The whole model and the whole batch here."""

    rows = (0, 1)

    def __init__(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, world: World, options: Options
    ) -> None:
        self.model = prepare(build_model(), options, world.device)
        self.optimizer = build_optimizer(self.model.parameters())
        self.arithmetic = Arithmetic(options, world)
        self.accumulation = options.accumulation

    def train_step(self, batch: Batch) -> Tensor:
        """The loss of the global batch."""
        loss = forward_backward(self.model, batch, self.arithmetic, self.accumulation)
        self.arithmetic.update(self.optimizer)
        return loss


setup = Single
