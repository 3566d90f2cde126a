"""A save that training does not wait for: complete or invisible, whatever happens while it is written."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.checkpoints import damage
from transformers import TrainerState

from podtune.run import background_save, checkpoint
from podtune.run.background_save import BackgroundSave
from podtune.run.errors import report
from podtune.run.world import World
from podtune.sft.train.saving import CheckpointWriter


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Path]:
    """A pod's folder in memory, of this test alone."""
    folder = background_save.stage_of(tmp_path / "run", 0)
    assert background_save.clear(folder)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def begin(stage: Path, run: Path, step: int, *, size: int = 1000, alone: bool = True) -> BackgroundSave:
    """A checkpoint of one large and one small file, staged and on its way."""
    name = f"checkpoint-{step}"
    (stage / name / "nested").mkdir(parents=True)
    (stage / name / "model.safetensors").write_bytes(bytes([step]) * size)
    (stage / name / "nested" / "rng_state_0.pth").write_bytes(b"x" * 10)
    staging_dir = run / checkpoint.SAVING / name
    commit = functools.partial(checkpoint.commit, staging_dir, run / name, step, {"tokens": step})
    return BackgroundSave(stage / name, staging_dir, commit, alone=alone)


def test_a_staged_checkpoint_becomes_one_of_the_volume_and_leaves_the_memory(
    stage: Path, tmp_path: Path
) -> None:
    save = begin(stage, tmp_path / "run", 3)
    save.wait_written()
    assert save.join()
    save.check()
    found, warnings = checkpoint.newest_complete(tmp_path / "run")
    assert found is not None
    assert (found.step, found.facts, warnings) == (3, {"tokens": 3}, [])
    assert background_save.staged_bytes(stage) == 0


def test_nobody_sees_a_checkpoint_before_every_pod_has_written(stage: Path, tmp_path: Path) -> None:
    save = begin(stage, tmp_path / "run", 3, alone=False)
    save.wait_written()
    assert not save.writes
    assert checkpoint.checkpoints(tmp_path / "run") == []
    staging_dir = tmp_path / "run" / checkpoint.SAVING / "checkpoint-3"
    BackgroundSave(stage / "another pod's", staging_dir, None, alone=False).wait_written()
    save.release()
    assert save.join(60)
    assert damage(tmp_path / "run" / "checkpoint-3") == ""


def test_a_process_killed_while_it_writes_leaves_the_checkpoint_before(stage: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin(stage, run, 1).join()
    writes = run / checkpoint.SAVING / "checkpoint-2" / "model.safetensors"
    child = os.fork()
    if not child:  # too large to be written before the kill
        begin(stage, run, 2, size=2**28).join()
        os._exit(0)
    while not writes.exists() or not writes.stat().st_size:
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert [path.name for path in checkpoint.checkpoints(run)] == ["checkpoint-1"]
    found, warnings = checkpoint.newest_complete(run)
    assert found is not None
    assert (found.step, warnings) == (1, [])
    assert not (run / checkpoint.SAVING).exists()
    assert background_save.staged_bytes(stage) > 0
    assert background_save.clear(stage)  # as the next start does
    assert background_save.staged_bytes(stage) == 0


@pytest.mark.parametrize(
    ("options", "reason", "code", "advice"),
    [
        ("size=1m", "No space left", 74, "persistence.output.size"),
        ("nr_inodes=3", "No space left", 74, "persistence.output.size"),
        ("remount,ro", "Read-only", 170, "started again, it resumes"),  # while the checkpoint is in memory
    ],
)
def test_a_volume_that_takes_no_more_is_raised_by_the_next_step_with_advice(
    options: str,
    reason: str,
    code: int,
    advice: str,
    stage: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options.replace("remount,ro", "size=9m"), "tmpfs", volume]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root can mount a small volume")
    try:
        if options == "remount,ro":
            subprocess.run(["mount", "-o", options, volume], check=True)
        save = begin(stage, volume / "run", 1, size=2**21)
        save.join()
        with pytest.raises(OSError, match=reason) as caught:
            save.check()
        with pytest.raises(OSError, match=reason):
            save.wait_written()
        assert report(caught.value) == code
        assert advice in capsys.readouterr().err
        assert checkpoint.checkpoints(volume / "run") == []
    finally:
        subprocess.run(["umount", volume], check=True)


def test_shared_memory_without_room_has_the_training_wait_for_its_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, state = tmp_path / "run", TrainerState(global_step=1)
    writer = CheckpointWriter(run, World(), async_save=True)

    def write() -> None:
        assert writer.folder is not None
        assert writer.folder.parent == run / checkpoint.SAVING
        writer.folder.mkdir(parents=True)

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    writer.save(write, state, {}, last=False, estimated_bytes=2**30)
    assert damage(run / "checkpoint-1") == ""
    said = capsys.readouterr().err
    assert "training waits for its saves: /dev/shm has 0.00 GiB free" in said
    assert "shm.sizeLimit" in said
    writer.close()


def test_a_folder_of_somebody_elses_in_memory_is_not_followed(stage: Path, tmp_path: Path) -> None:
    shutil.rmtree(stage)
    (tmp_path / "precious").mkdir()
    stage.symlink_to(tmp_path / "precious")
    assert not background_save.clear(stage)
    assert (tmp_path / "precious").exists()
    stage.unlink()


FROZEN = """
import functools, os, sys, threading
from pathlib import Path
from podtune.run import checkpoint
from podtune.run.background_save import BackgroundSave
from podtune.run.output_volume import watch_volume
stage, run = Path(sys.argv[1]), Path(sys.argv[2])
(stage / "checkpoint-4").mkdir()
(stage / "checkpoint-4" / "model.safetensors").write_bytes(b"4" * 1000)
with watch_volume(run, 0.5, interval_s=0.05):
    os.fsync = os.fdatasync = lambda file: threading.Event().wait()
    aside = run / checkpoint.SAVING / "checkpoint-4"
    commit = functools.partial(checkpoint.commit, aside, run / "checkpoint-4", 4, {})
    save = BackgroundSave(stage / "checkpoint-4", aside, commit, alone=True)
    print("trains on", save.writes, flush=True)
    save.wait_written()  # before the next save
"""


def test_a_volume_that_freezes_during_a_save_ends_the_training_and_costs_that_save_alone(
    stage: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert begin(stage, run, 2).join()
    command = [sys.executable, "-c", FROZEN, str(stage), str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.stdout, done.returncode) == ("trains on True\n", 170)
    found, _ = checkpoint.newest_complete(run)
    assert found is not None
    assert found.step == 2
