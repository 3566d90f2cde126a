"""The one loop that measures every strategy: parity first, warm-up dropped, the device synchronised around
the clock.

What it returns becomes ``measurements`` of the cell's record.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from podtune.bench.case.communication import CountCommunication
from podtune.bench.case.counted_memory import CountMemory
from podtune.bench.case.data import Rows, open_rows, share
from podtune.bench.case.measure import (
    PeakMemory,
    Telemetry,
    flops_per_row,
    held_gib,
    host_to_device_gb_per_s,
    memory_gib,
    synchronise,
)
from podtune.bench.case.watchdog import Watchdog
from podtune.bench.models import Size, build
from podtune.bench.options import Options
from podtune.bench.strategies.contract import Batch, Strategy
from podtune.bench.strategies.step import optimizer_factory
from podtune.bench.strategies.table import STRATEGIES
from podtune.plan.hardware import peak_flops
from podtune.plan.shapes import ConvNet
from podtune.run import errors
from podtune.run.distributed import World, on_main
from podtune.run.record import (
    Communication,
    CountedMemory,
    Json,
    Losses,
    Measurements,
    MemoryPeaks,
    Parity,
    Spread,
)

PARITY_STEPS = 5
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2, "fp8": 2e-2}
DISTINCT_BATCHES = 16  # then they come again: enough to learn from, few enough to keep in memory


class CellRun:
    """One cell on one rank."""

    def __init__(self, options: Options, size: Size, world: World, watchdog: Watchdog) -> None:
        self.options, self.size, self.world, self.watchdog = options, size, world, watchdog
        self.rows: Rows = open_rows(options, size)
        self.parameters_gib: float | None = None

    def memory_gib(self) -> Json:
        """What this rank holds now, for a cell that ran out of memory."""
        weights = {} if self.parameters_gib is None else {"parameters_gib": self.parameters_gib}
        return weights | memory_gib(self.world.device)

    def build_model(self) -> Any:
        """The whole model, the same on every rank and every call."""
        torch.manual_seed(self.options.seed)
        return build(self.size, norm=self.options.norm, pretrained=self.options.pretrained)

    def setup(self, strategy: str, world: World, options: Options) -> Strategy:
        """The strategy, ready to step."""
        return STRATEGIES[strategy].load()(self.build_model, optimizer_factory(options), world, options)

    def batches(self, rows: tuple[int, int], count: int) -> list[Batch]:
        """This rank's part of the first ``count`` global batches, pinned where they will be copied to a
        GPU.
        """
        part, parts = rows
        made = [
            self.rows.batch(share(step, self.options.global_batch_size, part, parts)) for step in range(count)
        ]
        if self.world.device_type == "cuda":
            made = [Batch(_laid_out(inputs).pin_memory(), targets.pin_memory()) for inputs, targets in made]
        return made


def measure(run: CellRun) -> Measurements:
    """Run one cell and return its measurements. A collective call; rank 0 has them all."""
    options, world = run.options, run.world
    reference = None if options.skip_parity else _reference_losses(run)
    run.watchdog.beat("setting up the strategy")
    started = time.perf_counter()
    memory = PeakMemory(world.device)
    memory.restart()
    # of a GPU the allocator tells; what is compiled does not pass a dispatch mode
    counter = CountMemory() if world.device_type == "cpu" and not options.compile else None
    with counter or contextlib.nullcontext():
        strategy = run.setup(options.strategy, world, options)
    run.parameters_gib = held_gib(strategy.model)
    batches = run.batches(
        strategy.rows, min(DISTINCT_BATCHES, PARITY_STEPS + options.warmup + options.steps * options.repeats)
    )
    stepper = _Stepper(run, strategy, batches)
    with counter or contextlib.nullcontext():
        stepper.step()
        time_to_first_step_s = time.perf_counter() - started
        stepper.step()
        counted = counter.of_step(stepper.step, strategy.model) if counter else None
    while reference and stepper.taken < PARITY_STEPS:
        stepper.step()
    parity = compare_losses(reference, stepper.losses(), options, world)
    if parity.status == "failed":
        return Measurements(time_to_first_step_s=time_to_first_step_s, parity=parity)
    for _ in range(options.warmup):
        stepper.step()
    communication = _count_communication(run, stepper)
    memory.restart()
    with Telemetry(world.device) as telemetry:
        seconds = [stepper.timed(options.steps) for _ in range(options.repeats)]
    peaks = _gather(memory.gib(), world)
    losses = stepper.losses()
    measurements = Measurements(
        time_to_first_step_s=time_to_first_step_s,
        parity=parity,
        communication=communication,
        telemetry=telemetry.means(),
        # None where the system does not tell
        peak_memory_gib=None if None in peaks else MemoryPeaks(max(peaks), tuple(peaks), memory.kind),
        counted_memory_gib=_fullest(counted, world),
        h2d_gb_per_s=host_to_device_gb_per_s(batches[0], world.device),
        loss=Losses(losses[0], losses[-1]),
        **(_speed(run, seconds) if world.is_main else {}),  # whose measurements become the record
    )
    if options.profile or options.memory_snapshot:
        from podtune.bench.case.profiling import profile_step

        run.watchdog.beat("profiling")
        profile, exposed = profile_step(stepper.step, Path(options.output), options, world)
        if profile and communication and exposed is not None:
            share = exposed / profile["step_s"]
            communication = replace(communication, seconds_exposed=exposed, share=share)
        measurements = replace(measurements, profile=profile, communication=communication)
    return measurements


def _laid_out(inputs: torch.Tensor) -> torch.Tensor:
    """Images with their channels together, as a GPU's convolutions want them; what follows keeps that."""
    return inputs.contiguous(memory_format=torch.channels_last) if inputs.dim() == 4 else inputs


