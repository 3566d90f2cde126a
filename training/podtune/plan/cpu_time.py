"""Time of a step on a CPU whose operations were measured: each operation of a model, counted from its shape,
times what it takes on this machine. Needs no torch.

Operations that are no matrix product count as well: in a small model they take half of the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from podtune.plan.calibration import Calibration, at
from podtune.plan.layout import PIPELINES, Layout, even_parts
from podtune.plan.shapes import ConvNet, Transformer

_PRODUCTS = ("linear fp32", "linear bf16", "attention", "convolution")  # whose units are FLOPs


@dataclass(frozen=True)
class Work:
    """Operations of one kind in a forward and backward pass of a block: ``units`` in all, over ``calls``."""

    operation: str
    units: float
    calls: float = 1
    size: float = 0


def forward_backward_s(layout: Layout, calibration: Calibration) -> float:
    """Seconds that one rank computes in a step, all its pieces together, without the update. Of a pipeline
    the rank whose stage takes longest, for which the others wait.
    """
    shape = layout.shape
    assert isinstance(shape, Transformer | ConvNet)
    pieces = layout.micro_batches if layout.strategy in PIPELINES else layout.accumulation
    samples = layout.batch_size / (layout.replicas * pieces)
    if isinstance(shape, Transformer):
        blocks = _transformer(layout, shape, samples)
    else:
        blocks = _convnet(shape, samples)
    # of naive model parallelism one rank works at a time
    alone = layout.strategy == "naive-mp"
    seconds = [
        sum(
            calibration.operation(work.operation, work.units, size=work.size, calls=work.calls, alone=alone)
            for work in block
        )
        for block in blocks
    ]
    if layout.strategy not in PIPELINES:
        return pieces * sum(seconds) / layout.stages
    flops = [sum(work.units for work in block if work.operation in _PRODUCTS) for block in blocks]
    return pieces * max(sum(seconds[start:end]) for start, end in even_parts(flops, layout.stages))


def update_s(layout: Layout, calibration: Calibration, optimizer: str) -> float:
    """Seconds of the optimizer's step over what a rank holds of it."""
    shape = layout.shape
    assert isinstance(shape, Transformer | ConvNet)
    share = layout.held(shape.parameters) / layout.shards
    name = "sgd" if optimizer == "sgd" else "adamw"
    return calibration.operation(name, share, calls=_tensors(shape) / layout.stages)


def machinery_s(layout: Layout, calibration: Calibration) -> float:
    """Seconds that a strategy's own code takes: its hooks, kinds of tensor and schedule with the latency of
    its messages, and what it copies of weights and gradients. None of a library that was not there.
    """
    if layout.strategy not in calibration.machinery:
        return 0.0
    fixed, each = at(0, calibration.machinery[layout.strategy])
    seconds = fixed + each * machinery_units(layout)
    if layout.strategy in calibration.copies:
        weights = 4.0 * layout.shape.parameters
        seconds += layout.accumulation * weights * at(0, calibration.copies[layout.strategy])[1]
    return seconds


def machinery_units(layout: Layout) -> float:
    """What a strategy's own code grows with in a step: turns of a pipeline, blocks that are gathered or cut,
    or tensors of parameters.
    """
    if layout.strategy in PIPELINES:
        return layout.micro_batches + layout.stages - 1.0
    assert isinstance(layout.shape, Transformer | ConvNet)
    blocks = layout.strategy in ("fsdp", "fsdp-grad-op", "hsdp", "tensor")
    return layout.accumulation * float(layout.shape.units if blocks else _tensors(layout.shape))


def _tensors(shape: Transformer | ConvNet) -> int:
    """Tensors of parameters."""
    if isinstance(shape, ConvNet):
        return 3 * len(shape.convolutions) + 2
    return shape.layers * (len(shape.linears) + 2) * (2 if shape.biases else 1) + 4


def _transformer(layout: Layout, shape: Transformer, samples: float) -> list[list[Work]]:
    """Layers and head. Tensor parallelism divides products, attention and what lies between the MLP's
    products.
    """
    parts = layout.world_size if layout.strategy == "tensor" else 1
    product = "linear fp32" if layout.width == 4 else "linear bf16"
    tokens, hidden, wide = samples * shape.sequence_length, shape.hidden, shape.intermediate / parts
    layer = [
        *(
            Work(product, 6.0 * tokens * inputs * outputs / parts, 1, math.sqrt(inputs * outputs / parts))
            for inputs, outputs in shape.linears
        ),
        Work(
            "attention",
            12.0 * tokens * shape.attention_width * shape.sequence_length / parts,
            1,
            shape.head_dim,
        ),
        Work("layer norm", 2 * tokens * hidden, 2),
        Work("gelu", tokens * wide),
        Work("add", 2 * tokens * hidden, 2),
        *([Work("add", tokens * wide)] if shape.gated else []),
    ]
    head = [
        Work("add", tokens * hidden),  # of the positions, in truth at the other end
        Work("layer norm", tokens * hidden),
        Work(product, 6.0 * tokens * hidden * shape.vocabulary, 1, math.sqrt(hidden * shape.vocabulary)),
        Work("loss", tokens * shape.vocabulary),
    ]
    return [*([layer] * shape.layers), head]


def _convnet(shape: ConvNet, samples: float) -> list[list[Work]]:
    """Convolutions and head."""
    adds = shape.units / len(shape.convolutions)
    blocks = []
    for inputs, outputs, kernel, side in shape.convolutions:
        elements = outputs * side * side * samples
        flops = 6.0 * kernel * kernel * inputs * elements
        blocks.append(
            [
                Work("convolution", flops, 1, math.sqrt(inputs * outputs)),
                Work("group norm", elements),
                Work("relu", elements),
                Work("add", elements / 2, adds),
            ]
        )
    return [*blocks, [Work("loss", samples * shape.classes)]]
