"""podtune runs and podtune watch as their users call them; bad folders; runs that ended without a word."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from podtune.cli import app
from podtune.report.runs import listing
from podtune.report.runs.runs import load_run
from podtune.report.runs.watch import facts, warnings
from podtune.run import checkpoint
from podtune.run.errors import UserError
from podtune.run.follow import find_runs
from podtune.run.lock import LOCK_FILE, started
from podtune.run.metrics_log import MetricsLog
from podtune.run.record import METRICS_FILE, RUN_FILE, write_json

RunMaker = Callable[..., Path]


def podtune(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), catch_exceptions=True)


def names(result: Result) -> list[str]:
    assert result.exit_code == 0, result.exception
    return [row["name"] for row in json.loads(result.stdout)]


def beat(
    run_dir: Path,
    *,
    age_s: float = 0.0,
    pid: int | None = None,
    host: str | None = None,
    step: int = 10,
    step_age_s: float = 0.0,
) -> None:
    content = {
        "time": time.time() - age_s,
        "step": step,
        "step_at": time.time() - step_age_s,
        "pid": pid or os.getpid(),
        "host": host or socket.gethostname(),
        "started": started(pid or os.getpid()),
        "job": "",
    }
    (run_dir / LOCK_FILE).write_text(json.dumps(content))


def gone_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_runs_below_a_folder_are_listed_with_their_figures(make_run: RunMaker, tmp_path: Path) -> None:
    make_run("deep/down/slow", learning_rate=1e-4)
    make_run("fast", learning_rate=1e-3)
    rows = {row["name"]: row for row in json.loads(podtune("runs", str(tmp_path), "--json").stdout)}
    assert set(rows) == {"fast", "slow"}
    fast = rows["fast"]
    assert (fast["mode"], fast["strategy"], fast["world"], fast["status"], fast["steps"]) == (
        "sft",
        "ddp",
        2,
        "ok",
        60,
    )
    assert fast["seconds"] == pytest.approx(31.0)
    assert fast["device_hours"] == pytest.approx(2 * 31.0 / 3600)
    assert fast["best_loss"] <= fast["loss"] < rows["slow"]["loss"]


def test_no_view_stumbles_over_a_run_that_rotates_its_checkpoints_and_starts_again(
    make_run: RunMaker, tmp_path: Path
) -> None:
    run, other = make_run("one"), make_run("two")
    record, done = json.loads((run / RUN_FILE).read_text()), threading.Event()
    shown, rounds = facts(load_run(run)), 0

    def train() -> None:
        nonlocal rounds
        while not done.is_set():
            for step in (20, 40):
                (run / f"checkpoint-{step}").mkdir()
                (run / f"checkpoint-{step}" / "optimizer.pt").write_bytes(b"state")
            checkpoint.rotate(run, 1)
            checkpoint.discard(run / "checkpoint-40")
            MetricsLog(run / METRICS_FILE, from_step=60).close()
            write_json(run / RUN_FILE, record)
            rounds += 1

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        try:
            for _ in range(10):
                assert names(podtune("runs", str(tmp_path), "--json")) == ["one", "two"]
                assert facts(load_run(run)) == shown
                assert podtune("compare", str(run), str(other), "--json").exit_code == 0
        finally:
            done.set()
        training.result(60)
    assert rounds > 1


def test_a_narrow_terminal_loses_columns_by_their_worth_and_names_keep_both_ends(make_run: RunMaker) -> None:
    runs = [load_run(make_run(f"sweep-learning-rate-1e-4-batch-{size}")) for size in (16, 32)]
    table = listing.table(listing.list_runs(runs))
    for width in range(10, 130):
        assert max(map(len, table.text(width=width).splitlines())) <= width
    lines = table.text(width=80).splitlines()
    assert lines[0].split() == ["name", "strategy", "world", "status", "steps", "loss", "best"]
    assert [line.split()[0] for line in lines[2:]] == [run.name for run in runs]
    assert [line.split()[0] for line in table.text(width=44).splitlines()[2:]] == [
        "sweep-learning…-1e-4-batch-16",
        "sweep-learning…-1e-4-batch-32",
    ]


ESCAPES = "\x1b]52;c;aGk=\x07\x9b31m\u202eevil\r\nx"


def test_no_view_of_a_run_hands_the_terminal_what_it_would_obey(make_run: RunMaker) -> None:
    """Each text of a record, of its lines and of what is said of them."""
    texts = dict.fromkeys(("name", "strategy", "status", "reason", "model"), ESCAPES)
    folders = [str(make_run(name, record=texts, config={"x": ESCAPES + name})) for name in "ab"]
    root = str(Path(folders[0]).parent)
    views = [["runs", root], ["watch", folders[0], "--once"]]
    views.append(["compare", *folders])
    for words in views:
        result = podtune(*words)
        assert result.exit_code == 0, (words, result.exception)
        assert "evil" in result.stdout
        assert not re.search(r"[\x1b\x07\x9b\r\u202e]", result.output), words


def test_sorting_puts_runs_without_the_value_last_either_way(make_run: RunMaker, tmp_path: Path) -> None:
    make_run("b", learning_rate=1e-3)
    make_run("a", learning_rate=1e-4)
    make_run("none", lines=[])
    root = str(tmp_path)
    assert names(podtune("runs", root, "--json", "--sort", "loss")) == ["b", "a", "none"]
    assert names(podtune("runs", root, "--json", "--sort=-loss")) == ["a", "b", "none"]


def test_a_field_that_is_not_there_is_refused_with_those_that_are(make_run: RunMaker, tmp_path: Path) -> None:
    make_run("one")
    result = podtune("runs", str(tmp_path), "--sort", "best_los")
    assert "did you mean 'best_loss'?" in str(result.exception)


def test_a_running_run_shows_progress_and_time_left(make_run: RunMaker, tmp_path: Path) -> None:
    run_dir = make_run("going", status="running", steps=40, config={"max_steps": 80})
    lines = [
        line for line in (run_dir / METRICS_FILE).read_text().splitlines() if json.loads(line)["step"] <= 20
    ]
    (run_dir / METRICS_FILE).write_text("\n".join(lines) + "\n")
    beat(run_dir, step=20)
    row = json.loads(podtune("runs", str(tmp_path), "--json").stdout)[0]
    assert (row["status"], row["progress"], row["eta_s"]) == ("running", 0.25, 10.0)
    assert "running 25%, 10 s left" in podtune("runs", str(tmp_path)).stdout


def test_a_run_whose_process_is_gone_is_died_and_not_running(make_run: RunMaker, tmp_path: Path) -> None:
    beat(make_run("killed", status="running"), pid=gone_pid())
    beat(make_run("elsewhere-silent", status="running"), host="another-pod", age_s=300)
    beat(make_run("elsewhere-alive", status="running"), host="another-pod", age_s=3)
    make_run("begins", status="running")
    rows = {row["name"]: row["status"] for row in json.loads(podtune("runs", str(tmp_path), "--json").stdout)}
    assert rows == {
        "killed": "died",
        "elsewhere-silent": "silent",
        "elsewhere-alive": "running",
        "begins": "running",
    }


def test_a_run_that_beats_but_makes_no_step_is_stalled(make_run: RunMaker) -> None:
    run_dir = make_run("hanging", status="running", config={"max_steps": 80})
    beat(run_dir, step_age_s=600)
    assert load_run(run_dir).progress().stalled
    assert any("no step for" in warning for warning in warnings(load_run(run_dir)))
    beat(run_dir, step_age_s=1)
    assert not load_run(run_dir).progress().stalled
    beat(run_dir, step=80, step_age_s=600)
    assert not load_run(run_dir).progress().stalled, "after its last step a run saves its model and answers"


def test_a_thousand_runs_list_in_about_a_second_of_cpu(make_run: RunMaker, tmp_path: Path) -> None:
    template = make_run("template", steps=200)
    record, metrics = json.loads((template / RUN_FILE).read_text()), (template / METRICS_FILE).read_bytes()
    for index in range(1000):
        folder = tmp_path / "many" / f"run-{index:04}"
        folder.mkdir(parents=True)
        (folder / RUN_FILE).write_text(json.dumps(record | {"name": folder.name}))
        (folder / METRICS_FILE).write_bytes(metrics)
    began = time.process_time()
    runs, unreadable = listing.read_runs(find_runs(tmp_path / "many"))
    text = listing.table(listing.sort_rows(listing.list_runs(runs), "loss")).text(width=120)
    took = time.process_time() - began
    assert (len(runs), unreadable, text.count("\n")) == (1000, [], 1001)
    assert took < 1.0, f"{took:.2f} s of CPU"


def test_what_is_no_run_torn_or_of_another_schema_is_named_with_its_place(
    make_run: RunMaker, tmp_path: Path
) -> None:
    torn = make_run("torn")
    whole = (torn / METRICS_FILE).read_text()
    (torn / METRICS_FILE).write_text(whole + '{"step": 61, "split": "tr')
    old = make_run("old", record={"schema": "podtune.run/0"})
    (tmp_path / "empty").mkdir()
    run = load_run(torn)
    assert [len(run.entries[split]) for split in ("train", "eval")] == [60, 3]
    assert run.problems == [f"{torn / METRICS_FILE}: torn or no metrics lines: 1; left out"]
    with pytest.raises(
        UserError, match=r"old/run.json: has schema 'podtune.run/0'; this podtune reads 'podtune.run/1'"
    ):
        load_run(old)
    with pytest.raises(UserError, match=r"is no run: it has no run\.json"):
        load_run(tmp_path / "empty")
    listed = podtune("runs", str(tmp_path), "--json")
    assert names(listed) == ["torn"]
    assert "old/run.json: has schema 'podtune.run/0'" in listed.stderr


def test_a_loss_that_is_not_finite_is_said_and_of_a_step_twice_the_first_counts(make_run: RunMaker) -> None:
    run_dir = make_run("odd")
    lines = [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]
    lines = [line for line in lines if line["split"] == "train"]
    lines[4]["loss"] = "nan"
    lines.insert(8, lines[7] | {"loss": 99.0})
    (run_dir / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = load_run(run_dir)
    what = "train loss is not finite 1 times, first at step 5; left out of curves"
    assert run.problems == [f"{run_dir / METRICS_FILE}: {what}"]
    assert 99.0 not in run.curve("train", "loss")[1]


def test_watch_shows_progress_loss_speed_and_evaluation(make_run: RunMaker) -> None:
    run_dir = make_run("watched", status="running", steps=40, config={"max_steps": 80})
    beat(run_dir, step=40)
    shown = podtune("watch", str(run_dir), "--once").stdout
    assert "40 of 80" in shown
    for part in ("watched", "loss", "tokens/s", "evaluation", "perplexity", "GiB of memory"):
        assert part in shown, part


def test_a_nan_is_a_warning(make_run: RunMaker) -> None:
    run_dir = make_run("live", status="running", steps=10)
    beat(run_dir)
    with (run_dir / METRICS_FILE).open("a") as file:
        file.write(
            json.dumps({"time": "2026-11-20T09:10:00Z", "step": 11, "split": "train", "loss": "nan"}) + "\n"
        )
    assert "the loss is nan" in warnings(load_run(run_dir))


def test_ctrl_c_in_a_terminal_ends_the_watching_and_says_that_the_run_goes_on(make_run: RunMaker) -> None:
    run_dir = make_run("watched", status="running")
    beat(run_dir)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "podtune.cli", "watch", str(run_dir)]
    with subprocess.Popen(
        command, stdout=theirs, stderr=subprocess.PIPE, text=True, env={**os.environ, "TERM": "xterm"}
    ) as watching:
        os.close(theirs)
        screen = ""
        while "GiB of memory" not in screen:
            screen += os.read(ours, 65536).decode()
        watching.send_signal(signal.SIGINT)
        _, told = watching.communicate(timeout=30)
    os.close(ours)
    assert (watching.returncode, told.strip()) == (
        130,
        f"no longer watching; the run continues. Come back: podtune watch {run_dir}",
    )
