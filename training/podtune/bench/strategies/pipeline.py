"""Pipeline parallelism by torch.distributed.pipelining: the batch goes through the ranks in micro-batches.

``pipeline-gpipe`` (Huang et al. 2019) runs all forwards, then all backwards; ``pipeline-1f1b`` (Narayanan et
al. 2019) alternates them, so that a rank keeps the activations of at most P micro-batches instead of M. Both
idle for (P-1)/(M+P-1) of a step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from podtune.bench.options import Options
from podtune.bench.strategies.contract import Batch, BuildModel, BuildOptimizer
from podtune.bench.strategies.split import cut
from podtune.bench.strategies.step import Arithmetic, TorchState
from podtune.run.world import World

SCHEDULES = {"pipeline-gpipe": ScheduleGPipe, "pipeline-1f1b": Schedule1F1B}


class Autocast(nn.Module):
    """A part of the model whose forward runs under autocast; its backward must not."""

    def __init__(self, part: nn.Module, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.part, self.arithmetic = part, arithmetic

    def forward(self, x: Tensor) -> Tensor:
        """The part's."""
        with self.arithmetic.autocast():
            output: Tensor = self.part(x)
            return output


class Pipeline(TorchState):
    """Every rank: some blocks, all rows. The first reads the inputs, the last the targets."""

    rows = (0, 1)

    def __init__(
        self, build_model: BuildModel, build_optimizer: BuildOptimizer, world: World, options: Options
    ) -> None:
        self.stage = world.rank
        self.rank, self.last, self.device = world.rank, world.world_size - 1, world.device
        part, self.tied = cut(build_model, world, options)
        self.optimizer = build_optimizer(part.parameters())
        self.arithmetic = Arithmetic(options, world)
        self.model = Autocast(part, self.arithmetic)
        stage = PipelineStage(self.model, world.rank, world.world_size, torch.device(world.device))
        self.schedule = SCHEDULES[options.strategy](
            stage, options.micro_batches, loss_fn=self.arithmetic.loss
        )

    def train_step(self, batch: Batch) -> Tensor:
        """One run of the schedule, which averages gradients over the micro-batches, then the update."""
        losses: list[Tensor] = []
        self.schedule.step(
            *([batch.inputs] if self.rank == 0 else []),
            target=batch.targets if self.rank == self.last else None,
            losses=losses,
            return_outputs=False,
        )
        self.tied.add_up()
        self.arithmetic.update(self.optimizer)
        loss = torch.stack(losses).detach().mean() if losses else torch.zeros((), device=self.device)
        dist.broadcast(loss, self.last)
        return loss

    def predict(self, batch: Batch) -> Tensor | None:
        """The schedule's forward passes, micro-batch after micro-batch."""
        with torch.no_grad():
            logits: Tensor | None = self.schedule.eval(
                *([batch.inputs] if self.rank == 0 else []),
                target=batch.targets if self.rank == self.last else None,
            )
        return logits


setup = Pipeline
