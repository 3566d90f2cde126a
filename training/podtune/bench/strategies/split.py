"""Cutting a model into consecutive parts of equal cost, and keeping tied weights equal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from podtune.bench.models.stack import Stack
from podtune.bench.strategies.contract import BuildModel, SetupContext
from podtune.bench.strategies.step import prepare


def forward_flops_by_block(blocks: Sequence[nn.Module], inputs: torch.Tensor) -> list[int]:
    """FLOPs of each block's forward over ``inputs``, on the meta device, where nothing is computed."""
    counts = []
    x = inputs
    for block in blocks:
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            x = block(x)
        counts.append(int(counter.get_total_flops()))
    return counts


def parts_by_cost(build_model: BuildModel, sequence_length: int, parts: int) -> list[tuple[int, int]]:
    """Ranges of blocks for ``parts`` ranks, by the floating-point operations of each block's forward."""
    with torch.device("meta"):
        model = build_model()
        counts = forward_flops_by_block(list(model.blocks), model.example_row(sequence_length))
    return even_parts([float(count) for count in counts], parts)


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


def cut(context: SetupContext, copies: int = 1) -> tuple[Stack, TiedGradients]:
    """This rank's blocks, on its device, and what keeps its tied weights equal. A collective call.

    ``copies`` of the model lie one after the other on the ranks.
    """
    whole, rank, stages = context.build_model(), context.world.rank, context.world.world_size // copies
    parts = parts_by_cost(context.build_model, context.options.sequence_length, stages)
    return prepare(whole.part(*parts[rank % stages]), context), TiedGradients(whole, parts, rank, copies)


class TiedGradients:
    """Adds up the gradients of a weight that several ranks hold, so that their copies stay one weight.

    GPT-2's head is its embedding: first and last rank each see a part of its gradient (Megatron-LM does the
    same).
    """

    def __init__(self, whole: Stack, parts: list[tuple[int, int]], rank: int, copies: int) -> None:
        holders: dict[nn.Parameter, set[int]] = {}
        for holder, (start, end) in enumerate(parts):
            for parameter in whole.part(start, end).parameters():
                holders.setdefault(parameter, set()).add(holder)
        self._mine: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        for parameter, ranks in holders.items():
            for first in range(0, copies * len(parts), len(parts)) if len(ranks) > 1 else ():
                holding = sorted(first + holder for holder in ranks)
                group = dist.new_group(holding)  # a collective call: every rank opens every group
                if rank in holding:
                    self._mine.append((parameter, group))

    def add_up(self) -> None:
        """After backward, before the optimizer."""
        for parameter, group in self._mine:
            dist.all_reduce(parameter.grad, group=group)
