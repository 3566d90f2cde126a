"""A run is published as it trains, and resumes from there when its volumes are gone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launch import Launcher, metrics
from support.object_store import ObjectStore
from support.resume_keys import KEY

from podtune.run import checkpoint
from podtune.run.errors import UserError
from podtune.run.manifest import MANIFEST
from podtune.run.world import World
from podtune.sft.config.arguments import ResumeOptions
from podtune.sft.source.object_store import Remote
from podtune.sft.train.resume import find_checkpoint
from podtune.sft.train.uploader import CheckpointUploader


@pytest.fixture(scope="module")
def runs(object_store: ObjectStore) -> str:
    return object_store.bucket("runs")


@pytest.fixture
def bucket(runs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckpointUploader]:
    """A folder of a run and its empty copy."""
    monkeypatch.setattr("podtune.sft.source.object_store.PAUSES_S", (0.0, 0.0, 0.0))
    folder = CheckpointUploader(f"{runs}/{tmp_path.name}", tmp_path / "run", World(), limit=2)
    folder.output_dir.mkdir()
    yield folder
    folder.finish(10)


def commit(run: Path, step: int, content: bytes = b"weights") -> str:
    """A checkpoint of a run's folder."""
    staging_dir = run / checkpoint.SAVING / f"checkpoint-{step}"
    staging_dir.mkdir(parents=True)
    (staging_dir / "model.safetensors").write_bytes(content * 1000)
    checkpoint.commit(staging_dir, run / staging_dir.name, step, {"seed": 1})
    return staging_dir.name


def published(bucket: CheckpointUploader) -> list[str]:
    return sorted({name.partition("/")[0] for name in bucket.remote.listing()})


