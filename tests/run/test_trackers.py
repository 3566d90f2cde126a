"""``podtune sync``: what each tracker then holds is what is in the run's files, also when it is repeated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.run_folders import RunMaker
from typer.testing import CliRunner

from podtune.cli import app
from podtune.run.errors import DataError
from podtune.run.trackers import read_run, to_mlflow, to_tensorboard

TWICE_TO_TRACKIO = """
import json, sys, trackio
from pathlib import Path
from podtune.run.trackers import read_run, to_trackio
trackio.init("mine", name="first", config={}, auto_log_gpu=False, auto_log_cpu=False)  # of somebody else
trackio.log({"train/loss": 1.0}, step=1)
trackio.finish()
other, = trackio.Api().runs("mine")
for _ in range(2):
    to_trackio(read_run(Path(sys.argv[1])), "mine")
run, = (run for run in trackio.Api().runs("mine") if run.id != other.id)
print(json.dumps(trackio.SQLiteStorage.get_logs("mine", run.name, run_id=run.id)))
"""


def losses(run_dir: Path) -> dict[int, float]:
    entries = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {entry["step"]: entry["loss"] for entry in entries if entry["split"] == "train"}


def test_tensorboard_has_the_losses_once(make_run: RunMaker) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_dir = make_run("first")
    for _ in range(2):
        folder = to_tensorboard(read_run(run_dir), None)
    events = loader.EventAccumulator(folder)
    events.Reload()
    assert {event.step: event.value for event in events.Scalars("train/loss")} == pytest.approx(
        losses(run_dir)
    )
    assert len(events.Scalars("train/loss")) == len(losses(run_dir))


def test_mlflow_has_the_losses_and_settings_once(make_run: RunMaker, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run_dir, other = make_run("first"), make_run("second", status="error")
    for folder in (run_dir, other, run_dir):
        to_mlflow(read_run(folder), uri)
    client = mlflow.MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("podtune").experiment_id])
    assert sorted((run.info.run_name, run.info.status) for run in runs) == [
        ("first", "FINISHED"),
        ("second", "FAILED"),
    ]
    first = next(run for run in runs if run.info.run_name == "first")
    assert first.data.params["learning_rate"] == "0.001"
    history = client.get_metric_history(first.info.run_id, "train/loss")
    assert {metric.step: metric.value for metric in history} == losses(run_dir)


def test_trackio_has_the_losses_once(
    make_run: RunMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    run_dir = make_run("first")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    words = [sys.executable, "-c", TWICE_TO_TRACKIO, str(run_dir)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    logged = json.loads(done.stdout.splitlines()[-1])
    assert {entry["step"]: entry["train/loss"] for entry in logged if "train/loss" in entry} == losses(
        run_dir
    )


def test_a_run_that_goes_on_is_refused_and_left_out_of_several(make_run: RunMaker, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(DataError, match="has not ended"):
        read_run(make_run("going", status="running"))
    ended = make_run("ended")
    result = CliRunner().invoke(app, ["sync", str(tmp_path), "--to", "tensorboard"])
    assert (result.exit_code, f"{ended}: " in result.output) == (0, True), result.output
    assert not (tmp_path / "going" / "tensorboard").exists()


def test_events_are_not_written_through_a_link_that_somebody_left(make_run: RunMaker, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run_dir, theirs = make_run("first"), tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "kept").touch()
    (run_dir / "tensorboard").symlink_to(theirs)
    with pytest.raises(OSError, match="symbolic link"):
        to_tensorboard(read_run(run_dir), None)
    assert [path.name for path in theirs.iterdir()] == ["kept"]


def test_a_killed_run_ends_with_its_last_line(make_run: RunMaker) -> None:
    run = read_run(make_run("killed", record={"ended_at": None, "status": "error"}))
    assert (run.ended, run.ok) == (run.points[-1].time, False)


def test_aim_needs_a_repository_and_an_unknown_tracker_is_named(make_run: RunMaker) -> None:
    run_dir = str(make_run("first"))
    assert "mlflow" in CliRunner().invoke(app, ["sync", run_dir, "--to", "mlfow"]).output
    assert CliRunner().invoke(app, ["sync", run_dir, "--to", "aim"]).exit_code != 0
