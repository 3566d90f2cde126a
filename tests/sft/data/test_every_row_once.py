"""Every row is trained once an epoch, over samplers, packing, ranks, accumulation and resumes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.state import PartialState
from datasets import Dataset
from support.row_ledger import RowLedger, epochs, trained
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler

from podtune.sft.data.batching import LengthGrouped, balance, row_lengths
from podtune.sft.data.rows import pack

EPOCHS, BATCH = 2, 2
ROW = "row"  # the column with a row's number


def some_rows(count: int, packed: str | None) -> Dataset:
    lengths = [random.Random(row).randint(1, 20) for row in range(count)]
    tokens = [[1] * length for length in lengths]
    rows = Dataset.from_dict({"input_ids": tokens, "labels": tokens})
    return pack(rows, 20, packed, seed=1) if packed else rows


def sampler_of(name: str, rows: Dataset, epoch: Any) -> Sampler[int]:
    if name == "group_by_length":
        return LengthGrouped(row_lengths(rows), BATCH, seed=3, epoch=epoch)
    return SequentialSampler(rows) if name == "sequential" else RandomSampler(rows)


def micro_batches(rows: Dataset, sampler: str, rank: int, ranks: int, epoch: int, skip: int) -> Iterator[Any]:
    """What a rank's loader gives in ``epoch``, as the trainer makes it."""
    PartialState(cpu=True)
    plain = DataLoader(
        rows,  # type: ignore[arg-type]
        batch_size=BATCH,
        sampler=sampler_of(sampler, rows, lambda: epoch),
        collate_fn=lambda batch: {name: [row[name] for row in batch] for name in ("input_ids", ROW)},
    )
    loader = prepare_data_loader(
        plain,
        num_processes=ranks,
        process_index=rank,
        put_on_device=False,
        use_seedable_sampler=True,
        data_seed=1,
    )
    if ranks > 1:
        balance(loader, row_lengths(rows))
    loader.set_epoch(epoch)
    return iter(skip_first_batches(loader, skip) if skip else loader)


def train(
    run: Path, rows: Dataset, sampler: str, ranks: int, accumulation: int, start: int, stop: int
) -> int:
    """Steps ``start + 1`` to ``stop`` of a run whose ranks keep a ledger; returns the last step there is."""
    rows = rows.add_column(ROW, range(len(rows)))
    per_epoch = math.ceil(math.ceil(math.ceil(len(rows) / BATCH) / ranks) / accumulation)
    for rank in range(ranks):
        torch.rand(random.randrange(1, 9))  # a new process has another state of torch's generator
        ledger = RowLedger(run, rank)
        for epoch in range(start // per_epoch, EPOCHS):
            skip = max(0, start - epoch * per_epoch)
            batches = micro_batches(rows, sampler, rank, ranks, epoch, skip * accumulation)
            for index, batch in enumerate(batches):
                step = epoch * per_epoch + skip + index // accumulation + 1
                if step <= stop:
                    ledger.note(step, epoch, batch[ROW])
    return per_epoch * EPOCHS


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("sampler", "packed"),
    [
        ("random", None),
        ("sequential", None),
        ("group_by_length", None),
        ("random", "bfd"),
        ("random", "wrapped"),
    ],
)
def test_every_row_comes_once_an_epoch_over_kills_and_resumes(
    sampler: str, packed: str | None, ranks: int, accumulation: int, tmp_path: Path
) -> None:
    rows = some_rows(61, packed)
    last = train(tmp_path, rows, sampler, ranks, accumulation, 0, 3)
    # what came after the checkpoint is trained again
    for saved, killed_at in ((2, last - 2), (last - 3, last)):
        train(tmp_path, rows, sampler, ranks, accumulation, saved, killed_at)
    steps_of_ranks = trained(tmp_path)
    assert sorted(steps_of_ranks) == list(range(ranks))
    assert all(sorted(steps) == list(range(1, last + 1)) for steps in steps_of_ranks.values())
    # accelerate fills the last step of several ranks with rows that it takes again
    filling = 0 if ranks == 1 else -len(rows) % (BATCH * ranks)
    for counted in epochs(tmp_path):
        assert set(counted) == set(range(len(rows)))
        assert counted.total() - len(rows) == filling
    assert len(epochs(tmp_path)) == EPOCHS
