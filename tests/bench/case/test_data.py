"""Every rank reads its own part of one global batch, from synthetic rows or from CIFAR-10."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from podtune.bench.case.data import Rows, SyntheticImages, SyntheticTokens, open_rows, share
from podtune.bench.models import find_size
from podtune.bench.options import Options
from podtune.bench.strategies.contract import Batch
from podtune.run.errors import UserError


def whole(batches: list[Batch]) -> Batch:
    return Batch(
        torch.cat([batch.inputs for batch in batches]), torch.cat([batch.targets for batch in batches])
    )


@pytest.mark.parametrize("rows", [SyntheticTokens(512, 16, seed=3), SyntheticImages(10, 32, seed=3)])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_parts_are_disjoint_and_together_the_global_batch(rows: Rows, parts: int) -> None:
    for step in (0, 1, 5):
        numbers = [share(step, 8, part, parts) for part in range(parts)]
        assert sorted(number for part in numbers for number in part) == list(range(8 * step, 8 * step + 8))
        together = whole([rows.batch(part) for part in numbers])
        expected = rows.batch(share(step, 8, 0, 1))
        assert torch.equal(together.inputs, expected.inputs)
        assert torch.equal(together.targets, expected.targets)
        assert len({row.numpy().tobytes() for row in together.inputs}) == 8


def test_targets_are_the_next_tokens() -> None:
    batch = SyntheticTokens(512, 16, seed=0).batch(range(4))
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])


def test_another_seed_gives_other_rows_and_the_same_seed_the_same() -> None:
    first, again, other = (SyntheticTokens(512, 16, seed).batch(range(4)).inputs for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_decoder_reads_no_files(tmp_path: Path) -> None:
    options = Options(model="tinygpt-test", strategy="single", data=str(tmp_path), sequence_length=16)
    with pytest.raises(UserError, match="synthetic alone"):
        open_rows(options, find_size("tinygpt-test"))
