"""Measures a CPU for the planner: what an operation of training and a message of gloo take. One process of
``torchrun -m podtune.bench.cell.cpu_probe THREADS FILE``; :mod:`podtune.plan.calibration` starts it.

Each figure is of forward and backward pass together, over copies with inputs of their own, so that tensors
come from where a training's do and not from a warm cache. The median of several repeats counts, as of a
cell's steps: processes that work at once slow each other down.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from podtune.bench.models.tinygpt import TinyGPT
from podtune.bench.options import Options
from podtune.bench.strategies.contract import Batch
from podtune.bench.strategies.step import optimizer_factory
from podtune.bench.strategies.table import STRATEGIES
from podtune.plan.calibration import Curve, at
from podtune.plan.cpu_time import machinery_units
from podtune.plan.layout import DATA_PARALLEL, PIPELINES, Layout
from podtune.plan.models import gpt2
from podtune.plan.shapes import Transformer
from podtune.run.distributed import World, cleanup_distributed, setup_distributed
from podtune.run.errors import UNAVAILABLE, UserError
from podtune.run.files import write_whole

COPIES = 3
BUDGET_S = 0.02  # of one figure; at least three repeats are taken
TIMEOUT_S = 60.0
WIDTHS = (128, 512, 1024)
ROWS = (64, 512)
CHANNELS = ((64, 32), (128, 16), (256, 8), (512, 4))  # of a residual network, with the side of its images
HEAD_DIMS = (32, 64)
MESSAGES = (4 * 2**10, 2 * 2**20)  # bytes
REPEATS, STEPS = 14, 8  # of a message, of a cell; the first two are dropped
GROUPS = 32
WIDE = 512  # of a model whose weights are what takes time


def usual_s(work: Callable[[], object]) -> float:
    """Seconds of ``work()``: the median within the budget, after one warm-up."""
    work()
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < BUDGET_S:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def both_passes(call: Callable[[Tensor], Tensor], inputs: list[Tensor], weights: list[Tensor]) -> float:
    """Seconds of one call's forward and backward pass."""
    with torch.no_grad():
        gradients = [torch.ones_like(call(x)) for x in inputs]

    def work() -> object:
        outputs = [call(x) for x in inputs]
        return torch.autograd.grad(outputs, [*inputs, *weights], gradients)

    return usual_s(work) / len(inputs)


def line(size: float, small: tuple[float, float], large: tuple[float, float]) -> list[float]:
    """A row of a curve from two (units, seconds): what a call takes at least, and what each unit adds."""
    fixed = (small[1] * large[0] - large[1] * small[0]) / (large[0] - small[0])
    if large[1] <= small[1]:  # what noise may make of two points
        fixed = 0.0
    fixed = max(0.0, fixed)
    return [size, fixed, (large[1] - fixed) / large[0]]


def _inputs(*shape: int) -> list[Tensor]:
    return [torch.randn(*shape, requires_grad=True) for _ in range(COPIES)]


