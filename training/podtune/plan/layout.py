"""Memory of the fullest rank by its parts: the formulas that :mod:`podtune.plan.plan` puts together.

Sources: Rajbhandari et al. 2019 (ZeRO), sections 3.1, 5 and 7; Huang et al. 2019 (GPipe), section 2.3, for
the bubble; Korthikanti et al. 2022 for activations (:mod:`podtune.plan.shapes`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from podtune.plan.setup import DATA_PARALLEL, FULLY_SHARDED, PIPELINES, TrainingSetup
from podtune.plan.shapes import Kept, Opaque, Shape, Transformer
from podtune.plan.states import States

ZERO_BUCKET = 500_000_000  # elements of DeepSpeed's, if the model has as many
FUSED_TILE = (4096, 32768)  # tokens x vocabulary that TRL's fused head projects at once
_STAGE = {"zero2": 2, "fsdp-grad-op": 2, "zero3": 3, "fsdp": 3, "hsdp": 3}


def partition(whole: States, stage: int, ranks: int) -> States:
    """Bytes a rank under ZeRO ``stage`` 0 to 3 over ``ranks`` (ZeRO, figure 1)."""
    return States(
        whole.weights / (ranks if stage >= 3 else 1),
        whole.gradients / (ranks if stage >= 2 else 1),
        whole.optimizer / (ranks if stage >= 1 else 1),
    )


def bubble_share(stages: int, micro_batches: int) -> float:
    """The idle share of a pipeline's step, (P-1)/(M+P-1); 1 - 1/P for one micro-batch, as in naive-mp."""
    return (stages - 1) / (micro_batches + stages - 1)


