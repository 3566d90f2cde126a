"""Measures a CPU for the planner: what an operation of training and a message of gloo take. One process of
``torchrun -m podtune.bench.cell.cpu_probe THREADS FILE``; :mod:`podtune.plan.calibration` starts it.

Each figure is of forward and backward pass together, over copies with inputs of their own, so that tensors
come from where a training's do and not from a warm cache. The quickest of several repeats counts, and of a
process with one thread its CPU time: what else the machine does meanwhile is no property of it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from podtune.plan.calibration import Curve
from podtune.run.distributed import cleanup_distributed, setup_distributed
from podtune.run.files import write_whole

COPIES = 3
BUDGET_S = 0.02  # of one figure; at least two repeats are taken
TIMEOUT_S = 60.0
WIDTHS = (128, 512, 1024)
ROWS = (64, 512)
CHANNELS = ((64, 32), (128, 16), (256, 8), (512, 4))  # of a residual network, with the side of its images
HEAD_DIMS = (32, 64)
MESSAGES = (4 * 2**10, 2 * 2**20)  # bytes
REPEATS = 14  # of a message; the first two are dropped
GROUPS = 32
BLOCKS, LAYERS = 4, 4


def quickest_s(work: Callable[[], object]) -> float:
    """Seconds of ``work()``: the quickest within the budget, after one warm-up."""
    work()
    # the backward pass on a CPU runs in the thread that calls it
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: list[float] = []
    while len(seconds) < 2 or sum(seconds) < BUDGET_S:
        start = clock()
        work()
        seconds.append(clock() - start)
    return min(seconds)


def both_passes(call: Callable[[Tensor], Tensor], inputs: list[Tensor], weights: list[Tensor]) -> float:
    """Seconds of one call's forward and backward pass."""
    with torch.no_grad():
        gradients = [torch.ones_like(call(x)) for x in inputs]

    def work() -> object:
        outputs = [call(x) for x in inputs]
        return torch.autograd.grad(outputs, [*inputs, *weights], gradients)

    return quickest_s(work) / len(inputs)


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
    return [0, 0.0, quickest_s(source.clone) / (2 * source.nbytes)]


def optimizer(build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[float]:
    """One step, a tensor; units are elements."""
    points = []
    for elements in (128, 256 * 1024):
        parameters = [nn.Parameter(torch.zeros(elements)) for _ in range(8)]
        for parameter in parameters:
            parameter.grad = torch.ones(elements)
        points.append((float(elements), quickest_s(build(parameters).step) / len(parameters)))
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


def machinery(world_size: int) -> dict[str, Curve]:
    """What a strategy adds to a block of small layers by its hooks, its kind of tensor and the latency of its
    messages. Units are blocks: forward, backward and update.
    """
    mesh = init_device_mesh("cpu", (world_size,))
    plain = _stack_s(lambda block: None)
    styles: dict[str, ParallelStyle] = {
        str(index): RowwiseParallel() if index % 2 else ColwiseParallel() for index in range(LAYERS)
    }
    ways: dict[str, Callable[[nn.Module], object]] = {
        "fsdp": lambda block: fully_shard(block, mesh=mesh),
        "tensor": lambda block: parallelize_module(block, mesh, styles),
    }
    return {name: [[0, 0, max(1e-9, (_stack_s(way) - plain) / BLOCKS)]] for name, way in ways.items()}


def _stack_s(distribute: Callable[[nn.Module], object]) -> float:
    """Seconds of a step of blocks that are distributed; a fixed count, as of messages."""
    model = nn.Sequential(
        *(nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS))) for _ in range(BLOCKS))
    )
    for block in model:
        distribute(block)
    parameters = list(model.parameters())
    whole = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    cut = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    groups = [{"params": group} for group in (whole, cut) if group]
    steps = torch.optim.AdamW(groups, fused=True)
    x = torch.randn(64, 64)
    seconds = []
    clock = time.thread_time if dist.get_world_size() == 1 else time.perf_counter
    for _ in range(REPEATS):
        dist.barrier()
        start = clock()
        torch.autograd.backward(model(x).sum())
        steps.step()
        steps.zero_grad()
        seconds.append(clock() - start)
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
        found["machinery"] = machinery(world.world_size)
    finally:
        cleanup_distributed()
    if world.rank == 0:
        write_whole(path, json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
