"""The Aim view against the real Aim: equal to the files, one run a job, and no failure of it reaches the
training.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from podtune.run.aim.follower import Follower
from podtune.run.aim.repository import AimRun, experiment
from podtune.run.aim.sync import sync
from podtune.run.aim.tracking import start_tracker
from podtune.run.errors import UserError
from podtune.run.metrics_log import read_metrics
from podtune.run.record import METRICS_FILE, RUN_FILE, Json, end_record, write_json

RunMaker = Callable[..., Path]
pytestmark = pytest.mark.filterwarnings("ignore")  # of Aim's own dependencies

TRAINER = """
import json, os, sys
from pathlib import Path
from podtune.run.lock import claim
from podtune.run.metrics_log import (MetricsLog)
from podtune.run.record import (end_record, write_json)
from podtune.run.aim.tracking import start_tracker

run_dir, repo, first, last, resume_from = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6])
record = json.loads((run_dir / "run.json").read_text()) | {"status": "running"}
write_json(run_dir / "run.json", record)
log = MetricsLog(run_dir / "metrics.jsonl", from_step=resume_from)
lock = claim(run_dir)
tracker = start_tracker(run_dir, repo)
for step in range(first, last + 1):
    log.write("train", step, {"loss": 10.0 / step, "tokens": step * 100})
    lock.step(step)
print("written", flush=True)
if sys.stdin.readline().strip() == "end":
    end_record(record, "ok", 0)
    write_json(run_dir / "run.json", record)
    lock.release()
    tracker.finish(60.0)
"""

HOLDER = """
import sys
from podtune.run.aim.follower import Follower
keep = [Follower(folder, sys.argv[1]) for folder in sys.argv[2:]]
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("aim"))


