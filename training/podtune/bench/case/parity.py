"""Parity: the first losses of a strategy against those of one process on the same weights and batches."""

from __future__ import annotations

import gc
import math
from dataclasses import replace

import torch

from podtune.bench.case.run import CaseRun
from podtune.bench.options import Options
from podtune.bench.strategies.table import STRATEGIES
from podtune.run import errors
from podtune.run.distributed import on_main
from podtune.run.record import Parity
from podtune.run.world import World

PARITY_STEPS = 5
COMPRESSED = {"none": 0.0, "fp16": 1e-3, "bf16": 1e-2, "powersgd": 5e-2}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2, "fp8": 2e-2}


def reference_losses(run: CaseRun) -> list[float] | None:
    """The losses of one process: computed by rank 0, given to all. A collective call.

    None if one process cannot hold the model, which is no reason not to measure a strategy that can.
    """

    def alone() -> list[float] | None:
        try:
            return _losses_of_one_process(run)
        except Exception as error:
            if not errors.out_of_memory(error):
                raise
            return None

    losses = on_main(run.world, alone)
    gc.collect()  # fp8's linear layers hold their own module, in a circle
    if run.world.device_type == "cuda":
        torch.cuda.empty_cache()  # else the reference's blocks stay reserved beside the strategy's
    return losses


def _losses_of_one_process(run: CaseRun) -> list[float]:
    """Losses of plain eager ``single`` over the very pieces that the strategy computes.

    What is compared is the strategy, not the order in which numbers are added, which five steps of a residual
    network can make visible. It also fits where the pieces fit.
    """
    copies = STRATEGIES[run.options.strategy].copies(run.options, run.world.world_size)
    pieces = run.options.accumulation * (run.options.micro_batches or 1) * copies
    plain = replace(
        run.options,
        strategy="single",
        compile=False,
        activation_checkpointing="none",
        gradient_compression="none",
        offload_activations=False,
        micro_batches=0,
        shard_size=0,
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
    """Compare the first losses with one process's, within the precision's tolerance."""
    if reference is None:
        return Parity("skipped", "asked for" if options.skip_parity else "one process cannot hold the model")
    pairs = list(zip(losses, reference, strict=False))
    differences = [abs(loss - expected) / abs(expected) for loss, expected in pairs]
    worst = max(differences) if all(map(math.isfinite, differences)) else math.inf  # NaN is equal to nothing
    tolerance = max(TOLERANCE[options.precision], COMPRESSED[options.gradient_compression])
    status, reason = "ok" if worst <= tolerance else "failed", None
    if options.norm == "batch" and world.world_size * options.accumulation * (options.micro_batches or 1) > 1:
        status = "undefined"
        reason = "batch norm makes every way of splitting the batch another function"
    return Parity(status, reason, worst, tolerance, len(pairs), tuple(losses[: len(pairs)]), tuple(reference))
