"""Pipeline parallelism by torch.distributed.pipelining: the batch goes through the ranks in micro-batches.

``pipeline-gpipe`` (Huang et al. 2019) runs all forwards, then all backwards; ``pipeline-1f1b`` (Narayanan et
al. 2019) alternates them, so that a rank keeps the activations of at most P micro-batches instead of M. Both
idle for (P-1)/(M+P-1) of a step. ``pipeline-1f1b+ddp`` has copies of the pipeline, each with its share of the
rows, whose stages all-reduce their gradients: 2 (D-1)/D of a stage's weights for D copies.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from podtune.bench.strategies.contract import Batch, SetupContext
from podtune.bench.strategies.split import cut
from podtune.bench.strategies.step import Arithmetic, TorchState, mean_over

SCHEDULES: dict[str, type[ScheduleGPipe | Schedule1F1B]] = {
    "pipeline-gpipe": ScheduleGPipe,
    "pipeline-1f1b": Schedule1F1B,
    "pipeline-1f1b+ddp": Schedule1F1B,
}


class Autocast(nn.Module):
    """A part of the model whose forward runs under autocast; its backward must not."""

    def __init__(self, part: nn.Module, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.part, self.arithmetic = part, arithmetic

    def forward(self, x: Tensor) -> Tensor:
        with self.arithmetic.autocast():
            output: Tensor = self.part(x)
            return output


class Pipeline(TorchState):
    """Every rank: some blocks, all rows. The first reads the inputs, the last the targets."""

    def __init__(self, context: SetupContext) -> None:
        world, options = context.world, context.options
        stages = options.shard_size or world.world_size
        copies = world.world_size // stages
        self.rows = (world.rank // stages, copies)
        self.stage, self.last, self.device = world.rank % stages, stages - 1, world.device
        part, self.tied = cut(context, copies)
        self.optimizer = context.build_optimizer(part.parameters())
        self.arithmetic = Arithmetic(context)
        self.model: nn.Module = Autocast(part, self.arithmetic)
        mesh = init_device_mesh(world.device_type, (copies, stages), mesh_dim_names=("copy", "stage"))
        if copies > 1:  # the stage reduces in the backward pass of its last micro-batch
            self.model = DistributedDataParallel(self.model, process_group=mesh["copy"].get_group())
        stage = PipelineStage(
            self.model, self.stage, stages, torch.device(world.device), group=mesh["stage"].get_group()
        )
        self.schedule = SCHEDULES[options.strategy](
            stage, options.micro_batches, loss_fn=self.arithmetic.loss
        )

    def train_step(self, batch: Batch) -> Tensor:
        """One run of the schedule, which averages gradients over the micro-batches, then the update."""
        losses: list[Tensor] = []
        self.schedule.step(
            *([batch.inputs] if self.stage == 0 else []),
            target=batch.targets if self.stage == self.last else None,
            losses=losses,
            return_outputs=False,
        )
        self.tied.add_up()
        self.arithmetic.update(self.optimizer)
        loss = torch.stack(losses).detach().mean() if losses else torch.zeros((), device=self.device)
        if self.rows[1] > 1:
            return mean_over(loss, self.rows[1])  # of the last stages; the others add nothing
        dist.broadcast(loss, self.last)  # no other stage has one
        return loss

    def predict(self, batch: Batch) -> Tensor | None:
        """The schedule's forward passes, micro-batch after micro-batch."""
        with torch.no_grad():
            # with a loss function the schedule wants targets here, too
            logits: Tensor | None = self.schedule.eval(
                *([batch.inputs] if self.stage == 0 else []),
                target=batch.targets if self.stage == self.last else None,
            )
        return logits


setup = Pipeline
