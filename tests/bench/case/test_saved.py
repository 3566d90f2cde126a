"""A training that was broken off continues with the losses of one that was not, in every strategy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.launch import Launcher

from podtune.bench.case.command_line import read_options
from podtune.bench.case.train import learning_rate
from podtune.bench.strategies.table import STRATEGIES
from podtune.run.world import World

ALONE = ["single", "single --precision fp16"]
# DeepSpeed's leave torch.nn.functional changed behind them
HYBRIDS = ["tensor+fsdp", "pipeline-1f1b+ddp"]
TOGETHER = sorted({*STRATEGIES} - {"single", *HYBRIDS}, key=lambda name: name.startswith("zero"))


@pytest.mark.parametrize(("strategies", "ranks"), [(ALONE, 1), (TOGETHER, 2), (HYBRIDS, 4)])
def test_a_resumed_training_has_the_same_losses(
    strategies: list[str], ranks: int, launcher: Launcher, tmp_path: Path
) -> None:
    results = tmp_path / "results.json"
    program = launcher.start(
        tmp_path, results, *strategies, ranks=ranks, module="tests.bench.case.resume_driver"
    )
    assert program.wait(900) == [0] * ranks, program.output()[-3000:]
    found = json.loads(results.read_text())
    for strategy in strategies:
        whole, resumed = found[strategy]
        assert resumed == whole, strategy
        assert whole[2] < whole[0] or "fp16" in strategy  # whose first steps look for a scale
        assert [folder.name for folder in (tmp_path / strategy).iterdir()] == ["epoch-3"]
    assert "of another training: seed was 0, is 1" in found["refused"]


def test_the_learning_rate_rises_and_follows_a_cosine() -> None:
    words = ["--model", "tinygpt-test", "--strategy", "single", "--epochs", "1", "--learning-rate", "1"]
    cosine, _, _ = read_options([*words, "--lr-warmup", "2", "--lr-schedule", "cosine"], World())
    rates = [learning_rate(cosine, step, 6) for step in range(7)]
    assert rates == pytest.approx([0.5, 1, 1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0])
    constant, _, _ = read_options(words, World())
    assert [learning_rate(constant, step, 6) for step in range(3)] == [1, 1, 1]
