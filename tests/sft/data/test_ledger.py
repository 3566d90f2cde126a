"""The sample ledger: every row once an epoch, over samplers, packing, ranks, accumulation and resumes."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.state import PartialState
from datasets import Dataset
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler

from podtune.commands import data as command
from podtune.run.errors import UserError
from podtune.run.ledger import FOLDER, Ledger, begin, judge
from podtune.sft.data.batching import ROW, LengthGrouped, NumberedBatches, balance, numbered, row_lengths
from podtune.sft.data.rows import pack

EPOCHS, BATCH = 2, 2


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
        collate_fn=NumberedBatches(lambda batch: {"lengths": [len(row["input_ids"]) for row in batch]}),
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
    begin(run, from_step=start, rows=len(rows), drop_last=False)
    per_epoch = math.ceil(math.ceil(math.ceil(len(rows) / BATCH) / ranks) / accumulation)
    for rank in range(ranks):
        torch.rand(random.randrange(1, 9))  # a new process has another state of torch's generator
        ledger = Ledger(run, rank)
        for epoch in range(start // per_epoch, EPOCHS):
            skip = max(0, start - epoch * per_epoch)
            batches = micro_batches(numbered(rows), sampler, rank, ranks, epoch, skip * accumulation)
            for index, batch in enumerate(batches):
                step = epoch * per_epoch + skip + index // accumulation + 1
                if step <= stop:
                    ledger.note(step, epoch, batch[ROW])
        ledger.flush()
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
    judgement = judge(tmp_path)
    assert judgement.exact
    assert (judgement.steps, judgement.ranks, judgement.unrecorded) == (last, ranks, ())
    filling = 0 if ranks == 1 else -len(rows) % (BATCH * ranks)
    found = [(each.seen, each.filling, each.missed) for each in judgement.epochs]
    assert found == [(len(rows), filling, ())] * EPOCHS


def test_a_row_that_comes_twice_or_never_is_named_and_a_torn_line_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(tmp_path, from_step=0, rows=5, drop_last=False)
    (tmp_path / FOLDER / "rank-0.txt").write_text("1 0 0 1\n2 0 1 2\n3 0 4\n4 1 0 1\n5 1 2 ")
    with pytest.raises(UserError) as refused:
        command.ledger(tmp_path)
    assert refused.value.code == 65
    said = capsys.readouterr().out
    assert "epoch 1: seen 4, missed 1 (3), more than once 1 (1)" in said
    assert "epoch 2: seen 2 so far" in said


def test_steps_without_an_entry_are_said_and_their_epoch_is_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(tmp_path, from_step=3, rows=4, drop_last=False)
    (tmp_path / FOLDER / "rank-0.txt").write_text("4 0 3\n5 1 0 1\n6 1 2 3\n")
    command.ledger(tmp_path, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["unrecorded"], [epoch["number"] for epoch in found["epochs"]]) == ([1, 2, 3], [2])


def test_a_run_without_a_ledger_is_told_how_to_keep_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--sample_ledger true"):
        judge(tmp_path)
    begin(tmp_path, from_step=0, rows=4, drop_last=False)
    assert judge(tmp_path).epochs == ()
    shutil.rmtree(tmp_path / FOLDER)
