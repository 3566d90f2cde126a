"""Rows dealt out over the ranks: every step trains on the rows that it would have trained on anyway."""

from __future__ import annotations

import random
from typing import Any

import datasets
import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.state import PartialState
from torch.utils.data import DataLoader

from podtune.sft.data.batching import LengthGrouped, balance, row_lengths

ROWS, BATCH, RANKS = 107, 4, 3  # the last step of an epoch is not full
LENGTHS = [random.Random(row).randint(1, 500) for row in range(ROWS)]


def loader(rank: int, balanced: bool, drop_last: bool = False) -> Any:
    PartialState(cpu=True)
    plain = DataLoader(
        list(range(ROWS)), batch_size=BATCH, shuffle=True, drop_last=drop_last, collate_fn=list
    )
    prepared = prepare_data_loader(
        plain,
        num_processes=RANKS,
        process_index=rank,
        put_on_device=False,
        use_seedable_sampler=True,
        data_seed=1,
    )
    if balanced:
        balance(prepared, LENGTHS)
    return prepared


def steps(balanced: bool, epoch: int = 0, skip: int = 0, drop_last: bool = False) -> list[list[list[int]]]:
    """The batches of all ranks, step by step."""
    ranks = []
    for rank in range(RANKS):
        made = loader(rank, balanced, drop_last)
        made.set_epoch(epoch)
        ranks.append(list(skip_first_batches(made, skip) if skip else made))
    return [list(step) for step in zip(*ranks, strict=True)]


def rows(step: list[list[int]]) -> list[int]:
    return sorted(row for batch in step for row in batch)


def tokens(batch: list[int]) -> int:
    return sum(LENGTHS[row] for row in batch)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_step_holds_the_rows_it_held_before_in_batches_of_the_same_size(
    epoch: int, drop_last: bool
) -> None:
    before, after = steps(False, epoch, drop_last=drop_last), steps(True, epoch, drop_last=drop_last)
    assert [rows(step) for step in after] == [rows(step) for step in before]
    assert all(len(batch) == BATCH for step in after for batch in step)


def test_another_epoch_has_another_order() -> None:
    assert steps(True, epoch=0) != steps(True, epoch=1)


def test_the_longest_batch_of_a_step_is_hardly_longer_than_the_mean() -> None:
    def excess(made: list[list[list[int]]]) -> float:
        full = made[1:-1]
        return sum(max(map(tokens, step)) * RANKS / sum(map(tokens, step)) for step in full) / len(full) - 1

    assert excess(steps(True)) < 0.1 < excess(steps(False))


@pytest.mark.parametrize("skip", [1, 5])
def test_a_resumed_epoch_goes_on_with_exactly_the_batches_that_were_left(skip: int) -> None:
    assert steps(True, skip=skip) == steps(True)[skip:]


def test_one_rank_is_left_alone() -> None:
    PartialState(cpu=True)
    single = prepare_data_loader(
        DataLoader(list(range(8)), batch_size=2), num_processes=1, put_on_device=False
    )
    sampler = single.batch_sampler
    balance(single, LENGTHS)
    assert single.batch_sampler is sampler


def test_lengths_are_counted_for_selected_rows_too() -> None:
    data = datasets.Dataset.from_dict(
        {"input_ids": [[1] * n for n in (3, 1, 2)], "labels": [[1] * n for n in (3, 1, 2)]}
    )
    assert row_lengths(data) == [3, 1, 2]
    assert row_lengths(data.select([2, 0])) == [2, 3]


def test_the_order_by_length_of_an_epoch_is_the_same_after_a_resume() -> None:
    """Whatever torch's generator has drawn meanwhile, and in a process that has not seen the epoch before."""

    def order(epoch: int) -> list[int]:
        torch.rand(random.randrange(1, 9))
        return list(LengthGrouped(LENGTHS, BATCH, seed=7, epoch=lambda: epoch))

    first, second = order(0), order(1)
    assert LENGTHS[first[0]] == LENGTHS[second[0]] == max(LENGTHS), "what fills memory most comes first"
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second
    for kill_after in (1, 30, ROWS - 1):
        assert second[:kill_after] + order(1)[kill_after:] == second
