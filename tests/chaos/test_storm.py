"""Random kills of a run with saves: it ends bit for bit like one that nobody disturbed, and by itself.

``make chaos`` asks for 150 of them (PODTUNE_CHAOS_KILLS); the suite takes eight with the same seed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from support.checkpoints import damage
from support.launch import Launcher, metrics

from podtune.run import checkpoint
from podtune.run.background_save import stage_of

KILLS = int(os.environ.get("PODTUNE_CHAOS_KILLS", "8"))
SEED = int(os.environ.get("PODTUNE_CHAOS_SEED", "1"))


def newest(run: Path) -> int:
    return max((int(path.name.rpartition("-")[2]) for path in checkpoint.checkpoints(run)), default=0)


@pytest.mark.timeout(120 + 60 * KILLS)
def test_a_storm_of_kills_changes_no_bit_of_the_outcome(
    micro_model: Path, qa_data: Path, launcher: Launcher, tmp_path: Path
) -> None:
    dice, steps = random.Random(SEED), 8 + 3 * KILLS
    words: list[object] = ["--model_name_or_path", micro_model, "--dataset_name", qa_data / "train.parquet"]
    words += ["--global_batch_size", 4, "--bf16", "false", "--logging_steps", 1, "--max_length", 48]
    words += ["--max_steps", steps, "--save_steps", 2, "--save_total_limit", 2, "--timeout_s", 20]
    whole, run = tmp_path / "whole", tmp_path / "run"
    launcher.run(*words, "--output_dir", whole, ranks=2)
    kills = 0
    while kills < KILLS and newest(run) < steps:
        program = launcher.start(*words, "--output_dir", run, ranks=2)
        aim = newest(run) + dice.choice([0, 2, 2, 4])
        # at a step, while a checkpoint is staged in memory, or while it is copied and committed
        moment = dice.choice([None, stage_of(run, 0), run / checkpoint.SAVING])
        while all(rank.is_alive() for rank in program.ranks) and (
            newest(run) < aim or (moment and not moment.exists())
        ):
            time.sleep(0.001)
        time.sleep(dice.random() * (0.02 if moment else 0.5))
        victims = dice.choice([[0], [1], [0, 1]])
        kills += any(program.ranks[rank].is_alive() for rank in victims)
        program.signal(signal.SIGKILL, victims)
        # the other one ends by itself: 170, or 0 where it was done already
        assert set(program.wait(120)) <= {-signal.SIGKILL, 170, 0}, program.output()[-3000:]
        seen = checkpoint.checkpoints(run)
        assert not [path.name for path in seen if damage(path)], "a half checkpoint is visible"
    launcher.run(*words, "--output_dir", run, ranks=2)
    assert metrics(run) == metrics(whole)
    assert metrics(run, name="tokens") == metrics(whole, name="tokens")
    weights = "final/model.safetensors"
    assert (run / weights).read_bytes() == (whole / weights).read_bytes()
    assert not [path.name for path in run.iterdir() if path.name.endswith(".part")]
    assert not stage_of(run, 0).exists(), "shared memory is not given back"
