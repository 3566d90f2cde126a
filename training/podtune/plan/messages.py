"""Messages of one step between ranks.

Sources: Rajbhandari et al. 2019 (ZeRO), section 7; Megatron-LM (Shoeybi et al. 2019), section 3;
NVIDIA/nccl-tests doc/PERFORMANCE.md for volumes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from podtune.plan.layout import Layout
from podtune.plan.setup import PIPELINES, TrainingSetup
from podtune.plan.shapes import Transformer

if TYPE_CHECKING:
    from podtune.plan.hardware import Link

DDP_BUCKET = 25 * 2**20


@dataclass(frozen=True)
class Collective:
    """One kind of message of a step: ``calls`` of ``message_bytes`` together, over ``ranks`` ranks."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "send"]
    calls: int
    message_bytes: float
    ranks: int
    between_nodes: bool = False

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


def collectives(layout: Layout) -> list[Collective]:
    """The messages of one step over all accumulation steps; no_sync leaves one gradient reduction."""
    setup, strategy, n = layout.setup, layout.strategy, layout.setup.world_size
    if n == 1 or strategy == "single":
        return []
    if strategy == "tensor":
        return [_tensor(layout)]
    if strategy in (*PIPELINES, "naive-mp"):
        return _between_stages(layout)
    between, units = setup.machines > 1, layout.shape.units
    gradients = setup.trained * (setup.gradient_bytes or layout.master_width)
    if strategy in ("zero2", "zero3"):
        # gradients that are cut up cannot wait: DeepSpeed reduces in every backward pass
        gradients *= setup.accumulation
    buckets = max(1, math.ceil(gradients / DDP_BUCKET))
    if strategy == "ddp":
        return [Collective("all_reduce", buckets, gradients, n, between)]
    if strategy in ("fsdp", "zero3", "hsdp"):
        return _sharded(layout, gradients)
    # zero2 gathers once what was updated, fsdp-grad-op all weights before each forward pass
    once = strategy == "zero2"
    gathers = 1 if once else setup.accumulation
    gathered = setup.trained * layout.master_width if once else layout.shape.parameters * layout.width
    return [
        Collective("reduce_scatter", max(buckets, units), gradients, n, between),
        Collective("all_gather", units * gathers, gathered * gathers, n, between),
    ]


def _sharded(layout: Layout, gradients: float) -> list[Collective]:
    """Full sharding, which hsdp does inside a group of ranks and reduces between groups."""
    setup, shape, zero3 = layout.setup, layout.shape, layout.strategy == "zero3"
    inner, outer = layout.shards, setup.world_size // layout.shards
    between = setup.machines > 1 and layout.strategy != "hsdp"
    messages = []
    if inner > 1:
        gathers = 2 * setup.accumulation  # before the forward and again before the backward pass
        weights = shape.parameters * (layout.master_width if zero3 else layout.width)
        if zero3 and isinstance(shape, Transformer) and shape.tied:
            # gathered at both its places
            weights += shape.vocabulary * shape.hidden * layout.master_width
        messages = [
            Collective("all_gather", shape.units * gathers, weights * gathers, inner, between),
            Collective("reduce_scatter", shape.units, gradients, inner, between),
        ]
    if outer > 1:
        messages.append(Collective("all_reduce", shape.units, gradients / inner, outer, setup.machines > 1))
    return messages


def _tensor(layout: Layout) -> Collective:
    """Two all-reduces forward and two backward in each layer, and those that recomputation repeats."""
    setup, units = layout.setup, layout.shape.units
    sums = 4 * units + _repeated_sums(setup, units)
    size = sums * (setup.batch_size * layout.shape.boundary_elements * layout.width)
    return Collective("all_reduce", sums * setup.accumulation, size, setup.world_size, setup.machines > 1)


def _repeated_sums(setup: TrainingSetup, units: int) -> int:
    """All-reduces that recomputation repeats: torch stops at a segment's last value that is needed."""
    match setup.activation_checkpointing:
        case "full":
            return units
        case "every-second":
            return math.ceil(units / 2)
        case "sequential":  # over embedding, layers and head; the last segment is not checkpointed
            segments = math.isqrt(units + 2)
            return 2 * max(0, (segments - 1) * ((units + 2) // segments) - 1) - (segments - 1)
        case _:
            return 0


def _between_stages(layout: Layout) -> list[Collective]:
    """Messages of the busiest rank of a pipeline: one in the middle, or at an end.

    One in the middle passes activations on and gradients back, where the ends do one of the two. First and
    last rank add up the gradient of a tied embedding, which both hold.
    """
    setup, shape = layout.setup, layout.shape
    parts = setup.pieces if setup.strategy in PIPELINES else setup.accumulation
    hidden, n, between = (
        setup.batch_size * shape.boundary_elements * layout.master_width,
        setup.world_size,
        setup.machines > 1,
    )
    ends = [Collective("send", parts, hidden, n, between)]
    if isinstance(shape, Transformer) and shape.tied:
        size = shape.vocabulary * shape.hidden * (setup.gradient_bytes or layout.master_width)
        ends.append(Collective("all_reduce", 1, size, 2, between))
    middle = Collective("send", 2 * parts, 2 * hidden, n, between)
    at_the_end = sum(message.bytes_per_rank for message in ends)
    return [middle] if n > 2 and middle.bytes_per_rank > at_the_end else ends