@pytest.fixture
def start_trainer() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A process that writes a run's files and starts its tracker, as rank 0 of a training does, without a
    model.
    """
    started: list[subprocess.Popen[str]] = []

    def start(run_dir: Path, repo: str, steps: range, resume_from: int = 0) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-c",
            TRAINER,
            str(run_dir),
            repo,
            str(steps[0]),
            str(steps[-1]),
            str(resume_from),
        ]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def aim_state(run_dir: Path, repo: str) -> Json:
    try:
        found: Json = json.loads((run_dir / "aim.json").read_text())["repos"]
        found = found.get(repo if "://" in repo else os.path.relpath(repo, run_dir), {})
    except (OSError, ValueError):
        return {}
    return found


Points = dict[tuple[Any, ...], dict[int, float]]


def in_aim(repo: str, run_hash: str) -> tuple[Any, Points]:
    """The Aim run, and its points by metric and subset (and rank, where it is one rank's), asked by Aim's own
    query language.
    """
    from aim.sdk.repo import Repo

    found = Repo.from_path(repo)
    found.container_pool.clear()
    points: Points = {}
    for collection in found.query_metrics(f"run.hash == '{run_hash}'", report_mode=0).iter_runs():
        for metric in collection:
            steps, (values, _, _) = metric.data.items_list()
            points[metric.name, *metric.context.to_dict().values()] = dict(zip(steps, values, strict=True))
    return found.get_run(run_hash), points


def in_files(run_dir: Path) -> Points:
    points: Points = {}
    for entry in read_metrics(run_dir / METRICS_FILE)[0]:
        for name, column in entry.pop("per_rank", {}).items():
            for rank, value in enumerate(column):
                points.setdefault((name, entry["split"], rank), {})[entry["step"]] = float(value)
        for key, value in entry.items():
            if key not in ("time", "step", "epoch", "split", "eta_s"):
                points.setdefault((key, entry["split"]), {})[entry["step"]] = float(value)
    return points


@pytest.mark.parametrize(
    ("path", "name"),
    [("work/data", "data"), ("chats/train.parquet", "chats"), ("chats.jsonl", "chats"), ("org/rows", "rows")],
)
def test_the_experiment_is_the_name_of_the_data_set(path: str, name: str) -> None:
    assert experiment({"data": {"path": path}}) == name


def test_aim_holds_exactly_what_the_files_hold_and_a_second_sync_adds_nothing(
    make_run: RunMaker, repo: str
) -> None:
    run_dir = make_run("qa-sync", steps=40)
    first = Follower(run_dir, repo)
    assert first.update() == "ok"
    first.leave()
    run, points = in_aim(repo, first.hash)
    assert points == in_files(run_dir)
    assert run["status"] == "ok"
    assert run["config", "learning_rate"] == 1e-3
    assert (run.name, run.experiment, set(run.tags), run.active) == (
        "qa-sync",
        "qa",
        {"sft", "ddp", "world-2"},
        False,
    )
    assert run.created_at.isoformat() == "2026-11-20T09:00:00"  # the training's start, not the sync's
    assert run.duration == pytest.approx(21.0)

    again = Follower(run_dir, repo)
    assert again.update() == "ok"
    assert (again.lines, again.hash) == (0, first.hash)
    again.leave()


def test_a_nan_loss_is_in_aim_as_nan(make_run: RunMaker, repo: str) -> None:
    run_dir = make_run(
        "not-finite",
        lines=[{"time": "2026-11-20T09:00:01Z", "step": 1, "split": "train", "loss": "nan", "tokens": 5}],
    )
    follower = Follower(run_dir, repo)
    follower.update()
    follower.leave()
    _, points = in_aim(repo, follower.hash)
    assert math.isnan(points["loss", "train"][1])


def test_a_killed_trainer_is_closed_as_died_and_its_restart_goes_on_in_the_same_aim_run(
    make_run: RunMaker, repo: str, start_trainer: Callable[..., subprocess.Popen[str]]
) -> None:
    run_dir = make_run("killed", status="running", lines=[])
    trainer = start_trainer(run_dir, repo, range(1, 21))
    assert trainer.stdout
    assert trainer.stdout.readline() == "written\n"
    until(lambda: bool(aim_state(run_dir, repo).get("hash")))
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    until(lambda: "died" in aim_state(run_dir, repo).get("closed", ""))
    run_hash = aim_state(run_dir, repo)["hash"]
    run, _ = in_aim(repo, run_hash)
    assert (run["status"], run["reason"], run.active) == ("error", "died", False)

    restarted = start_trainer(run_dir, repo, range(11, 31), resume_from=10)
    out, _ = restarted.communicate("end\n", timeout=90)
    assert (out, restarted.returncode) == ("written\n", 0)
    run, points = in_aim(repo, run_hash)
    assert aim_state(run_dir, repo)["hash"] == run_hash
    assert points == in_files(run_dir)
    assert (run["status"], run.active, len(points["loss", "train"])) == ("ok", False, 30)


def test_a_killed_tracker_costs_one_warning_and_aim_sync_completes_the_view(
    make_run: RunMaker, repo: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run("tracker-killed", status="running", steps=20)
    tracker = start_tracker(run_dir, repo)
    assert tracker._child
    until(lambda: bool(aim_state(run_dir, repo).get("hash")))
    tracker._child.kill()
    with (run_dir / METRICS_FILE).open("a") as file:
        file.write(
            json.dumps(
                {"time": "2026-11-20T10:00:00Z", "step": 21, "split": "train", "loss": 0.5, "tokens": 1}
            )
            + "\n"
        )
    write_json(run_dir / RUN_FILE, end_record(json.loads((run_dir / RUN_FILE).read_text()), "ok", 0))
    tracker.finish()
    assert f"podtune aim-sync {run_dir} --repo {repo}" in capfd.readouterr().err

    done = subprocess.run(
        [sys.executable, "-m", "podtune.cli", "aim-sync", str(run_dir), "--repo", repo, "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    run, points = in_aim(repo, facts["hash"])
    assert points == in_files(run_dir)
    assert (run["status"], run.active) == ("ok", False)


def test_the_tracker_of_a_run_that_has_ended_is_waited_for_and_that_of_a_running_one_is_not(
    make_run: RunMaker, repo: str
) -> None:
    ended, running = make_run("just-ended", steps=5), make_run("goes-on", status="running", steps=5)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, repo, str(ended), str(running)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin
    assert holder.stdout
    holder.stdout.readline()
    once = {"follow": False, "as_json": True}
    with pytest.raises(UserError, match="another process is writing this run"):
        sync(running, repo, **once)
    end = threading.Timer(1.0, holder.stdin.close)
    end.start()
    sync(ended, repo, **once)
    end.join()
    holder.wait(30)


def test_several_trackers_may_open_one_fresh_repo_at_once(make_run: RunMaker, tmp_path: Path) -> None:
    fresh = str(tmp_path / "fresh")
    run_dirs = [make_run(f"at-once-{index}", steps=5) for index in range(2)]
    trackers = [start_tracker(run_dir, fresh) for run_dir in run_dirs]
    for tracker in trackers:
        tracker.finish(90.0)
    for run_dir in run_dirs:
        assert aim_state(run_dir, fresh).get("closed", "").startswith("ok"), run_dir


def test_following_a_folder_takes_up_every_run_below_it_until_it_is_stopped(
    make_run: RunMaker, tmp_path: Path, repo: str
) -> None:
    first = make_run("volume/first", steps=5)
    command = [
        sys.executable,
        "-m",
        "podtune.cli",
        "aim-sync",
        str(tmp_path / "volume"),
        "--repo",
        repo,
        "--follow",
    ]
    syncing = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        until(lambda: aim_state(first, repo).get("closed", "").startswith("ok"))
        second = make_run("volume/second", steps=5)
        until(lambda: aim_state(second, repo).get("closed", "").startswith("ok"))
    finally:
        syncing.send_signal(signal.SIGTERM)
        out, _ = syncing.communicate(timeout=60)
    assert syncing.returncode == 0
    assert [line.split(":")[0] for line in out.splitlines()] == [str(first), str(second)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_a_repo_that_cannot_be_written_costs_a_warning_and_at_most_five_seconds(
    make_run: RunMaker, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a-file").write_text("in the way")
    run_dir = make_run("no-repo", steps=5)
    tracker = start_tracker(run_dir, str(tmp_path / "a-file" / "aim"))
    began = time.monotonic()
    tracker.finish()
    assert time.monotonic() - began < 6.0
    assert "podtune: warning: Aim: " in capfd.readouterr().err


NO_LOCKS = """
import errno, fcntl, os
lockf = fcntl.lockf
def refusing(file, *rest):
    if os.readlink(f"/proc/self/fd/{file.fileno()}").startswith(os.environ["CANNOT_LOCK"]):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    return lockf(file, *rest)
fcntl.lockf = refusing
"""


def test_a_claim_that_cannot_lock_is_said_and_the_files_make_the_view_where_one_can(
    make_run: RunMaker,
    repo: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_LOCKS)
    claim, run_dir = tmp_path / "claim", make_run("no-locks", steps=5)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CANNOT_LOCK", str(claim))
    start_tracker(run_dir, str(claim)).finish(30.0)
    said = capfd.readouterr().err
    assert f"{claim}: the volume cannot lock files" in said
    assert f"podtune aim-sync {run_dir} --repo" in said
    sync(run_dir, repo, follow=False, as_json=False)
    assert in_aim(repo, aim_state(run_dir, repo)["hash"])[1] == in_files(run_dir)


def test_a_server_that_is_not_there_costs_a_warning_and_at_most_five_seconds(
    make_run: RunMaker, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run("no-server", steps=5)
    tracker = start_tracker(run_dir, f"aim://127.0.0.1:{free_port()}")
    began = time.monotonic()
    tracker.finish()
    assert time.monotonic() - began < 6.0
    assert "podtune: warning: Aim: " in capfd.readouterr().err


def test_a_run_locked_by_another_process_is_a_warning_and_is_completed_when_the_lock_is_gone(
    make_run: RunMaker, repo: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run("locked", steps=5)
    record = json.loads((run_dir / RUN_FILE).read_text())
    holder = AimRun(repo, None, record)
    write_json(
        run_dir / "aim.json",
        {"schema": "podtune.aim/1", "repos": {os.path.relpath(repo, run_dir): {"hash": holder.hash}}},
    )
    tracker = start_tracker(run_dir, repo)
    child = tracker._child
    assert child
    tracker.finish()
    assert "podtune: warning: Aim: " in capfd.readouterr().err
    assert aim_state(run_dir, repo).get("closed") is None
    holder.release()
    child.wait(timeout=90)  # it ends by itself, with or without a last success
    follower = Follower(run_dir, repo)
    follower.update()
    follower.leave()
    assert in_aim(repo, holder.hash)[1] == in_files(run_dir)


def test_a_folder_that_moves_with_its_repo_keeps_its_run_there(make_run: RunMaker, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    make_run("old/run", steps=5)
    hashes = []
    for folder in (old, new):
        follower = Follower(folder / "run", str(folder / "aim"))
        follower.update()
        hashes.append(follower.hash)
        follower.leave()
        assert str(tmp_path) not in (folder / "run/aim.json").read_text()
        if folder == old:
            shutil.copytree(old, new)
    assert hashes[0] == hashes[1]


def test_without_aim_a_run_goes_on_with_one_warning(
    make_run: RunMaker, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "aim", None)  # what importing finds where the extra is not installed
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    start_tracker(make_run("no-aim", steps=5), "aim").finish()
    assert capfd.readouterr().err.count("podtune: warning: Aim: not installed") == 1
