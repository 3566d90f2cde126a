"""Random kills of runs with saves: each ends bit for bit like one that nobody disturbed, and by itself.

``make chaos`` asks for 200 of them (PODTUNE_CHAOS_KILLS); the suite takes twenty with the same seed: three
tenths of two ranks, six tenths of a stream, where a start is cheapest, and the rest of a run that publishes.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from support.checkpoints import damage
from support.launch import Launcher, metrics
from support.object_store import ObjectStore

from podtune.run import checkpoint
from podtune.run.background_save import stage_of
from podtune.run.world import World
from podtune.sft.train.uploader import CheckpointUploader

KILLS = int(os.environ.get("PODTUNE_CHAOS_KILLS", "20"))
SEED = int(os.environ.get("PODTUNE_CHAOS_SEED", "1"))
WEIGHTS = "final/model.safetensors"


@pytest.fixture
def words(micro_model: Path, qa_data: Path) -> list[object]:
    """The arguments of a run of few rows that saves every other step."""
    found: list[object] = ["--model_name_or_path", micro_model, "--dataset_name", qa_data / "train.parquet"]
    found += ["--global_batch_size", 4, "--bf16", "false", "--logging_steps", 1, "--max_length", 48]
    return [*found, "--save_steps", 2, "--save_total_limit", 2, "--timeout_s", 20]


def newest(run: Path) -> int:
    return max((int(path.name.rpartition("-")[2]) for path in checkpoint.checkpoints(run)), default=0)


def storm(
    launcher: Launcher,
    folder: Path,
    words: list[object],
    *,
    kills: int,
    ranks: int = 1,
    publish: tuple[object, ...] = (),
    env: dict[str, str] | None = None,
    before: Callable[[random.Random], None] = lambda dice: None,
) -> None:
    """Kill a run again and again, and hold its end against that of a whole one.

    ``publish`` are the killed run's alone; ``before`` is called before each start.
    """
    dice, steps = random.Random(SEED), 8 + 3 * kills
    # A peer that is killed before both have met is waited for until the time is up. Should a slow machine's
    # own ranks need longer, they end with the same 170, and another start takes the kill.
    hurried = ("--timeout_s", 6)
    words = [*words, "--max_steps", steps]
    whole, run = folder / "whole", folder / "run"
    launcher.run(*words, "--output_dir", whole, ranks=ranks)
    killed = 0
    while killed < kills and newest(run) < steps:
        before(dice)
        program = launcher.start(*words, *hurried, *publish, "--output_dir", run, ranks=ranks, env=env)
        aim = newest(run) + dice.choice([0, 2, 2, 4])
        # at a step, while a checkpoint is staged in memory, or while it is copied and committed
        moment = dice.choice([None, stage_of(run, 0), run / checkpoint.SAVING])
        while all(rank.is_alive() for rank in program.ranks) and (
            newest(run) < aim or (moment and not moment.exists())
        ):
            time.sleep(0.001)
        time.sleep(dice.random() * (0.02 if moment else 0.5))
        victims = dice.choice([[0], [1], [0, 1]]) if ranks == 2 else [0]
        killed += any(program.ranks[rank].is_alive() for rank in victims)
        program.signal(signal.SIGKILL, victims)
        # the other one ends by itself: 170, or 0 where it was done already
        assert set(program.wait(120)) <= {-signal.SIGKILL, 170, 0}, program.output()[-3000:]
        seen = checkpoint.checkpoints(run)
        assert not [path.name for path in seen if damage(path)], "a half checkpoint is visible"
    launcher.run(*words, *publish, "--output_dir", run, ranks=ranks, env=env)
    assert metrics(run) == metrics(whole)
    assert metrics(run, name="tokens") == metrics(whole, name="tokens")
    assert (run / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    assert not [path.name for path in run.iterdir() if path.name.endswith(".part")]
    assert not stage_of(run, 0).exists(), "shared memory is not given back"


@pytest.mark.timeout(120 + 60 * KILLS)
def test_a_storm_of_kills_changes_no_bit_of_the_outcome(
    words: list[object], launcher: Launcher, tmp_path: Path
) -> None:
    storm(launcher, tmp_path, words, kills=KILLS * 3 // 10, ranks=2)


@pytest.mark.timeout(120 + 60 * KILLS)
def test_a_killed_stream_goes_on_at_its_row(words: list[object], launcher: Launcher, tmp_path: Path) -> None:
    storm(launcher, tmp_path, [*words, "--dataset_streaming", "true"], kills=KILLS * 6 // 10)


@pytest.mark.timeout(120 + 60 * KILLS)
def test_a_killed_run_publishes_whole_checkpoints_to_a_store_that_fails(
    words: list[object], launcher: Launcher, tmp_path: Path, object_store: ObjectStore
) -> None:
    """The store answers 500 and 503, slowly, or breaks off; in the end it has the run's own files."""
    url = object_store.bucket("storm")
    answers: list[str | int] = ["half", "slow", 500, 503]

    def fail(dice: random.Random) -> None:
        object_store.mend()
        for answer in dice.sample(answers, 2):
            object_store.cut("PUT", "checkpoint-", how=answer)

    publish = ("--run_name", "run", "--publish", url)
    store = object_store.environment
    storm(launcher, tmp_path, words, kills=KILLS // 10, publish=publish, env=store, before=fail)
    object_store.mend()
    (tmp_path / "fetched").mkdir()
    uploader = CheckpointUploader(f"{url}/run", tmp_path / "fetched", World(), limit=2)
    resumed = uploader.newest(lambda found: None)
    assert resumed is not None
    name = f"checkpoint-{resumed.step}"
    assert resumed.step == newest(tmp_path / "run")
    assert not damage(tmp_path / "fetched" / name)


@pytest.mark.skipif(KILLS < 100, reason="three sweeps of two runs; make chaos has the time")
@pytest.mark.timeout(600)
def test_a_sweep_that_is_killed_leaves_no_process_and_ends_like_a_whole_one(
    words: list[object], tmp_path: Path
) -> None:
    options = {
        str(key).removeprefix("--"): str(value) for key, value in zip(words[::2], words[1::2], strict=True)
    }
    options |= {"max_steps": 6, "eval_strategy": "no", "global_batch_size": 4}
    for name in ("logging_steps", "max_length", "save_steps", "save_total_limit", "timeout_s"):
        options[name] = int(options[name])
    (tmp_path / "sweep.yaml").write_text(
        yaml.safe_dump({"options": options | {"bf16": False}, "seed": [1, 2]})
    )

    def sweep(folder: str) -> list[str]:
        return [sys.executable, "-m", "podtune", "sweep", str(tmp_path / "sweep.yaml"), "--output", folder]

    whole = subprocess.run(sweep(str(tmp_path / "whole")), capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr[-3000:]
    killed = tmp_path / "killed"
    with subprocess.Popen(
        sweep(str(killed)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while not list(killed.glob("*/checkpoint-2")) and process.poll() is None:
            time.sleep(0.01)
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    _, left = psutil.wait_procs(family, timeout=60)
    assert left == []
    again = subprocess.run(sweep(str(killed)), capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-3000:]
    trained = sorted(path.parent.parent for path in (tmp_path / "whole").glob(f"*/{WEIGHTS}"))
    assert len(trained) == 2
    for run in trained:
        assert (killed / run.name / WEIGHTS).read_bytes() == (run / WEIGHTS).read_bytes()


def test_four_that_prepare_at_once_make_the_tokens_once(
    micro_model: Path, qa_data: Path, launcher: Launcher, tmp_path: Path
) -> None:
    command = ["data", "prepare", "--model", micro_model, "--data", qa_data / "train.parquet"]
    command += ["--output", tmp_path / "tokens"]
    programs = [launcher.podtune(*command) for _ in range(4)]
    programs[0].signal(signal.SIGKILL)
    ended = [program.end() for program in programs[1:]]
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    names = sorted(path.name for path in (tmp_path / "tokens").iterdir())
    assert len([name for name in names if not name.startswith(".")]) == 1, names
    assert not [name for name in names if name.endswith(".part")], "what the killed one had begun is removed"
