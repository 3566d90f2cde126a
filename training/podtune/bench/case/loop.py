"""The loop that measures every strategy: parity first, warm-up dropped, the device idle around the clock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from podtune.bench.case.communication import CountCommunication
from podtune.bench.case.counted_memory import CountMemory
from podtune.bench.case.measure import GIB, Telemetry, flops_per_row, held_gib, host_to_device_gb_per_s
from podtune.bench.case.parity import PARITY_STEPS, compare_losses, reference_losses
from podtune.bench.case.run import CaseRun, Stepper
from podtune.plan.hardware import peak_flops
from podtune.plan.shapes import ConvNet
from podtune.run.record import CUDA_PEAK, Communication, Losses, Measurements, MemoryPeaks, Summary
from podtune.run.world import World

DISTINCT_BATCHES = 16  # then they come again: enough to learn from, few enough to keep in memory
T = TypeVar("T")


def measure(run: CaseRun) -> Measurements:
    """Run one case: ``measurements`` of its record. A collective call; rank 0 has them all."""
    options, world = run.options, run.world
    reference = None if options.skip_parity else reference_losses(run)
    started = time.perf_counter()
    cuda = world.device_type == "cuda"
    # of a GPU the allocator tells; what is compiled does not pass a dispatch mode
    counter = None if cuda or options.compile else CountMemory()
    with counter or contextlib.nullcontext():
        strategy = run.setup(options.strategy, world, options)
    run.parameters_gib = held_gib(strategy.model)
    taken = PARITY_STEPS + options.warmup + options.steps * options.repeats
    stepper = Stepper(run, strategy, run.batches(strategy.rows, min(DISTINCT_BATCHES, taken)))
    with counter or contextlib.nullcontext():
        stepper.step()
        time_to_first_step_s = time.perf_counter() - started
        stepper.step()
        counted = counter.of_step(stepper.step, strategy.model) if counter else None
    while reference and stepper.taken < PARITY_STEPS:
        stepper.step()
    parity = compare_losses(reference, stepper.losses(), options, world)
    measured = Measurements(time_to_first_step_s=time_to_first_step_s, parity=parity)
    if parity.status == "failed":
        return measured
    for _ in range(options.warmup):
        stepper.step()
    communication = _count_communication(run, stepper)
    if cuda:
        torch.cuda.reset_peak_memory_stats()  # warm-up and parity are no part of the peak
    with Telemetry(world.device) as telemetry:
        seconds = [stepper.timed(options.steps) for _ in range(options.repeats)]
    peaks = _gather(torch.cuda.max_memory_allocated() / GIB if cuda else 0.0, world)
    losses, counts = stepper.losses(), _gather(counted, world)
    if communication:
        seconds_by_collective = _collective_seconds(stepper.step, world)
        communication = replace(communication, seconds_by_collective=seconds_by_collective)
    measured = replace(
        measured,
        communication=communication,
        telemetry=telemetry.means(),
        peak_memory_gib=MemoryPeaks(max(peaks), tuple(peaks), CUDA_PEAK) if cuda else None,
        counted_memory_gib=max(filter(None, counts), key=lambda one: one.total, default=None),
        h2d_gb_per_s=host_to_device_gb_per_s(stepper.batches[0], world.device),
        loss=Losses(losses[0], losses[-1]),
    )
    if world.is_main:  # whose measurements become the record
        measured = _with_speeds(measured, run, Summary.of(*seconds))
    if options.profile or options.memory_snapshot:
        measured = _profiled(measured, run, stepper.step)
    return measured


def _with_speeds(measured: Measurements, run: CaseRun, timing: Summary) -> Measurements:
    """The measurements with what follows from the seconds of the timed steps."""
    options, rows = run.options, run.options.global_batch_size
    flops = rows * flops_per_row(run.build_model, options.sequence_length)
    # unknown on the CPU and on a GPU whose peak is not
    on_gpu = run.world.device_type == "cuda"
    peak = peak_flops(torch.cuda.get_device_name(), options.precision) if on_gpu else None
    measured = replace(
        measured,
        steps=timing.n,
        samples=timing.n * rows,
        step_time_s=timing,
        flops_per_step=flops,
        mfu=flops / timing.mean / (peak * run.world.world_size) if peak else None,
    )
    if isinstance(run.size, ConvNet):
        return replace(measured, samples_per_s=rows / timing.mean)
    tokens = rows * options.sequence_length
    return replace(
        measured,
        tokens=timing.n * tokens,
        tokens_per_s=tokens / timing.mean,
        flops_per_token=flops / tokens,
    )


def _profiled(measured: Measurements, run: CaseRun, step: Callable[[], None]) -> Measurements:
    from podtune.bench.case.profiling import profile_step

    profile = profile_step(step, Path(run.options.output), run.options, run.world)
    if profile is None:
        return measured
    communication = measured.communication
    if communication and profile.exposed_s is not None:
        share = profile.exposed_s / profile.step_s
        communication = replace(communication, seconds_exposed=profile.exposed_s, share=share)
    return replace(measured, profile=profile.content, communication=communication)


def _count_communication(run: CaseRun, stepper: Stepper) -> Communication | None:
    """Count one untimed step on every rank; what is reported is the rank that sends most."""
    with CountCommunication() as counter:
        stepper.step()
    own = Communication(
        bytes_per_step=sum(counter.sent_bytes.values()),
        bytes_by_collective=dict(counter.sent_bytes),
        calls_by_collective=dict(counter.calls),
    )
    by_rank = _gather(own, run.world)
    return max(by_rank, key=lambda rank: rank.bytes_per_step) if len(by_rank) > 1 else None


def _collective_seconds(step: Callable[[], None], world: World) -> dict[str, float]:
    """Seconds of one more step in each kind of collective, the mean of all ranks."""
    from podtune.bench.case.profiling import collective_seconds

    by_rank = _gather(collective_seconds(step, world), world)
    kinds = sorted({kind for seconds in by_rank for kind in seconds})
    return {kind: sum(rank.get(kind, 0.0) for rank in by_rank) / len(by_rank) for kind in kinds}


def _gather(value: T, world: World) -> list[T]:
    """``value`` of every rank, on every rank."""
    if world.world_size == 1:
        return [value]
    gathered = [value] * world.world_size
    dist.all_gather_object(gathered, value)
    return gathered
