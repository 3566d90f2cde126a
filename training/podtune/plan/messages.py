"""Messages of one step between ranks.

Sources: Rajbhandari et al. 2019 (ZeRO), section 7; Megatron-LM (Shoeybi et al. 2019), section 3;
NVIDIA/nccl-tests doc/PERFORMANCE.md for volumes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from podtune.plan.hardware import Link
from podtune.plan.memory import states
from podtune.plan.setup import PIPELINES, TrainingSetup
from podtune.plan.shapes import Transformer

DDP_BUCKET = 25 * 2**20


@dataclass(frozen=True)
class Collective:
    """One kind of message of a step: ``calls`` of ``message_bytes`` together, over ``ranks`` ranks."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "send"]
    calls: int
    message_bytes: float
    ranks: int
    between_nodes: bool

    @property
    def bytes_per_rank(self) -> float:
        """Bytes that the busiest rank puts on its link in a step (nccl-tests' bus bandwidth factors)."""
        if self.kind == "send":
            return self.message_bytes
        return (2 if self.kind == "all_reduce" else 1) * (self.ranks - 1) / self.ranks * self.message_bytes

    def seconds(self, link: Link, sharing: int = 1) -> float:
        """Latency of each hop and call on ``link``, and bytes over what ``sharing`` rings leave of it."""
        hops = 1 if self.kind == "send" else (2 if self.kind == "all_reduce" else 1) * (self.ranks - 1)
        return self.calls * hops * link.latency_s + sharing * self.bytes_per_rank / link.bus_bandwidth


def collectives(setup: TrainingSetup) -> list[Collective]:
    """The messages of one step over all accumulation steps; no_sync leaves one gradient reduction."""
    strategy, n, shape = setup.strategy, setup.world_size, setup.shape
    if n == 1:
        return []
    if (inner := setup.inner).strategy != strategy:
        return collectives(inner) + _of_slices(setup, inner)
    if strategy == "tensor":
        return [_tensor(setup)]
    if strategy in (*PIPELINES, "naive-mp"):
        return _between_stages(setup)
    between = setup.machines > 1
    gradients = setup.trained * setup.master_width
    if strategy in ("zero2", "zero3"):
        # gradients that are cut up cannot wait: DeepSpeed reduces in every backward pass
        gradients *= setup.accumulation
    buckets = max(1, math.ceil(gradients / DDP_BUCKET))
    if strategy == "ddp":
        return [Collective("all_reduce", buckets, gradients, n, between)]
    if strategy in ("fsdp", "zero3", "hsdp"):
        return _sharded(setup, gradients)
    # zero2 gathers once what was updated, fsdp-grad-op all weights before each forward pass
    once = strategy == "zero2"
    gathers = 1 if once else setup.accumulation
    gathered = setup.trained * setup.master_width if once else shape.parameters * setup.width
    return [
        Collective("reduce_scatter", max(buckets, shape.units), gradients, n, between),
        Collective("all_gather", shape.units * gathers, gathered * gathers, n, between),
    ]


def _sharded(setup: TrainingSetup, gradients: float) -> list[Collective]:
    """Full sharding, which hsdp does inside a group of ranks and reduces between groups."""
    shape, zero3 = setup.shape, setup.strategy == "zero3"
    inner, outer = setup.shards, setup.world_size // setup.shards
    between = setup.machines > 1
    messages = []
    if inner > 1:
        gathers = 2 * setup.accumulation  # before the forward and again before the backward pass
        weights = shape.parameters * (setup.master_width if zero3 else setup.width)
        if zero3 and isinstance(shape, Transformer) and shape.tied:  # gathered at both its places
            weights += shape.vocabulary * shape.hidden * setup.master_width
        across = between and setup.strategy != "hsdp"
        messages = [
            Collective("all_gather", shape.units * gathers, weights * gathers, inner, across),
            Collective("reduce_scatter", shape.units, gradients, inner, across),
        ]
    if outer > 1:
        messages.append(Collective("all_reduce", shape.units, gradients / inner, outer, between))
    return messages


def _of_slices(setup: TrainingSetup, inner: TrainingSetup) -> list[Collective]:
    """Full sharding of each rank's slice between the groups of tensor+fsdp; nothing of an offload."""
    copies, units, between = setup.world_size // inner.world_size, setup.shape.units, setup.machines > 1
    if copies == 1:
        return []
    weights, gradients, _ = states(inner)
    return [
        Collective("all_gather", 2 * units, 2 * weights, copies, between),
        Collective("reduce_scatter", units, gradients, copies, between),
    ]


def _tensor(setup: TrainingSetup) -> Collective:
    """Two all-reduces forward and two backward in each layer, and those that recomputation repeats.

    That is one a layer, since torch stops at the last value that is needed; sequential's are not counted.
    """
    units = setup.shape.units
    repeated = {"full": units, "every-second": math.ceil(units / 2)}
    sums = 4 * units + repeated.get(setup.activation_checkpointing, 0)
    size = sums * setup.batch_size * setup.shape.boundary_elements * setup.width
    return Collective("all_reduce", sums * setup.accumulation, size, setup.world_size, setup.machines > 1)


def _between_stages(setup: TrainingSetup) -> list[Collective]:
    """Messages of the busiest rank of a pipeline: one in the middle, or at an end.

    One in the middle passes activations on and gradients back, where the ends do one of the two. First and
    last rank add up the gradient of a tied embedding, which both hold.
    """
    shape, n, between = setup.shape, setup.world_size, setup.machines > 1
    parts = setup.pieces * setup.accumulation
    hidden = setup.batch_size * shape.boundary_elements * setup.master_width
    ends = [Collective("send", parts, hidden, n, between)]
    if isinstance(shape, Transformer) and shape.tied:
        size = shape.vocabulary * shape.hidden * setup.master_width
        ends.append(Collective("all_reduce", 1, size, 2, between))
    middle = Collective("send", 2 * parts, 2 * hidden, n, between)
    at_the_end = sum(message.bytes_per_rank for message in ends)
    return [middle] if n > 2 and middle.bytes_per_rank > at_the_end else ends