class _Stepper:
    """Takes steps over the batches in turn and keeps the losses on the device until somebody asks. Copying a
    batch to the GPU is part of a step, as in training.
    """

    def __init__(self, run: CellRun, strategy: Strategy, batches: list[Batch]) -> None:
        self.run, self.strategy, self.batches = run, strategy, batches
        self.device = run.world.device
        self.taken = 0
        self._losses: list[torch.Tensor] = []

    def step(self) -> None:
        """One step."""
        self.run.watchdog.beat(f"step {self.taken + 1}")
        batch = self.batches[self.taken % len(self.batches)].to(self.device)
        self._losses.append(self.strategy.train_step(batch))
        self.taken += 1

    def timed(self, steps: int) -> list[float]:
        """Seconds of each of ``steps`` steps. The device is idle before the first and after the last.

        On CUDA events mark the steps on the device, so that the host may run ahead as it does in training.
        """
        synchronise(self.device)
        if self.run.world.world_size > 1:
            dist.barrier()
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
        """All losses so far."""
        return [float(loss) for loss in self._losses]


def _reference_losses(run: CellRun) -> list[float] | None:
    """What one process gets from the same weights and the same batches: computed by rank 0, given to all.

    None if one process cannot hold it, which is no reason not to measure a strategy that can.
    """

    def alone() -> list[float] | None:
        run.watchdog.beat("computing the reference losses")
        try:
            return _losses_of_one_process(run)
        except Exception as error:
            if not errors.out_of_memory(error):
                raise
            return None

    losses = on_main(run.world, alone)
    gc.collect()  # fp8's linear layers hold their own module, in a circle
    if run.world.device_type == "cuda":
        torch.cuda.empty_cache()
    return losses