def linear(width: int, dtype: torch.dtype | None) -> list[float]:
    """Units are FLOPs: 6 a weight and row."""
    layer = nn.Linear(width, width)

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            output: Tensor = layer(x)
        return output

    points = []
    for rows in (ROWS[0], min(ROWS[1], 2**18 // width)):
        seconds = both_passes(call, _inputs(rows, width), list(layer.parameters()))
        points.append((6.0 * width * width * rows, seconds))
    return line(width, *points)


def convolution(channels: int, side: int) -> list[float]:
    """3 x 3; units are FLOPs."""
    layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    points = []
    for images in (1, 4):
        seconds = both_passes(layer, _inputs(images, channels, side, side), list(layer.parameters()))
        points.append((54.0 * channels * channels * side * side * images, seconds))
    return line(channels, *points)


def attention(head_dim: int) -> list[float]:
    """Of four heads from one tensor of queries, keys and values to one of outputs; units are FLOPs of a whole
    T x T square.
    """

    def call(x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        query, key, value = x.view(batch, tokens, -1, 3, head_dim).permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, tokens, -1)

    points = []
    for rows in (1, 8):
        seconds = both_passes(call, _inputs(rows, 128, 12 * head_dim), [])
        points.append((12.0 * 4 * head_dim * 128 * 128 * rows, seconds))
    return line(head_dim, *points)


def elementwise(
    call: Callable[[Tensor], Tensor], shape: tuple[int, ...], weights: list[Tensor]
) -> list[float]:
    """Over ``shape`` and over eight times as many rows; units are elements."""
    points = []
    for times in (1, 8):
        inputs = _inputs(shape[0] * times, *shape[1:])
        points.append((float(inputs[0].numel()), both_passes(call, inputs, weights)))
    return line(0, *points)


def loss() -> list[float]:
    """Units are logits."""
    points = []
    for rows in (128, 1024):
        targets = torch.randint(512, (rows,))
        inputs = _inputs(rows, 512)
        seconds = both_passes(partial(functional.cross_entropy, target=targets), inputs, [])
        points.append((rows * 512.0, seconds))
    return line(0, *points)


def copy() -> list[float]:
    """To new memory, as large as a unit of a small model; units are bytes, read and written."""
    source = torch.zeros(2**20)
    return [0, 0.0, usual_s(source.clone) / (2 * source.nbytes)]


def optimizer(build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[float]:
    """One step, a tensor; units are elements."""
    points = []
    for elements in (128, 256 * 1024):
        parameters = [nn.Parameter(torch.zeros(elements)) for _ in range(8)]
        for parameter in parameters:
            parameter.grad = torch.ones(elements)
        points.append((float(elements), usual_s(build(parameters).step) / len(parameters)))
    return line(0, *points)


def operations() -> dict[str, Curve]:
    """Every operation that the planner counts."""
    norm, groups = nn.LayerNorm(256), nn.GroupNorm(GROUPS, 64)
    affine: list[Tensor] = [norm.weight, norm.bias]
    grouped: list[Tensor] = [groups.weight, groups.bias]
    return {
        "linear fp32": [linear(width, None) for width in WIDTHS],
        "linear bf16": [linear(width, torch.bfloat16) for width in WIDTHS],
        "convolution": [convolution(channels, side) for channels, side in CHANNELS],
        "attention": [attention(head_dim) for head_dim in HEAD_DIMS],
        "layer norm": [elementwise(norm, (128, 256), affine)],
        "group norm": [elementwise(groups, (1, 64, 16, 16), grouped)],
        "gelu": [elementwise(lambda x: functional.gelu(x, approximate="tanh"), (128, 512), [])],
        "relu": [elementwise(functional.relu, (128, 512), [])],
        "add": [elementwise(lambda x: x + x, (128, 256), [])],
        "loss": [loss()],
        "adamw": [optimizer(lambda p: torch.optim.AdamW(p, fused=True))],
        "copy": [copy()],
        "sgd": [optimizer(lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9))],
    }


def messages(rank: int, ranks: int) -> dict[str, Curve]:
    """Every collective over gloo, by the bytes of the whole message."""

    def send(tensor: Tensor) -> None:  # there and back
        if rank < 2:
            (dist.send if rank == 0 else dist.recv)(tensor, 1 - rank)
            (dist.recv if rank == 0 else dist.send)(tensor, 1 - rank)

    def gather(tensor: Tensor) -> None:
        dist.all_gather(list(tensor.chunk(ranks)), tensor.chunk(ranks)[rank].clone())

    def scatter(tensor: Tensor) -> None:
        dist.reduce_scatter_tensor(torch.empty_like(tensor.chunk(ranks)[rank]), tensor)

    kinds: dict[str, tuple[Callable[[Tensor], object], int]] = {
        "all_reduce": (dist.all_reduce, 1),
        "all_gather": (gather, 1),
        "reduce_scatter": (scatter, 1),
        "send": (send, 2),
    }
    curves = {}
    for kind, (call, calls) in kinds.items():
        points = []
        for size in MESSAGES:
            tensor = torch.zeros(size // 4 // ranks * ranks)
            seconds = []
            for _ in range(REPEATS):  # a fixed count: every rank has to call as often
                dist.barrier()
                start = time.perf_counter()
                call(tensor)
                seconds.append((time.perf_counter() - start) / calls)
            points.append((4.0 * tensor.numel(), statistics.median(seconds[2:])))
        curves[kind] = [line(0, *points)]
    return curves


def machinery(world: World, wire: dict[str, Curve]) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """What each strategy takes beyond what it computes: its hooks, its kinds of tensor, its schedule and the
    latency of its messages, by :func:`podtune.plan.cpu_time.machinery_units`; and what those that divide the
    batch take for each byte of weights, the bytes of their messages apart. A strategy that is not installed
    is left out.
    """
    own: dict[str, Curve] = {}
    copies: dict[str, Curve] = {}
    for name in STRATEGIES:
        if name in ("single", "naive-mp"):  # one rank at a time computes, and nothing else
            continue
        try:
            small, large = (beyond(small_cell(name, world.world_size, times), world) for times in (1, 4))
        except UserError as error:
            if error.code != UNAVAILABLE:
                raise
            continue
        own[name] = [line(0, small, large)]
        if name not in DATA_PARALLEL:
            continue
        options, size = small_cell(name, world.world_size, 1, WIDE)
        units, seconds = beyond((options, size), world)
        fixed, each = at(0, own[name])
        seconds -= fixed + each * units
        for message in layout_of(options, size, world.world_size).collectives(size.parameters, None):
            seconds -= message.message_bytes * at(0, wire[message.kind])[1]
        copies[name] = [[0, 0, max(1e-15, seconds / (4 * size.parameters))]]
    return own, copies


def beyond(cell: tuple[Options, Transformer], world: World) -> tuple[float, float]:
    """Units of a cell's machinery, and the seconds of its step beyond what is computed in it."""
    units = machinery_units(layout_of(*cell, world.world_size))
    return units, max(1e-9, step_s(*cell, world) - plain_s(*cell, world))


def small_cell(strategy: str, ranks: int, times: int, width: int = 64) -> tuple[Options, Transformer]:
    """A model about ``width`` wide, which takes next to no time, of ``times`` as many blocks, or
    micro-batches of a pipeline.
    """
    layers, micro_batches = 2 * times, 0
    if strategy in PIPELINES:
        layers, micro_batches = max(2, ranks), 2 * ranks * times
    hidden = ranks * math.ceil(width / ranks)
    size = gpt2(layers=layers, heads=ranks, hidden=hidden, context=32, vocabulary=64)
    options = Options(
        "",
        strategy,
        global_batch_size=micro_batches or 2 * ranks,
        sequence_length=size.sequence_length,
        micro_batches=micro_batches,
        shard_size=ranks if strategy == "hsdp" else 0,
        cpu=True,
    )
    return options, size


def layout_of(options: Options, size: Transformer, ranks: int) -> Layout:
    """The planner's view of a small cell."""
    return Layout(
        size,
        options.strategy,
        ranks,
        1,
        "fp32",
        options.global_batch_size,
        micro_batches=options.micro_batches or 1,
        accumulation=1,
        checkpointing="none",
        shard_size=options.shard_size or None,
    )


def plain_s(options: Options, size: Transformer, world: World) -> float:
    """Seconds that a rank of the cell computes, measured as plain training of its part, all ranks at once."""
    layout = layout_of(options, size, world.world_size)
    part = replace(options, strategy="single", micro_batches=0, shard_size=0)
    alone = replace(world, rank=0, world_size=1)
    if options.strategy not in PIPELINES:
        rows = options.global_batch_size // layout.replicas
        return step_s(replace(part, global_batch_size=rows), size, alone)
    pieces = options.micro_batches
    stage = replace(size, layers=size.layers // layout.stages)
    seconds = step_s(replace(part, accumulation=pieces), stage, alone)
    return seconds * machinery_units(layout) / pieces


def step_s(options: Options, size: Transformer, world: World) -> float:
    """Seconds of a step; of a count that is the same on every rank, as of messages."""
    strategy = STRATEGIES[options.strategy].load()(
        partial(TinyGPT, size), optimizer_factory(options), world, options
    )
    rows = options.global_batch_size // strategy.rows[1]
    ids = torch.randint(size.vocabulary, (rows, size.sequence_length))
    batch = Batch(ids, ids)
    seconds = []
    for _ in range(STEPS):
        dist.barrier()
        start = time.perf_counter()
        strategy.train_step(batch)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def main() -> int:
    """Rank 0 writes what it found to the file."""
    threads, path = int(sys.argv[1]), Path(sys.argv[2])
    world = setup_distributed(TIMEOUT_S, use_cpu=True)
    torch.set_num_threads(threads)
    found: dict[str, dict[str, Curve]] = {}
    try:
        if world.rank == 0:
            found["alone"] = operations()
        if world.world_size > 1:
            dist.barrier()
            found["together"] = operations()
            dist.barrier()
            found["messages"] = messages(world.rank, world.world_size)
        found["machinery"], found["copies"] = machinery(world, found.get("messages", {}))
    finally:
        cleanup_distributed()
    if world.rank == 0:
        write_whole(path, json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
