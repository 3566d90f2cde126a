"""Memory of the fullest rank by its parts.

Sources: Rajbhandari et al. 2019 (ZeRO), sections 3.1 and 5; Korthikanti et al. 2022 for activations
(:mod:`podtune.plan.shapes`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from podtune.plan.setup import FULLY_SHARDED, TrainingSetup
from podtune.plan.shapes import Kept, Transformer
from podtune.plan.states import States, whole_states

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


def states(setup: TrainingSetup) -> States:
    if setup.inner.strategy != setup.strategy:
        return partition(states(setup.inner), 3, setup.world_size // setup.inner.world_size)
    whole = whole_states(setup)
    held = States(*(_held(setup, part) for part in whole))
    weights, gradients, optimizer = partition(held, _STAGE.get(setup.strategy, 0), setup.shards)
    if setup.accumulation > 1 and setup.strategy in FULLY_SHARDED:
        gradients = whole.gradients  # FSDP keeps them whole until the last micro-batch is reduced
    if setup.strategy in ("zero2", "zero3") and setup.master_width == 4:
        # DeepSpeed updates a copy of its part of the weights, also where these are in 32 bits already
        optimizer += 4.0 * setup.trained / setup.shards
    return States(weights, gradients, optimizer)


def _held(setup: TrainingSetup, parameters: float) -> float:
    """Parameters before sharding."""
    if setup.strategy == "tensor":
        divided = setup.shape.divisible / setup.shape.parameters
        return parameters * (1 - divided * (1 - 1 / setup.world_size))
    return parameters / setup.stages


def activations(setup: TrainingSetup) -> float:
    """Bytes kept for the backward pass, and what that needs beyond the head's."""
    kept, again = _layers_bytes(setup)
    return setup.samples * (_in_flight(setup) * kept + max(0.0, again - _head_bytes(setup)))


def head(setup: TrainingSetup) -> float:
    """Bytes of the logits and the loss at their worst moment."""
    shape, bytes_ = setup.shape, setup.samples * _head_bytes(setup)
    if not setup.fused_head or not isinstance(shape, Transformer):
        return bytes_
    # whatever the rows: a tile of logits, and the head's own gradient in 32 bits
    tokens = min(setup.samples * shape.sequence_length, FUSED_TILE[0])
    gradient = 4.0 * shape.vocabulary * shape.hidden if setup.lora_r is None else 0.0
    return bytes_ + tokens * min(shape.vocabulary, FUSED_TILE[1]) * setup.width + gradient


def buffers(setup: TrainingSetup) -> float:
    """Bytes of what is gathered, bucketed or cast for a moment.

    With full sharding two units (at work and prefetched) and a unit's whole gradients, in the backward
    pass, when the head's bytes are gone; of ZeRO its bucket of gradients, which stage 3 never lets go.
    """
    bucket = 4.0 * min(ZERO_BUCKET, setup.trained)
    if setup.strategy in ("fsdp", "hsdp", "zero3"):
        units = (2.0 * setup.width + 4.0) * setup.shape.largest_unit
        return _behind_head(setup, units) + (bucket if setup.strategy == "zero3" else 0.0)
    return _casts(setup) + (_behind_head(setup, bucket) if setup.strategy == "zero2" else 0.0)


def gathered_between(setup: TrainingSetup) -> float:
    """Bytes that tensor+fsdp gathers of a slice: two units, and a unit's whole gradients."""
    inner = setup.inner
    if inner.world_size == setup.world_size:
        return 0.0
    return _behind_head(inner, (2 * setup.width + 4) * setup.shape.largest_unit / inner.world_size)


def gone_at_update(setup: TrainingSetup) -> float:
    """Bytes that are let go while gradients are made: autocast's copies, and what layers keep.

    Not under DDP, whose buckets are there before the backward pass.
    """
    if setup.accumulation > 1:
        return 0.0
    layers = setup.samples * _layers_bytes(setup)[0] if setup.strategy in ("single", *FULLY_SHARDED) else 0.0
    return _casts(setup) + layers


def _in_flight(setup: TrainingSetup) -> int:
    """Micro-batches whose activations a stage holds: GPipe all, 1F1B at most P, on the first stage."""
    return min(setup.stages, setup.pieces) if setup.strategy == "pipeline-1f1b" else setup.pieces


def _head_bytes(setup: TrainingSetup) -> float:
    """Bytes a sample of the logits, as the products put them out and in 32 bits, and of their gradient.

    GPipe's last stage holds those of every micro-batch.
    """
    shape = setup.shape
    if setup.fused_head and isinstance(shape, Transformer):
        # the hidden states, their gradient in 32 bits, and once more as they are
        return shape.boundary_elements * (2 * setup.master_width + 4)
    waiting = setup.pieces if setup.strategy.endswith("gpipe") else 1
    logits = shape.head_elements * (waiting * (setup.width + 4) + 8)
    if setup.strategy == "pipeline-1f1b":
        # the last stage has the head, the first the other micro-batches in flight
        return max(0.0, logits - (_in_flight(setup) - 1) * _layers_bytes(setup)[0])
    return logits


def _layers_bytes(setup: TrainingSetup) -> tuple[float, float]:
    """Bytes a sample over a rank's blocks: kept by the forward pass, and added by the backward pass.

    The latter at its fullest moment, when a block is whole again and its gradients are made.
    """
    shape, units = setup.shape, setup.shape.units / setup.stages
    kept = Kept(
        # FSDP gathers 16-bit weights, so that the residual stream is in 16 bits, too
        stored=setup.width if setup.strategy in FULLY_SHARDED else setup.master_width,
        compute=setup.width,
        norms_trained=setup.lora_r is None,
        adapter_dropout=setup.lora_r is not None and setup.lora_dropout > 0,
        selective=setup.activation_checkpointing == "selective",
    )
    tensor = setup.world_size if setup.strategy == "tensor" else 1
    whole, boundary = shape.layer_bytes(kept, tensor), kept.stored * shape.boundary_elements
    gradients = shape.backward_bytes(kept, tensor)
    match setup.activation_checkpointing:
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


def _behind_head(setup: TrainingSetup, needed: float) -> float:
    """Those of ``needed`` bytes in the backward pass that do not lie where the head's were."""
    again = _layers_bytes(setup)[1]
    return max(0.0, needed - max(0.0, _head_bytes(setup) - again) * setup.samples)


def _casts(setup: TrainingSetup) -> float:
    """Bytes of the 16-bit copies of 32-bit weights that autocast keeps over a forward pass.

    None where FSDP gathers 16-bit weights, nor of frozen ones, which it casts anew in every use.
    """
    gathered = setup.strategy in (*FULLY_SHARDED, "zero3")
    if setup.width == setup.master_width or gathered or setup.lora_r is not None:
        return 0.0
    shape = setup.shape
    cast = shape.divisible or shape.parameters
    if isinstance(shape, Transformer) and not setup.fused_head:
        cast += shape.vocabulary * shape.hidden
    return setup.width * _held(setup, cast)
