"""The same rows in every step, dealt out so that no rank waits for one with longer rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Generator, Tensor
from torch.utils.data import BatchSampler
from transformers.trainer_pt_utils import LengthGroupedSampler


class BalancedBatches(BatchSampler):
    """Batches for ``world_size`` ranks, of which accelerate gives the k-th of every ``world_size`` to rank k.

    Within such a group the rows are dealt out anew: longest first, each to the rank that has the fewest
    tokens and still has room. A group holds the rows that it held before, so a step's loss and gradient stay
    what they were to rounding, and every rank works out the same groups without asking the others. The first
    group stays as it is, because accelerate fills up the last step of an epoch from its rows in their order;
    so does a last one that is not full. ``lengths`` are the tokens of every row of the data set.
    """

    def __init__(self, batches: BatchSampler, lengths: Sequence[int], world_size: int) -> None:
        self.batches, self.lengths, self.world_size = batches, lengths, world_size
        # where accelerate sets the epoch
        self.sampler = batches.sampler
        self.batch_size, self.drop_last = batches.batch_size, batches.drop_last

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        group: list[list[int]] = []
        first = True
        for batch in self.batches:
            group.append(batch)
            if len(group) == self.world_size:
                full = all(len(batch) == self.batch_size for batch in group)
                yield from self.deal(group) if full and not first else group
                group, first = [], False
        yield from group

    def deal(self, group: list[list[int]]) -> list[list[int]]:
        """``group``'s rows in as many batches of the same size, with nearly the same tokens in each."""
        dealt: list[list[int]] = [[] for _ in group]
        tokens = [0] * len(group)
        for row in sorted(itertools.chain(*group), key=lambda row: (-self.lengths[row], row)):
            with_room = [rank for rank in range(len(group)) if len(dealt[rank]) < self.batch_size]
            rank = min(with_room, key=tokens.__getitem__)
            dealt[rank].append(row)
            tokens[rank] += self.lengths[row]
        return dealt


class LengthGrouped(LengthGroupedSampler):  # type: ignore[misc]
    """transformers' order for group_by_length, drawn for each epoch from ``seed`` and ``epoch()`` alone."""

    # Its own draws from torch's global generator when an epoch begins, and a resumed process has another
    # state there than the one that began the epoch: some rows would come twice, others never.

    def __init__(
        self, lengths: Sequence[int], batch_size: int, *, seed: int, epoch: Callable[[], int]
    ) -> None:
        super().__init__(batch_size, lengths=list(lengths), generator=Generator())
        self.seed, self.epoch = seed, epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed + self.epoch())
        return iter(super().__iter__())


def balance(loader: Any, lengths: Sequence[int]) -> None:
    """Deal out the rows of a data loader that ``accelerator.prepare`` returned, in place.

    It has to come after: accelerate takes its seeded sampler for a plain ``RandomSampler`` only, and any
    wrapper given to it before would train on other rows. A loader that is not sharded batch by batch (one
    rank, streaming) stays as it is.
    """
    from accelerate.data_loader import BatchSamplerShard

    shard = getattr(loader, "batch_sampler", None)
    if isinstance(shard, BatchSamplerShard) and not shard.split_batches and shard.num_processes > 1:
        shard.batch_sampler = BalancedBatches(shard.batch_sampler, lengths, shard.num_processes)


ROW = "row"  # the column with the position of a row in a stream


class NumberedBatches:
    """A collator whose batches keep the positions of their rows beside what ``collate`` makes of them."""

    def __init__(self, collate: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> None:
        self.collate = collate

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor | int | list[int]]:
        positions = [row.pop(ROW) for row in rows if ROW in row]  # rows of an evaluation have none
        return self.collate(rows) | ({ROW: positions} if positions else {})


def row_lengths(dataset: Any) -> list[int]:
    """Tokens of every row of a tokenised ``datasets.Dataset``, without making Python lists of the tokens."""
    import pyarrow.compute as pc

    tokens = dataset.select_columns("input_ids").with_format("arrow")[:]["input_ids"]
    counted: list[int] = pc.list_value_length(tokens).to_pylist()
    return counted