def test_checkpoints_are_rotated_there_as_here_and_come_back_whole(bucket: CheckpointUploader) -> None:
    (bucket.output_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2')
    for step in (1, 2, 3):
        bucket.saved(commit(bucket.output_dir, step), last=True)
    assert bucket.finish(30) == ""
    assert published(bucket) == ["checkpoint-2", "checkpoint-3", "metrics.jsonl"]
    shutil.rmtree(bucket.output_dir)
    bucket.output_dir.mkdir()
    resumed = bucket.newest(lambda found: None)
    assert resumed is not None
    assert resumed.step == 3
    assert checkpoint.read(bucket.output_dir / "checkpoint-3").facts == {"seed": 1}
    assert (bucket.output_dir / "metrics.jsonl").read_text() == '{"step": 1}\n', "whole lines"


def test_half_an_upload_is_invisible_and_rotated_away(
    bucket: CheckpointUploader, object_store: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.saved(commit(bucket.output_dir, 1), last=True)
    assert bucket.finish(30) == ""
    object_store.cut("PUT", "podtune-manifest.json", times=100)
    bucket.saved(commit(bucket.output_dir, 2), last=True)
    assert "checkpoint-2" in bucket.finish(30)
    object_store.mend()
    assert "checkpoint-2 was not published" in capsys.readouterr().err
    assert "checkpoint-2/model.safetensors" in bucket.remote.listing()
    shutil.rmtree(bucket.output_dir)
    bucket.output_dir.mkdir()
    resumed = bucket.newest(lambda found: None)
    assert resumed is not None
    assert resumed.step == 1
    bucket.saved(commit(bucket.output_dir, 3), last=True)
    assert bucket.finish(30) == ""
    assert published(bucket) == ["checkpoint-1", "checkpoint-3"]


@pytest.mark.parametrize("how", ["half", 500, 503, "slow"])
def test_a_store_that_cuts_fails_or_dawdles_loses_nothing(
    bucket: CheckpointUploader, object_store: ObjectStore, how: str | int
) -> None:
    object_store.cut("PUT", "model.safetensors", how=how)
    bucket.saved(commit(bucket.output_dir, 1, b"w" * 400), last=True)
    assert bucket.finish(30) == ""
    shutil.rmtree(bucket.output_dir / "checkpoint-1")
    object_store.cut("GET", "model.safetensors", how=how)
    assert bucket.newest(lambda found: None) is not None
    object_store.cut("PUT", "podtune-manifest.json", times=100, how=how)
    bucket.saved(commit(bucket.output_dir, 2), last=True)
    failed = bucket.finish(30)
    object_store.mend()
    complete = f"checkpoint-2/{MANIFEST}" in bucket.remote.listing()
    assert complete is (failed == "") is (how == "slow"), "an upload is complete, or invisible and said"


def test_an_object_that_changed_there_is_not_used(
    bucket: CheckpointUploader, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        bucket.saved(commit(bucket.output_dir, step), last=True)
    bucket.finish(30)
    bucket.remote.write("checkpoint-2/model.safetensors", b"Weights" * 1000)
    shutil.rmtree(bucket.output_dir)
    bucket.output_dir.mkdir()
    resumed = bucket.newest(lambda found: None)
    assert resumed is not None
    assert resumed.step == 1
    assert "checkpoint-2 is not used: model.safetensors has changed" in capsys.readouterr().err


def test_what_belongs_to_another_run_is_refused_before_it_is_fetched(bucket: CheckpointUploader) -> None:
    bucket.saved(commit(bucket.output_dir, 1), last=True)
    bucket.finish(30)
    shutil.rmtree(bucket.output_dir)
    bucket.output_dir.mkdir()
    with pytest.raises(UserError, match="belongs to another run") as caught:
        bucket.newest(lambda found: checkpoint.check_resume(found, KEY, allowed=False))
    assert "run_name" in caught.value.fix
    assert str(bucket.remote.url) in caught.value.where
    assert not list(bucket.output_dir.iterdir())
    with pytest.raises(UserError, match="auto_resume is off"):
        find_checkpoint(bucket.output_dir, KEY, ResumeOptions(newest=False), bucket)


def test_a_checkpoint_on_its_way_is_kept_and_the_next_one_left_out(
    bucket: CheckpointUploader, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    go = threading.Event()
    original = Remote.upload

    def slow(remote: Remote, files: dict[str, Path]) -> None:
        assert go.wait(30)
        original(remote, files)

    monkeypatch.setattr(Remote, "upload", slow)
    bucket.saved(commit(bucket.output_dir, 1), last=False)
    bucket.saved(commit(bucket.output_dir, 2), last=False)
    assert "checkpoint-2 is not published" in capsys.readouterr().err
    checkpoint.rotate(bucket.output_dir, 1, busy=bucket.busy)
    assert (bucket.output_dir / "checkpoint-1").is_dir()
    go.set()
    assert bucket.finish(30) == ""
    assert published(bucket) == ["checkpoint-1"]


def test_a_finished_run_publishes_what_is_missing_there_and_says_what_it_cannot(
    bucket: CheckpointUploader, object_store: ObjectStore
) -> None:
    (bucket.output_dir / "final").mkdir()
    (bucket.output_dir / "final" / "model.safetensors").write_bytes(b"w")
    (bucket.output_dir / "run.json").write_text('{"status": "ok"}')
    bucket.remote.write("final/of-an-earlier-model.safetensors", b"w")
    object_store.cut("PUT", "model.safetensors", times=100)
    assert "final/model.safetensors" in bucket.complete()
    object_store.mend()
    assert bucket.complete() == ""
    assert set(bucket.remote.listing()) == {"final/model.safetensors", "run.json"}
    bucket.remote.remove(["final/model.safetensors"])
    assert bucket.complete() == "", "nothing is uploaded again where the record is there"
    assert set(bucket.remote.listing()) == {"run.json"}


def test_links_leave_no_file_of_this_process_in_the_bucket(
    bucket: CheckpointUploader, monkeypatch: pytest.MonkeyPatch
) -> None:
    final, secret = bucket.output_dir / "final", bucket.output_dir.parent / "secret"
    secret.write_text("AWS_SECRET_ACCESS_KEY")
    final.mkdir()
    (final / "config.json").write_text("{}")
    (final / "notes.txt").symlink_to(secret)
    (bucket.output_dir / "run.json").write_text('{"status": "ok"}')
    assert bucket.complete() == ""
    assert set(bucket.remote.listing()) == {"final/config.json", "run.json"}
    with pytest.raises(UserError, match="symbolic link"):  # put there between the look and the upload
        bucket.remote.upload({"notes.txt": final / "notes.txt"})
    final.rename(final.with_name("real"))
    final.symlink_to(secret.parent)
    (bucket.output_dir / "run.json").write_text("{}")
    assert "is a link" in bucket.complete()


def test_what_comes_back_follows_no_link(bucket: CheckpointUploader) -> None:
    (bucket.output_dir / "run.json").write_text('{"status": "running"}')
    bucket.saved(commit(bucket.output_dir, 1), last=True)
    assert bucket.finish(30) == ""
    shutil.rmtree(bucket.output_dir)
    victim = bucket.output_dir.parent / "victim"
    staged = bucket.output_dir / checkpoint.SAVING / "checkpoint-1"
    staged.mkdir(parents=True)
    for planted in (bucket.output_dir / "run.json", staged / ".model.safetensors.part"):
        planted.symlink_to(victim)  # to a file that is not there yet, else it is kept as the record
    assert bucket.newest(lambda found: None) is not None
    assert not victim.exists()
    assert json.loads((bucket.output_dir / "run.json").read_text()) == {"status": "running"}


@pytest.fixture(scope="module")
def options(qa_data: Path, micro_model: Path, runs: str, object_store: ObjectStore) -> list[object]:
    """Eight short fp32 steps, saved at every fourth; model and rows come from the bucket too."""
    remote = Remote(f"{runs}/inputs")
    remote.upload({f"model/{path.name}": path for path in micro_model.iterdir()})
    remote.upload({"rows.parquet": qa_data / "train.parquet"})
    return [
        *("--model_name_or_path", f"{runs}/inputs/model", "--dataset_name", f"{runs}/inputs/rows.parquet"),
        *("--bf16", "false", "--global_batch_size", 4, "--max_length", 64, "--logging_steps", 1),
        *("--learning_rate", "1e-3", "--save_steps", 4, "--timeout_s", 120, "--run_name", "r"),
    ]


def test_a_run_goes_on_from_the_bucket_with_equal_losses_when_its_volume_is_gone(
    launcher: Launcher, options: list[object], runs: str, object_store: ObjectStore, tmp_path: Path
) -> None:
    env = object_store.environment | {"HF_HOME": str(tmp_path / "hf")}
    whole = ["--max_steps", 8, *options, "--publish", f"{runs}/e2e", "--output_dir"]
    launcher.run(*whole, tmp_path / "run", env=env)
    losses = metrics(tmp_path / "run")
    remote = Remote(f"{runs}/e2e/r")
    names = {name.partition("/")[0] for name in remote.listing()}
    assert names == {"checkpoint-4", "checkpoint-8", "final", "run.json", "metrics.jsonl"}
    record = json.loads(remote.read("run.json") or b"")
    assert (record["status"], record["model"]) == ("ok", f"{runs}/inputs/model")

    # as if the pod had died at step 6, and its volume with it
    remote.remove([name for name in remote.listing() if name.startswith(("checkpoint-8", "final"))])
    remote.write("run.json", json.dumps(record | {"status": "running"}).encode())
    said = launcher.run(*whole, tmp_path / "again", env=env | {"HF_HOME": str(tmp_path / "other")})
    assert "resuming from" in said
    assert metrics(tmp_path / "again") == losses
    assert "final/model.safetensors" in remote.listing()


def test_two_pods_with_a_volume_each_go_on_from_the_bucket(
    launcher: Launcher, options: list[object], runs: str, object_store: ObjectStore, tmp_path: Path
) -> None:
    env = object_store.environment | {"HF_HOME": str(tmp_path / "hf")}
    whole = ["--max_steps", 8, *options, "--publish", f"{runs}/pods", "--strategy", "fsdp"]
    first = [tmp_path / "first" / name for name in "ab"]
    launcher.run(*whole, ranks=2, env=env, pods=first)
    remote = Remote(f"{runs}/pods/r")
    names = set(remote.listing("checkpoint-4"))
    assert {f"checkpoint-4/rng_state_{rank}.pth" for rank in (0, 1)} <= names
    assert (first[0] / "checkpoint-4" / "rng_state_1.pth").exists(), "rank 0's volume has the whole"
    assert not (first[1] / "checkpoint-4").exists()

    remote.remove([name for name in remote.listing() if name.startswith(("checkpoint-8", "final", "run"))])
    again = [tmp_path / "again" / name for name in "ab"]
    launcher.run(*whole, ranks=2, env=env, pods=again)
    assert metrics(again[0]) == metrics(first[0])
    assert (again[1] / "checkpoint-4" / "rng_state_1.pth").exists()
