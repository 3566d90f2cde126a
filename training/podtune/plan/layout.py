"""Who holds what of a model, and who sends what to whom: the formulas that :mod:`podtune.plan.plan` puts
together.

Sources: Rajbhandari et al. 2019 (ZeRO), sections 3.1, 5 and 7; NVIDIA/nccl-tests doc/PERFORMANCE.md for
volumes; Huang et al. 2019 (GPipe), section 2.3, for the bubble; Korthikanti et al. 2022 for activations (see
:mod:`podtune.plan.shapes`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

from podtune.plan.shapes import Checkpointing, Kept, Opaque, Shape, Transformer

if TYPE_CHECKING:
    from podtune.plan.hardware import Link

DDP_BUCKET = 25 * 2**20
ZERO_BUCKET = 500_000_000  # elements of DeepSpeed's, if the model has as many
FUSED_TILE = (4096, 32768)  # tokens x vocabulary that TRL's fused head projects at once
DATA_PARALLEL = ("ddp", "fsdp", "fsdp-grad-op", "hsdp", "zero2", "zero3")
PIPELINES = ("pipeline-gpipe", "pipeline-1f1b")
PLANNED = ("single", *DATA_PARALLEL, "naive-mp", *PIPELINES, "tensor")  # what these formulas cover
_STAGE = {"zero2": 2, "fsdp-grad-op": 2, "zero3": 3, "fsdp": 3, "hsdp": 3}


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
        """Time on ``link`` that ``sharing`` rings use at once: latency a hop and call, and bytes over bus
        bandwidth.
        """
        hops = 1 if self.kind == "send" else (2 if self.kind == "all_reduce" else 1) * (self.ranks - 1)
        return self.calls * hops * link.latency_s + sharing * self.bytes_per_rank / link.bus_bandwidth


def partition(parts: tuple[float, float, float], stage: int, ranks: int) -> tuple[float, float, float]:
    """Weights, gradients and optimizer state a rank under ZeRO ``stage`` 0 to 3 over ``ranks`` (ZeRO, figure
    1).
    """
    weights, gradients, optimizer = parts
    return (
        weights / (ranks if stage >= 3 else 1),
        gradients / (ranks if stage >= 2 else 1),
        optimizer / (ranks if stage >= 1 else 1),
    )


def bubble_share(stages: int, micro_batches: int) -> float:
    """The idle share of a pipeline's step, (P-1)/(M+P-1); with one micro-batch it is naive model
    parallelism's 1 - 1/P.
    """
    return (stages - 1) / (micro_batches + stages - 1)


def even_parts(costs: Sequence[float], parts: int) -> list[tuple[int, int]]:
    """``parts`` consecutive, non-empty ranges (start, end) whose dearest is as cheap as can be.

    Among cuts with the same dearest part, one whose other parts are even too (the sum of squares decides).
    """

    @cache
    def best(start: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        if left == 1:
            cost = sum(costs[start:])
            return cost, cost * cost, (len(costs),)
        parts: list[tuple[float, float, tuple[int, ...]]] = []
        for end in range(start + 1, len(costs) - left + 2):
            here = sum(costs[start:end])
            dearest, squares, ends = best(end, left - 1)
            parts.append((max(here, dearest), here * here + squares, (end, *ends)))
        return min(parts)

    ends = best(0, parts)[2]
    return list(zip((0, *ends[:-1]), ends, strict=True))


@dataclass(frozen=True)
class Layout:
    """Who holds what, and who sends what to whom."""

    shape: Shape
    strategy: str
    world_size: int
    nodes: int
    precision: str
    batch_size: int
    micro_batches: int
    accumulation: int
    checkpointing: Checkpointing
    fused_head: bool = False
    lora: int | None = None
    lora_dropout: float = 0.0
    lora_cast: bool = False
    bucket_view: bool = True
    shard_size: int | None = None
    zero_bucket: bool = False

    @property
    def width(self) -> float:
        """Bytes of an activation or of a weight that is computed with."""
        return 4.0 if self.precision == "fp32" else 2.0

    @property
    def master_width(self) -> float:
        """Bytes of a weight as it is kept and of a gradient as it is reduced: under autocast those are
        fp32.
        """
        return 4.0 if self.precision.endswith("-autocast") else self.width

    @property
    def stages(self) -> int:
        """Parts into which the layers are cut."""
        return self.world_size if self.strategy in (*PIPELINES, "naive-mp") else 1

    @property
    def replicas(self) -> int:
        """Parts into which the batch is cut."""
        return self.world_size if self.strategy in DATA_PARALLEL else 1

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the states: within a machine for hsdp, or half of a single one."""
        if self.strategy == "hsdp":
            if self.shard_size:
                return self.shard_size
            groups = (
                self.nodes
                if self.nodes > 1
                else 2
                if self.world_size >= 4 and self.world_size % 2 == 0
                else 1
            )
            return self.world_size // groups
        return self.world_size if self.strategy in _STAGE else 1

    @property
    def bubble(self) -> float:
        return bubble_share(self.stages, self.micro_batches if self.strategy in PIPELINES else 1)

    def held(self, parameters: float) -> float:
        """Parameters of the fullest rank before sharding."""
        if self.strategy == "tensor":
            return parameters * (1 - self._divided_share * (1 - 1 / self.world_size))
        return parameters / self.stages

    @property
    def _divided_share(self) -> float:
        return self.shape.divisible / self.shape.parameters

    def states(self, whole: tuple[float, float, float]) -> tuple[float, float, float]:
        """Bytes of weights, gradients and optimizer on the fullest rank, of those of the whole model."""
        weights, gradients, optimizer = partition(
            (self.held(whole[0]), self.held(whole[1]), self.held(whole[2])),
            _STAGE.get(self.strategy, 0),
            self.shards,
        )
        if self.accumulation > 1 and self.strategy in ("fsdp", "fsdp-grad-op", "hsdp"):
            gradients = whole[1]  # FSDP keeps them whole until the last micro-batch is reduced
        if self.strategy in ("zero2", "zero3") and self.master_width == 4:
            # DeepSpeed updates a copy of its part of the weights, also where these are in 32 bits already
            trained = self.shape.parameters if self.lora is None else self.shape.lora_parameters(self.lora)
            optimizer += 4.0 * trained / self.shards
        return weights, gradients, optimizer

    @property
    def kept(self) -> Kept:
        """What a layer keeps, by the precision and by LoRA."""
        lora = self.lora is not None
        return Kept(
            stored=self.master_width,
            compute=self.width,
            norms_trained=not lora,
            adapter_copies=lora and bool(self.lora_dropout or self.lora_cast),
            adapter_mask=1.0 if lora and self.lora_dropout else 0.0,
            adapter_passing=lora
            * (4.0 if self.lora_cast else 2.0)
            * (self.lora_cast + bool(self.lora_dropout)),
            selective=self.checkpointing == "selective",
        )

    def activations(self) -> float | None:
        """Bytes kept for the backward pass on the fullest rank, and what that pass needs beyond the head's;
        None if unknown.
        """
        if isinstance(self.shape, Opaque):
            return None
        kept, again = self._layers_bytes(self.shape.units / self.stages)
        return self._samples * (self._in_flight() * kept + max(0.0, again - self._head_bytes()))

    def head(self) -> float | None:
        """Bytes of the logits and the loss at their worst moment; None if unknown."""
        return (
            None if isinstance(self.shape, Opaque) else self._samples * self._head_bytes() + self._head_tile()
        )

    @property
    def _samples(self) -> float:
        """Of one forward pass on one rank."""
        pieces = self.micro_batches if self.strategy in PIPELINES else self.accumulation
        return self.batch_size / (self.replicas * pieces)

    def _in_flight(self) -> int:
        """Micro-batches whose activations a stage holds: GPipe all, 1F1B at most P, on the first stage."""
        if self.strategy == "pipeline-gpipe":
            return self.micro_batches
        return min(self.stages, self.micro_batches) if self.strategy == "pipeline-1f1b" else 1

    def _head_bytes(self) -> float:
        """Of one sample: logits as the products put them out, in 32 bits, and their gradient; GPipe's last
        stage holds those of every micro-batch.
        """
        if self.fused_head and isinstance(self.shape, Transformer):
            # the hidden states, their gradient in 32 bits, and once more as they are
            return self.shape.boundary_elements * (2 * self.master_width + 4)
        waiting = self.micro_batches if self.strategy == "pipeline-gpipe" else 1
        head = self.shape.head_elements * (waiting * (self.width + 4) + 8)
        if self.strategy != "pipeline-1f1b":
            return head
        # the last stage has the head, the first the micro-batches in flight
        first, last = self._in_flight(), 1
        return max(0.0, head - (first - last) * self._layers_bytes(self.shape.units / self.stages)[0])

    def _head_tile(self) -> float:
        """What the fused head holds whatever the rows: a tile of logits, and its own gradient in 32 bits
        before that joins the others.
        """
        if not self.fused_head or not isinstance(self.shape, Transformer):
            return 0.0
        tokens = min(self._samples * self.shape.sequence_length, FUSED_TILE[0])
        weight = 4.0 * self.shape.vocabulary * self.shape.hidden if self.lora is None else 0.0
        return tokens * min(self.shape.vocabulary, FUSED_TILE[1]) * self.width + weight

    def _layers_bytes(self, units: float) -> tuple[float, float]:
        """Bytes a sample over ``units`` blocks: what the forward pass keeps, and what the backward pass has
        beside it at its fullest moment, when a block is whole again and its gradients are made.
        """
        shape, kept = self.shape, self.kept
        assert not isinstance(shape, Opaque)
        tensor = self.world_size if self.strategy == "tensor" else 1
        whole, boundary = shape.layer_bytes(kept, tensor), kept.stored * shape.boundary_elements
        gradients = shape.backward_bytes(kept, tensor)
        match self.checkpointing:
            case "sequential":  # the last segment is not checkpointed
                segments = max(1, math.isqrt(math.ceil(units)))
                return (segments - 1) * boundary + units / segments * whole, gradients
            case "full":
                return units * boundary, min(1.0, units) * whole + gradients - boundary
            case "every-second":  # the block after a checkpointed one is gone when that is computed again
                return units / 2 * (boundary + whole), gradients
            case "selective":
                again = shape.layer_bytes(replace(kept, selective=False), tensor)
                return units * whole, again + gradients - whole
            case _:
                return units * whole, gradients

    def buffers(self, trained: float) -> float:
        """Bytes of what is gathered, bucketed or cast for a moment: with full sharding two units (at work and
        prefetched) and a unit's whole gradients, in the backward pass, when the head's bytes are gone; of
        ZeRO its bucket of gradients, which stage 3 never lets go.
        """
        bucket = 4.0 * min(ZERO_BUCKET, trained) if self.zero_bucket else 0.0
        if self.strategy in ("fsdp", "hsdp", "zero3"):
            units = (2.0 * self.width + 4.0) * self.shape.largest_unit
            return self._behind_head(units) + (bucket if self.strategy == "zero3" else 0.0)
        if self.strategy == "zero2":
            return self.casts() + self._behind_head(bucket)
        if self.strategy == "ddp" and not self.bucket_view:
            return 4.0 * trained + self.casts()  # gradients in their buckets, beside themselves
        return self.casts()

    def _behind_head(self, needed: float) -> float:
        """Of ``needed`` bytes in the backward pass, those that do not lie where the head's were."""
        if isinstance(self.shape, Opaque):
            return needed
        again = self._layers_bytes(self.shape.units / self.stages)[1]
        return max(0.0, needed - max(0.0, self._head_bytes() - again) * self._samples)

    def casts(self) -> float:
        """Bytes of the 16-bit copies of 32-bit weights that autocast keeps over a forward pass; none where
        FSDP gathers 16-bit weights, nor of frozen ones, which it casts anew in every use.
        """
        whole = self.strategy not in ("fsdp", "fsdp-grad-op", "hsdp", "zero3")
        if self.width == self.master_width or not whole or self.lora is not None:
            return 0.0
        shape = self.shape
        head = (
            shape.vocabulary * shape.hidden if isinstance(shape, Transformer) and not self.fused_head else 0
        )
        return self.width * self.held(shape.divisible + head if head else shape.divisible or shape.parameters)

    def collectives(self, trained: float, gradient_bytes: float | None) -> list[Collective]:
        """The messages of one step, all accumulation steps included; no_sync leaves one gradient
        reduction.
        """
        n, units = self.world_size, self.shape.units
        if n == 1 or self.strategy == "single":
            return []
        grads = trained * (gradient_bytes or self.master_width)
        if self.strategy in ("zero2", "zero3"):
            # gradients that are cut up cannot wait: DeepSpeed reduces in every backward pass
            grads *= self.accumulation
        weights = self.shape.parameters * (self.master_width if self.strategy == "zero3" else self.width)
        buckets = max(1, math.ceil(grads / DDP_BUCKET))
        hidden = (
            self.batch_size
            * self.shape.boundary_elements
            * (self.width if self.strategy == "tensor" else self.master_width)
        )
        match self.strategy:
            case "ddp":
                return [Collective("all_reduce", buckets, grads, n, self.nodes > 1)]
            case "zero2" | "fsdp-grad-op":
                # zero2 gathers what was updated
                gathered = trained * self.master_width if self.strategy == "zero2" else weights
                gathers = 1 if self.strategy == "zero2" else self.accumulation
                return [
                    Collective("reduce_scatter", max(buckets, units), grads, n, self.nodes > 1),
                    Collective("all_gather", units * gathers, gathered * gathers, n, self.nodes > 1),
                ]
            case "fsdp" | "zero3" | "hsdp":
                inner, outer = self.shards, n // self.shards
                between = self.nodes > 1 and self.strategy != "hsdp"
                operations = []
                if inner > 1:
                    gathers = 2 * self.accumulation  # before the forward and again before the backward pass
                    if self.strategy == "zero3" and isinstance(self.shape, Transformer) and self.shape.tied:
                        # gathered at both its places
                        weights += self.shape.vocabulary * self.shape.hidden * self.master_width
                    operations = [
                        Collective("all_gather", units * gathers, weights * gathers, inner, between),
                        Collective("reduce_scatter", units, grads, inner, between),
                    ]
                if outer > 1:
                    operations.append(Collective("all_reduce", units, grads / inner, outer, self.nodes > 1))
                return operations
            case "tensor":  # Megatron-LM, section 3: two all-reduces forward and two backward in each layer
                sums = 4 * units + self._sums_again(units)
                return [Collective("all_reduce", sums * self.accumulation, sums * hidden, n, self.nodes > 1)]
            case _:
                return self._between_stages(hidden, gradient_bytes or self.master_width)

    def _sums_again(self, units: int) -> int:
        """All-reduces that recomputation repeats: torch stops at the last value that is needed, short of a
        segment's last one.
        """
        if self.checkpointing in ("full", "every-second"):
            return units if self.checkpointing == "full" else math.ceil(units / 2)
        # over embedding, layers and head; the last segment is not checkpointed
        if self.checkpointing == "sequential":
            segments = math.isqrt(units + 2)
            return 2 * max(0, (segments - 1) * ((units + 2) // segments) - 1) - (segments - 1)
        return 0

    def _between_stages(self, hidden: float, gradient_bytes: float) -> list[Collective]:
        """Of the busiest rank: one in the middle passes activations on and gradients back; the ends do one of
        the two.

        First and last rank add up the gradient of a tied embedding, which both hold.
        """
        parts, between = (
            self.micro_batches if self.strategy in PIPELINES else self.accumulation,
            self.nodes > 1,
        )
        ends = [Collective("send", parts, hidden, self.world_size, between)]
        if isinstance(self.shape, Transformer) and self.shape.tied:
            ends.append(
                Collective(
                    "all_reduce", 1, self.shape.vocabulary * self.shape.hidden * gradient_bytes, 2, between
                )
            )
        middle = [Collective("send", 2 * parts, 2 * hidden, self.world_size, between)]
        sent = [sum(message.bytes_per_rank for message in messages) for messages in (ends, middle)]
        return middle if self.world_size > 2 and sent[1] > sent[0] else ends

    def rank_flops(self, flops: float) -> float:
        """FLOPs of one rank of a step's ``flops``; tensor parallelism repeats the head and the norms on every
        rank.
        """
        if self.strategy == "tensor" and isinstance(self.shape, Transformer):
            whole = (
                6.0 * self.shape.vocabulary * self.shape.hidden * self.shape.sequence_length * self.batch_size
            )
            return whole + max(0.0, flops - whole) / self.world_size
        return flops / (1 if self.strategy == "single" else self.world_size)
