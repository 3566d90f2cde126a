"""Time of a step on a CPU whose operations were measured: each operation of a model, counted from its shape,
times what it takes on this machine. Needs no torch.

Operations that are no matrix product count as well: in a small model they take half of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from podtune.plan.calibration import Calibration, at
from podtune.plan.layout import PIPELINES, Layout
from podtune.plan.shapes import ConvNet, Transformer

FSDP = ("fsdp", "fsdp-grad-op", "hsdp")


@dataclass(frozen=True)
class Work:
    """Operations of one kind in one forward and backward pass: ``units`` in all, over ``calls``."""

    operation: str
    units: float
    calls: float
    size: float = 0


def forward_backward_s(layout: Layout, calibration: Calibration) -> float:
    """Seconds that one rank computes in a step, all its pieces together, without the update."""
    shape = layout.shape
    assert isinstance(shape, Transformer | ConvNet)
    pieces = layout.micro_batches if layout.strategy in PIPELINES else layout.accumulation
    samples = layout.batch_size / (layout.replicas * pieces)
    works = (
        _transformer(layout, shape, samples) if isinstance(shape, Transformer) else _convnet(shape, samples)
    )
    # of naive model parallelism one rank works at a time
    alone = layout.strategy == "naive-mp"
    seconds = sum(
        calibration.operation(work.operation, work.units, size=work.size, calls=work.calls, alone=alone)
        for work in works
    )
    return pieces * seconds / layout.stages


def update_s(layout: Layout, calibration: Calibration, optimizer: str) -> float:
    """Seconds of the optimizer's step over what a rank holds of it."""
    shape = layout.shape
    assert isinstance(shape, Transformer | ConvNet)
    share = layout.held(shape.parameters) / layout.shards
    name = "sgd" if optimizer == "sgd" else "adamw"
    return calibration.operation(name, share, calls=_tensors(shape) / layout.stages)


def machinery_s(layout: Layout, calibration: Calibration) -> float:
    """Seconds that a strategy's own code takes: its hooks and kinds of tensor with the latency of their
    messages, and what it copies to and from its buffers.
    """
    units, weights = layout.shape.units, 4.0 * layout.shape.parameters
    name = "fsdp" if layout.strategy in FSDP else layout.strategy
    blocks = {"fsdp": units + 1, "tensor": units}.get(name, 0)  # a unit of FSDP's for embedding and head
    own = blocks * at(0, calibration.machinery[name])[1] if blocks else 0.0
    return own + calibration.operation("copy", 2 * weights * _copies(layout), calls=0)


def _copies(layout: Layout) -> float:
    """How often the weights' bytes are copied in a step, as ``fully_shard`` and DeepSpeed are built.

    A gather: the own part into the message, and out of it again. FSDP's reduction: into the message, and a
    division. DeepSpeed's: into the bucket, a division, the own part to its place, its flat copy, its scaling,
    the updated part to the weights. One process copies instead of sending.
    """
    ranks = layout.shards
    alone = 1.0 if ranks == 1 else 0.0
    gather, reduction = 1 + 1 / ranks + alone, 2 + alone
    zero = 2 + 4 / ranks + alone
    gathers = 2.0 * layout.accumulation  # before the forward and again before the backward pass
    return {
        "fsdp-grad-op": gather * gathers / 2 + reduction,
        "fsdp": gather * gathers + reduction,
        "hsdp": gather * gathers + reduction,
        "zero2": zero * layout.accumulation,
        "zero3": gather * gathers + zero * layout.accumulation,
    }.get(layout.strategy, 0.0)


def _tensors(shape: Transformer | ConvNet) -> int:
    """Tensors of parameters."""
    if isinstance(shape, ConvNet):
        return 3 * len(shape.convolutions) + 2
    return shape.layers * (len(shape.linears) + 2) * (2 if shape.biases else 1) + 4


def _transformer(layout: Layout, shape: Transformer, samples: float) -> Iterator[Work]:
    """Tensor parallelism divides products, attention and what lies between the MLP's products."""
    parts = layout.world_size if layout.strategy == "tensor" else 1
    product = "linear fp32" if layout.width == 4 else "linear bf16"
    tokens, layers, hidden = samples * shape.sequence_length, shape.layers, shape.hidden
    for inputs, outputs in shape.linears:
        flops = 6.0 * tokens * inputs * outputs / parts
        yield Work(product, layers * flops, layers, math.sqrt(inputs * outputs / parts))
    flops = 6.0 * tokens * hidden * shape.vocabulary
    yield Work(product, flops, 1, math.sqrt(hidden * shape.vocabulary))
    flops = 12.0 * tokens * shape.attention_width * shape.sequence_length / parts
    yield Work("attention", layers * flops, layers, shape.head_dim)
    yield Work("layer norm", (2 * layers + 1) * tokens * hidden, 2 * layers + 1)
    yield Work("gelu", layers * tokens * shape.intermediate / parts, layers)
    yield Work("add", (2 * layers + 1) * tokens * hidden, 2 * layers + 1)
    if shape.gated:
        yield Work("add", layers * tokens * shape.intermediate / parts, layers)
    yield Work("loss", tokens * shape.vocabulary, 1)


def _convnet(shape: ConvNet, samples: float) -> Iterator[Work]:
    elements = 0.0
    for inputs, outputs, kernel, side in shape.convolutions:
        flops = 6.0 * kernel * kernel * inputs * outputs * side * side * samples
        yield Work("convolution", flops, 1, math.sqrt(inputs * outputs))
        elements += outputs * side * side * samples
    count = len(shape.convolutions)
    yield Work("group norm", elements, count)
    yield Work("relu", elements, count)
    yield Work("add", elements / 2, shape.units)
    yield Work("loss", samples * shape.classes, 1)