def _losses_of_one_process(run: CellRun) -> list[float]:
    """Plain eager ``single``, accumulating the very pieces that the strategy computes: what is compared is
    the strategy, not the order in which numbers are added, which five steps of a residual network can make
    visible. It also fits where they fit.
    """
    shares_rows = STRATEGIES[run.options.strategy].divides == "batch"
    pieces = (
        run.options.accumulation
        * (run.options.micro_batches or 1)
        * (run.world.world_size if shares_rows else 1)
    )
    plain = replace(
        run.options,
        strategy="single",
        compile=False,
        activation_checkpointing="none",
        micro_batches=0,
        accumulation=pieces,
    )
    alone = replace(run.world, rank=0, world_size=1)
    reference = run.setup("single", alone, plain)
    return [
        float(reference.train_step(batch.to(alone.device))) for batch in run.batches((0, 1), PARITY_STEPS)
    ]


def compare_losses(
    reference: list[float] | None, losses: list[float], options: Options, world: World
) -> Parity:
    """Whether the first losses equal one process's, within the precision's tolerance."""
    if reference is None:
        asked_for = options.skip_parity
        return Parity("skipped", "asked for" if asked_for else "one process cannot hold the model")
    pairs = list(zip(losses, reference, strict=False))
    differences = [abs(loss - expected) / abs(expected) for loss, expected in pairs]
    worst = max(differences) if all(map(math.isfinite, differences)) else math.inf  # NaN is equal to nothing
    tolerance = TOLERANCE[options.precision]
    status, reason = "ok" if worst <= tolerance else "failed", None
    if options.norm == "batch" and world.world_size * options.accumulation * (options.micro_batches or 1) > 1:
        status = "undefined"
        reason = "batch norm makes every way of splitting the batch another function"
    return Parity(status, reason, worst, tolerance, len(pairs), tuple(losses[: len(pairs)]), tuple(reference))


def _fullest(counted: CountedMemory | None, world: World) -> CountedMemory | None:
    """What was counted on the rank that held most."""
    by_rank = _gather(counted, world)
    return None if counted is None else max(by_rank, key=lambda memory: memory.total)


def _count_communication(run: CellRun, stepper: _Stepper) -> Communication | None:
    """Count one untimed step on every rank; what is reported is the rank that sends most."""
    with CountCommunication() as counter:
        stepper.step()
    counts = {
        "calls": dict(counter.calls),
        "message_bytes": dict(counter.message_bytes),
        "sent_bytes": dict(counter.sent_bytes),
    }
    by_rank = _gather(counts, run.world)
    if run.world.world_size == 1:
        return None
    sent = [sum(counts["sent_bytes"].values()) for counts in by_rank]
    busiest = by_rank[sent.index(max(sent))]
    return Communication(
        bytes_per_step=max(sent),
        bytes_by_collective=busiest["sent_bytes"],
        message_bytes_by_collective=busiest["message_bytes"],
        calls_by_collective=busiest["calls"],
        bytes_per_rank=tuple(sent),
    )


def _speed(run: CellRun, seconds: list[list[float]]) -> dict[str, Any]:
    """The measurements that follow from the seconds of each step, by their names."""
    options, world = run.options, run.world
    timing, rows = Spread.of(*seconds), options.global_batch_size
    flops = rows * flops_per_row(run.build_model, options.sequence_length)
    speed: dict[str, Any] = {
        "steps": timing.n,
        "samples": timing.n * rows,
        "step_time_s": timing,
        "flops_per_step": flops,
    }
    if isinstance(run.size, ConvNet):
        speed["samples_per_s"] = rows / timing.mean
    else:
        tokens = rows * options.sequence_length
        speed |= {
            "tokens": timing.n * tokens,
            "tokens_per_s": tokens / timing.mean,
            "flops_per_token": flops / tokens,
        }
    if world.device_type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(), options.precision)
        if peak is not None:
            speed["mfu"] = flops / timing.mean / (peak * world.world_size)
    return speed


def _gather(value: Any, world: World) -> list[Any]:
    """``value`` of every rank, on every rank."""
    if world.world_size == 1:
        return [value]
    gathered: list[Any] = [None] * world.world_size
    dist.all_gather_object(gathered, value)
    return gathered
