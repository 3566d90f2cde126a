"""A training that was broken off continues with the losses of one that was not; every strategy's is held in
tests/bench/strategies.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from podtune.bench.case.command_line import read_options
from podtune.bench.case.run import CaseRun
from podtune.bench.case.train import learning_rate, train
from podtune.run.errors import ConfigError
from podtune.run.world import World

TINY = ["--model", "tinygpt-test", "--strategy", "single", "--sequence-length", "32"]
TINY += ["--cpu", "--epoch-steps", "2"]


def losses(*words: str) -> tuple[float, ...]:
    options, size, _ = read_options([*TINY, *words], World())
    return train(CaseRun(options, size, World())).loss_by_epoch


def test_a_training_in_fp16_resumes_with_the_same_losses_and_the_newest_epoch_is_kept(tmp_path: Path) -> None:
    fp16 = ["--precision", "fp16", "--lr-warmup", "3"]
    saved = [*fp16, "--save", str(tmp_path)]
    losses("--epochs", "1", *saved)
    assert losses("--epochs", "3", "--resume", *saved) == losses("--epochs", "3", *fp16)
    assert [folder.name for folder in tmp_path.iterdir()] == ["epoch-3"]


def test_a_training_with_other_options_is_not_continued(tmp_path: Path) -> None:
    saved = ["--save", str(tmp_path)]
    losses("--epochs", "1", *saved)
    with pytest.raises(ConfigError, match="of another training: seed was 0, is 1"):
        losses("--epochs", "2", "--resume", "--seed", "1", *saved)


def test_the_learning_rate_rises_and_follows_a_cosine() -> None:
    words = ["--model", "tinygpt-test", "--strategy", "single", "--epochs", "1", "--learning-rate", "1"]
    cosine, _, _ = read_options([*words, "--lr-warmup", "2", "--lr-schedule", "cosine"], World())
    rates = [learning_rate(cosine, step, 6) for step in range(7)]
    assert rates == pytest.approx([0.5, 1, 1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0])
    constant, _, _ = read_options(words, World())
    assert [learning_rate(constant, step, 6) for step in range(3)] == [1, 1, 1]
