"""podtune runs and podtune watch as their users call them; bad folders; runs that ended without a word."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from podtune.cli import app
from podtune.report.runs import listing
from podtune.report.runs.progress import progress
from podtune.report.runs.runs import load_run
from podtune.report.runs.watch import FolderView, sparkline
from podtune.run.errors import UserError
from podtune.run.follow import find_runs
from podtune.run.lock import LOCK_FILE, started
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


def test_where_filters_by_the_table_the_config_and_the_record(make_run: RunMaker, tmp_path: Path) -> None:
    make_run("low", learning_rate=1e-5)
    make_run("high", learning_rate=1e-3)
    make_run("broken", learning_rate=1e-3, status="oom")

    def those(*comparisons: str) -> set[str]:
        words = [word for comparison in comparisons for word in ("--where", comparison)]
        return set(names(podtune("runs", str(tmp_path), "--json", *words)))

    assert those("learning_rate>1e-5", "status=ok") == {"high"}
    assert those("learning_rate >= 0.001") == {"high", "broken"}
    assert those("name~ROK", "world=2", "status!=ok") == {"broken"}
    assert those("data.fingerprint='f00d'") == {"low", "high", "broken"}


@pytest.mark.parametrize(
    ("comparison", "says"),
    [
        ("learning_rat>1", "did you mean 'learning_rate'?"),
        ("status=", "is not one comparison"),
        ("status", "is not one comparison"),
        ("learning_rate>1e-5 and status=ok", '--where "learning_rate>1e-5" --where status=ok'),
    ],
)
def test_what_is_no_comparison_is_refused_with_how_to_write_one(
    make_run: RunMaker, tmp_path: Path, comparison: str, says: str
) -> None:
    make_run("one")
    result = podtune("runs", str(tmp_path), "--where", comparison)
    assert isinstance(result.exception, UserError)
    assert says in str(result.exception)


def test_a_limit_lists_the_first_and_says_how_many_more(make_run: RunMaker, tmp_path: Path) -> None:
    for name in "abc":
        make_run(name, learning_rate=1e-3)
    assert names(podtune("runs", str(tmp_path), "--json", "--sort", "name", "--limit", "2")) == ["a", "b"]
    assert podtune("runs", str(tmp_path), "--limit", "2").stdout.endswith("and 1 more\n")


def test_a_narrow_terminal_loses_columns_by_their_worth_and_names_keep_both_ends(make_run: RunMaker) -> None:
    runs = [load_run(make_run(f"sweep-learning-rate-1e-4-batch-{size}")) for size in (16, 32)]
    table = listing.table(listing.rows_of(runs))
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
    answers = {"answers": {"samples": [{"prompt": ESCAPES, "tuned": ESCAPES}]}}
    folders = [
        str(make_run(name, record={**texts, "measurements": answers}, config={"x": ESCAPES + name}))
        for name in "ab"
    ]
    root = str(Path(folders[0]).parent)
    views = [["runs", root], ["runs", root, "--csv"], ["watch", folders[0], "--once"]]
    views += [["compare", *folders], ["compare", *folders, "--markdown"]]
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


def test_no_cell_of_a_csv_is_a_formula(make_run: RunMaker, tmp_path: Path) -> None:
    make_run("one", record={"name": "=cmd|' /C calc'!A0", "model": "@SUM(1)", "strategy": "-2+3"})
    row = next(csv.DictReader(io.StringIO(podtune("runs", str(tmp_path), "--csv").stdout)))
    assert (row["name"], row["model"], row["strategy"]) == ("'=cmd|' /C calc'!A0", "'@SUM(1)", "'-2+3")


def test_csv_carries_full_precision(make_run: RunMaker, tmp_path: Path) -> None:
    run_dir = make_run("one")
    row = next(csv.DictReader(io.StringIO(podtune("runs", str(tmp_path), "--csv").stdout)))
    assert float(row["loss"]) == json.loads((run_dir / RUN_FILE).read_text())["measurements"]["loss"]["eval"]


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
    copied = make_run("copied", status="running")
    for name in (RUN_FILE, METRICS_FILE):
        os.utime(copied / name, (time.time() - 300,) * 2)
    rows = {row["name"]: row["status"] for row in json.loads(podtune("runs", str(tmp_path), "--json").stdout)}
    assert rows == {
        "killed": "died",
        "elsewhere-silent": "silent",
        "elsewhere-alive": "running",
        "begins": "running",
        "copied": "silent",
    }
    assert set(names(podtune("runs", str(tmp_path), "--json", "--where", "status=died"))) == {"killed"}


def test_a_run_that_beats_but_makes_no_step_is_stalled(make_run: RunMaker) -> None:
    run_dir = make_run("hanging", status="running", config={"max_steps": 80})
    beat(run_dir, step_age_s=600)
    assert progress(load_run(run_dir)).stalled
    assert any("no step for" in warning for warning in FolderView(run_dir).warnings())
    beat(run_dir, step_age_s=1)
    assert not progress(load_run(run_dir)).stalled
    beat(run_dir, step=80, step_age_s=600)
    assert not progress(load_run(run_dir)).stalled, "after its last step a run saves its model and answers"


def test_a_thousand_runs_list_in_about_a_second_of_cpu(make_run: RunMaker, tmp_path: Path) -> None:
    template = make_run("template", steps=200)
    record, metrics = json.loads((template / RUN_FILE).read_text()), (template / METRICS_FILE).read_bytes()
    for index in range(1000):
        folder = tmp_path / "many" / f"run-{index:04}"
        folder.mkdir(parents=True)
        (folder / RUN_FILE).write_text(json.dumps(record | {"name": folder.name}))
        (folder / METRICS_FILE).write_bytes(metrics)
    began = time.process_time()
    rows, unreadable = listing.list_runs(find_runs(tmp_path / "many"))
    text = listing.table(listing.sort_rows(rows, "loss")).text(width=120)
    took = time.process_time() - began
    assert (len(rows), unreadable, text.count("\n")) == (1000, [], 1001)
    assert took < 1.0, f"{took:.2f} s of CPU"


def test_many_runs_read_in_several_processes_are_the_list_that_one_reads(
    make_run: RunMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [make_run(f"run-{index}", record={"name": f"name-{index // 2}"}) for index in range(12)]
    folders.insert(5, tmp_path / "no run")
    rows, unreadable = listing.list_runs(folders)
    monkeypatch.setattr(listing, "_PART", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    pools: list[int] = []

    def pool(processes: int, context: object) -> ProcessPoolExecutor:
        pools.append(processes)
        return ProcessPoolExecutor(processes, context)

    monkeypatch.setattr(listing, "ProcessPoolExecutor", pool)
    others, unreadable_there = listing.list_runs(folders)
    assert pools == [2]
    ages = [row.values.pop("age_s") for row in [*rows, *others]]
    assert len(ages) == 24
    assert others == rows
    assert rows[0].values["name"] == f"name-0 ({folders[0]})"
    assert unreadable_there == unreadable == [f"{tmp_path / 'no run'}: no such folder"]
    assert listing.list_runs(folders, records=False)[0][0].record == {}


def test_names_are_told_apart_in_one_pass_over_them() -> None:
    class Name(str):
        compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return super().__eq__(other)

    rows = [listing.ListedRun({"name": Name(f"run-{index}"), "path": "p"}, {}, []) for index in range(1000)]
    assert listing._told_apart(rows) is rows
    assert Name.compared < 5000


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
    line = whole.count("\n") + 1
    assert run.problems == [f"{torn / METRICS_FILE} line {line}: torn or no metrics line; left out"]
    with pytest.raises(
        UserError, match=r"old/run.json: has schema 'podtune.run/0'; this podtune reads 'podtune.run/1'"
    ):
        load_run(old)
    with pytest.raises(UserError, match=r"is no run: it has no run\.json"):
        load_run(tmp_path / "empty")
    listed = podtune("runs", str(tmp_path), "--json")
    assert names(listed) == ["torn"]
    assert "old/run.json: has schema 'podtune.run/0'" in listed.stderr


def test_nan_and_contradictions_are_said_with_step_and_file(make_run: RunMaker) -> None:
    run_dir = make_run("odd")
    lines = [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]
    lines = [line for line in lines if line["split"] == "train"]
    lines[4]["loss"] = "nan"
    lines.insert(8, lines[7] | {"loss": 99.0})
    (run_dir / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = json.loads((run_dir / RUN_FILE).read_text())
    record["measurements"]["steps"] = 50
    write_json(run_dir / RUN_FILE, record)
    run = load_run(run_dir)
    assert (
        f"{run_dir / METRICS_FILE} line 9: contradicts an earlier train line of step 8; the first is used"
        in run.problems
    )
    assert (
        f"{run_dir / METRICS_FILE}: train loss is not finite once, at step 5; left out of curves"
        in run.problems
    )
    assert any("50 steps, but there is a line of step 60" in problem for problem in run.problems)
    assert 99.0 not in run.curve("train", "loss")[1]


def test_watch_shows_progress_loss_speed_and_evaluation(make_run: RunMaker) -> None:
    run_dir = make_run("watched", status="running", steps=40, config={"max_steps": 80})
    beat(run_dir, step=40)
    shown = podtune("watch", str(run_dir), "--once").stdout
    assert "40 of 80" in shown
    for part in ("watched", "loss", "tokens/s", "evaluation", "perplexity", "GiB of memory", "█"):
        assert part in shown, part


def test_watch_takes_up_new_lines_and_warns_of_a_nan(make_run: RunMaker) -> None:
    run_dir = make_run("live", status="running", steps=10)
    beat(run_dir)
    view = FolderView(run_dir)
    assert view.run.last("train", "step") == 10
    with (run_dir / METRICS_FILE).open("a") as file:
        file.write(
            json.dumps({"time": "2026-11-20T09:10:00Z", "step": 11, "split": "train", "loss": "nan"}) + "\n"
        )
    view.update()
    assert view.run.last("train", "step") == 11
    assert "the loss is nan" in view.warnings()


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


def test_a_sparkline_falls_with_the_loss() -> None:
    assert sparkline([4.0, 3.0, 2.0, 1.0], 4) == "█▆▃▁"
    assert len(sparkline([float(value) for value in range(1000)], 30)) == 30
