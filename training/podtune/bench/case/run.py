"""One case on one rank: its model, rows and strategy, and the steps that are taken."""

from __future__ import annotations

import itertools
import time

import torch
import torch.distributed as dist

from podtune.bench.case.data import Rows, open_rows, share
from podtune.bench.case.measure import memory_gib, synchronise
from podtune.bench.models import Size, build
from podtune.bench.models.stack import Stack
from podtune.bench.options import Options
from podtune.bench.strategies.contract import Batch, SetupContext, Strategy
from podtune.bench.strategies.step import optimizer_factory
from podtune.bench.strategies.table import STRATEGIES
from podtune.run.world import World


class CaseRun:
    def __init__(self, options: Options, size: Size, world: World) -> None:
        self.options, self.size, self.world = options, size, world
        self.rows: Rows = open_rows(options, size)
        self.parameters_gib: float | None = None

    def memory_gib(self) -> dict[str, float]:
        """Memory that this rank holds now, for a case that ran out of it."""
        weights = {} if self.parameters_gib is None else {"parameters_gib": self.parameters_gib}
        return weights | memory_gib(self.world.device)

    def build_model(self) -> Stack:
        """The whole model, the same on every rank and every call."""
        torch.manual_seed(self.options.seed)
        return build(self.size, norm=self.options.norm, pretrained=self.options.pretrained)

    def setup(self, strategy: str, world: World, options: Options) -> Strategy:
        context = SetupContext(self.build_model, optimizer_factory(options), world, options)
        return STRATEGIES[strategy].load()(context)

    def batches(self, rows: tuple[int, int], count: int) -> list[Batch]:
        """This rank's part of the first ``count`` global batches, pinned where they go to a GPU."""
        return [self.batch(rows, step) for step in range(count)]

    def batch(self, rows: tuple[int, int], step: int, source: Rows | None = None) -> Batch:
        """This rank's part of one global batch, of the rows to train on unless ``source`` is given."""
        batch = (source or self.rows).batch(share(step, self.options.global_batch_size, *rows))
        if self.world.device_type == "cuda":
            batch = Batch(self.laid_out(batch.inputs).pin_memory(), batch.targets.pin_memory())
        return batch

    def laid_out(self, inputs: torch.Tensor) -> torch.Tensor:
        """Images with their channels together, as a GPU's convolutions want them, where the norm keeps that.

        Group norm gives them back channel by channel, so that every layer but the first would copy.
        """
        together = inputs.dim() == 4 and self.options.norm == "batch"
        return inputs.contiguous(memory_format=torch.channels_last) if together else inputs


class Stepper:
    """Takes steps over the batches in turn, and keeps the losses on the device until they are read.

    Copying a batch to the GPU is part of a step, as in training.
    """

    def __init__(self, run: CaseRun, strategy: Strategy, batches: list[Batch]) -> None:
        self.run, self.strategy, self.batches = run, strategy, batches
        self.device = run.world.device
        self.taken = 0
        self._losses: list[torch.Tensor] = []

    def step(self) -> None:
        batch = self.batches[self.taken % len(self.batches)].to(self.device)
        self._losses.append(self.strategy.train_step(batch))
        self.taken += 1

    def timed(self, steps: int) -> list[float]:
        """Seconds of each of ``steps`` steps. The device is idle before the first and after the last.

        On CUDA events mark the steps on the device, so that the host may run ahead as it does in training.
        """
        synchronise(self.device)
        if self.run.world.world_size > 1:
            dist.barrier()  # the clocks of all ranks start together
        if self.device == "cpu":
            marks = [time.perf_counter()]
            for _ in range(steps):
                self.step()
                marks.append(time.perf_counter())
            return [after - before for before, after in itertools.pairwise(marks)]
        events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(steps + 1)
        ]
        events[0].record()
        for event in events[1:]:
            self.step()
            event.record()
        synchronise(self.device)
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]

    def losses(self) -> list[float]:
        return [float(loss) for loss in self._losses]