@dataclass(frozen=True)
class Layout:
    """Division of a training over its ranks."""

    setup: TrainingSetup

    @property
    def shape(self) -> Shape:
        """The model's."""
        return self.setup.shape

    @property
    def strategy(self) -> str:
        """The training's."""
        return self.setup.strategy

    @property
    def width(self) -> float:
        """Bytes of an activation or of a weight that is computed with."""
        return 4.0 if self.setup.precision == "fp32" else 2.0

    @property
    def master_width(self) -> float:
        """Bytes of a weight as it is kept and of a gradient as it is reduced: under autocast fp32's."""
        return 4.0 if self.setup.precision.endswith("-autocast") else self.width

    @property
    def stages(self) -> int:
        """Parts into which the layers are cut."""
        return self.setup.world_size if self.strategy in (*PIPELINES, "naive-mp") else 1

    @property
    def replicas(self) -> int:
        """Parts into which the batch is cut."""
        return self.setup.world_size if self.strategy in DATA_PARALLEL else 1

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the states: within a machine for hsdp, or half of a single one."""
        if self.strategy == "hsdp":
            if self.setup.shard_size:
                return self.setup.shard_size
            halves = 2 if self.setup.world_size >= 4 and self.setup.world_size % 2 == 0 else 1
            return self.setup.world_size // (self.setup.machines if self.setup.machines > 1 else halves)
        return self.setup.world_size if self.strategy in _STAGE else 1

    @property
    def bubble(self) -> float:
        return bubble_share(self.stages, self.setup.pieces if self.strategy in PIPELINES else 1)

    def held(self, parameters: float) -> float:
        """Parameters of the fullest rank before sharding."""
        if self.strategy == "tensor":
            divided = self.shape.divisible / self.shape.parameters
            return parameters * (1 - divided * (1 - 1 / self.setup.world_size))
        return parameters / self.stages

    def states(self, whole: States) -> States:
        """Bytes of weights, gradients and optimizer on the fullest rank, of those of the whole model."""
        held = States(*(self.held(part) for part in whole))
        weights, gradients, optimizer = partition(held, _STAGE.get(self.strategy, 0), self.shards)
        if self.setup.accumulation > 1 and self.strategy in FULLY_SHARDED:
            gradients = whole.gradients  # FSDP keeps them whole until the last micro-batch is reduced
        if self.strategy in ("zero2", "zero3") and self.master_width == 4:
            # DeepSpeed updates a copy of its part of the weights, also where these are in 32 bits already
            optimizer += 4.0 * self.setup.trained / self.shards
        return States(weights, gradients, optimizer)

    @property
    def kept(self) -> Kept:
        """Widths of what a layer keeps, by the precision and by LoRA."""
        setup = self.setup
        kept = Kept(
            # FSDP gathers 16-bit weights, so that the residual stream is in 16 bits, too
            stored=self.width if self.strategy in FULLY_SHARDED else self.master_width,
            compute=self.width,
            selective=setup.activation_checkpointing == "selective",
        )
        if setup.lora_r is None:
            return kept
        return replace(kept, norms_trained=False, adapter_dropout=bool(setup.lora_dropout))

    def activations(self) -> float | None:
        """Bytes kept for the backward pass, and what that needs beyond the head's; None if unknown."""
        if isinstance(self.shape, Opaque):
            return None
        kept, again = self._layers_bytes(self.shape.units / self.stages)
        return self._samples * (self._in_flight() * kept + max(0.0, again - self._head_bytes()))

    def replaced(self) -> float:
        """Bytes that layers keep and let go as their gradients are made, which DDP's buckets are not."""
        if isinstance(self.shape, Opaque) or self.strategy not in ("single", *FULLY_SHARDED):
            return 0.0
        return self._samples * self._layers_bytes(self.shape.units)[0]

    def head(self) -> float | None:
        """Bytes of the logits and the loss at their worst moment; None if unknown."""
        if isinstance(self.shape, Opaque):
            return None
        return self._samples * self._head_bytes() + self._head_tile()

    @property
    def _samples(self) -> float:
        """Of one forward pass on one rank."""
        pieces = self.setup.pieces if self.strategy in PIPELINES else self.setup.accumulation
        return self.setup.batch_size / (self.replicas * pieces)

    def _in_flight(self) -> int:
        """Micro-batches whose activations a stage holds: GPipe all, 1F1B at most P, on the first stage."""
        if self.strategy == "pipeline-gpipe":
            return self.setup.pieces
        return min(self.stages, self.setup.pieces) if self.strategy == "pipeline-1f1b" else 1

    def _head_bytes(self) -> float:
        """Bytes a sample of the logits, as the products put them out and in 32 bits, and of their gradient.

        GPipe's last stage holds those of every micro-batch.
        """
        if self.setup.fused_head and isinstance(self.shape, Transformer):
            # the hidden states, their gradient in 32 bits, and once more as they are
            return self.shape.boundary_elements * (2 * self.master_width + 4)
        waiting = self.setup.pieces if self.strategy == "pipeline-gpipe" else 1
        head = self.shape.head_elements * (waiting * (self.width + 4) + 8)
        if self.strategy != "pipeline-1f1b":
            return head
        # the last stage has the head, the first the micro-batches in flight
        first, last = self._in_flight(), 1
        return max(0.0, head - (first - last) * self._layers_bytes(self.shape.units / self.stages)[0])

    def _head_tile(self) -> float:
        """Bytes of the fused head whatever the rows: a tile of logits, and its own gradient in 32 bits."""
        if not self.setup.fused_head or not isinstance(self.shape, Transformer):
            return 0.0
        tokens = min(self._samples * self.shape.sequence_length, FUSED_TILE[0])
        gradient = 4.0 * self.shape.vocabulary * self.shape.hidden if self.setup.lora_r is None else 0.0
        return tokens * min(self.shape.vocabulary, FUSED_TILE[1]) * self.width + gradient

    def _layers_bytes(self, units: float) -> tuple[float, float]:
        """Bytes a sample over ``units`` blocks: kept by the forward pass, and added by the backward pass.

        The latter at its fullest moment, when a block is whole again and its gradients are made.
        """
        shape, kept = self.shape, self.kept
        assert not isinstance(shape, Opaque)
        tensor = self.setup.world_size if self.strategy == "tensor" else 1
        whole, boundary = shape.layer_bytes(kept, tensor), kept.stored * shape.boundary_elements
        gradients = shape.backward_bytes(kept, tensor)
        match self.setup.activation_checkpointing:
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

    def buffers(self) -> float:
        """Bytes of what is gathered, bucketed or cast for a moment.

        With full sharding two units (at work and prefetched) and a unit's whole gradients, in the backward
        pass, when the head's bytes are gone; of ZeRO its bucket of gradients, which stage 3 never lets go.
        """
        trained = self.setup.trained
        bucket = 4.0 * min(ZERO_BUCKET, trained) if self.setup.zero_bucket else 0.0
        if self.strategy in ("fsdp", "hsdp", "zero3"):
            units = (2.0 * self.width + 4.0) * self.shape.largest_unit
            return self._behind_head(units) + (bucket if self.strategy == "zero3" else 0.0)
        if self.strategy == "zero2":
            return self.casts() + self._behind_head(bucket)
        if self.strategy == "ddp" and not self.setup.bucket_view:
            return 4.0 * trained + self.casts()  # gradients in their buckets, beside themselves
        return self.casts()

    def _behind_head(self, needed: float) -> float:
        """Those of ``needed`` bytes in the backward pass that do not lie where the head's were."""
        if isinstance(self.shape, Opaque):
            return needed
        again = self._layers_bytes(self.shape.units / self.stages)[1]
        return max(0.0, needed - max(0.0, self._head_bytes() - again) * self._samples)

    def casts(self) -> float:
        """Bytes of the 16-bit copies of 32-bit weights that autocast keeps over a forward pass.

        None where FSDP gathers 16-bit weights, nor of frozen ones, which it casts anew in every use.
        """
        gathered = self.strategy in (*FULLY_SHARDED, "zero3")
        if self.width == self.master_width or gathered or self.setup.lora_r is not None:
            return 0.0
        shape = self.shape
        cast = shape.divisible or shape.parameters
        if isinstance(shape, Transformer) and not self.setup.fused_head:
            cast = shape.divisible + shape.vocabulary * shape.hidden
        return self.width * self.held(cast)

    def rank_flops(self, flops: float) -> float:
        """FLOPs of one rank of a step's ``flops``: tensor parallelism repeats the head on every rank."""
        shape, setup = self.shape, self.setup
        if self.strategy == "tensor" and isinstance(shape, Transformer):
            head = 6.0 * shape.vocabulary * shape.hidden * shape.sequence_length * setup.batch_size
            return head + max(0.0, flops - head) / setup.world_size
        return flops / (1 if self.strategy == "single" else setup.world_size)
