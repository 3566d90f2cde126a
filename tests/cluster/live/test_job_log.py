"""A run told by its job's pods, as podtune watch and runs --cluster show it. The API server is a small one of
our own.
"""

from __future__ import annotations

import json

import pytest
from support.cluster_jobs import HEAD, Api, podtune, printed, record_of, seconds_ago, stamp, train

from podtune.cluster.live.client import connect
from podtune.cluster.live.job_log import JobWatch, RunLog, Unseen
from podtune.report.runs.job import job_runs
from podtune.report.runs.watch import warnings
from podtune.run.errors import UserError
from podtune.run.log_lines import eval_line, start_line, train_line


def test_a_running_job_shows_progress_loss_speed_each_pods_use_and_the_pods(api: Api) -> None:
    api.add(
        "run",
        "Running",
        [*HEAD, train(5), train(10), eval_line(10, {"loss": 6.5, "perplexity": 665.1}), train(15)],
    )
    shown = podtune("watch", "run").stdout
    for part in (
        "sft · ddp · 2 ranks · running",
        "15 of 60",
        "45 s left",
        "1,500 tokens/s",
        "at step 10: loss 6.500",
        "run-master-0 Running",
    ):
        assert part in shown, part


def test_a_nan_in_the_log_is_a_warning(api: Api) -> None:
    line = train_line(20, 60, {"loss": float("nan"), "learning_rate": 1e-3})
    api.add("run", "Running", [*HEAD, line])
    assert "! the loss is nan" in podtune("watch", "run").stdout


def test_a_job_without_a_condition_runs_when_its_pods_do(api: Api) -> None:
    api.add("run", "Running", [*HEAD, train(5)])
    api.jobs[0]["status"] = {}  # so a TrainJob and a Job look while they run
    assert "running for" in podtune("watch", "run").stdout
    for pod in api.pods:
        pod["status"]["phase"] = "Pending"
    assert "sft · ddp · 2 ranks · pending" in podtune("watch", "run").stdout


def test_before_the_first_step_the_pods_and_the_last_line_are_shown(api: Api) -> None:
    api.add("run", "Created", [], phase="Pending")
    api.logs.clear()
    shown = podtune("watch", "run").stdout
    assert "created" in shown
    assert "run-master-0 Pending, run-worker-0 Pending" in " ".join(shown.replace("│", " ").split())
    api.logs["run-master-0"] = [f"{stamp(1)} loading weights"]
    assert "loading weights" in podtune("watch", "run").stdout


def test_an_ended_job_shows_its_exact_record_and_a_failed_one_its_reason(api: Api) -> None:
    api.add("good", "Succeeded", [*HEAD, train(60), *printed(record_of("good"))], phase="Succeeded")
    api.add("bad", "Failed", [*HEAD, train(30), *printed(record_of("bad", "oom", 71))], phase="Failed")
    api.add("gone", "Failed", [], phase="Failed")
    rows = {row["name"]: row for row in json.loads(podtune("runs", "--cluster", "--json").stdout)}
    good = rows["good"]
    assert (good["status"], good["steps"], good["tokens"], good["tokens_per_s"], good["loss"]) == (
        "ok",
        60,
        90_000,
        1234.5678,
        1.2345678,
    )
    assert (rows["bad"]["status"], rows["gone"]["status"]) == ("oom", "error")
    assert "oom" in podtune("watch", "bad").stdout
    assert "out of memory on rank 1" in podtune("watch", "bad").stdout
    assert "said the operator" in podtune("watch", "gone").stdout


def test_logs_are_of_the_first_pod_or_of_all(api: Api) -> None:
    api.add("run", "Running", ["one", "two", "three"])
    api.logs["run-worker-0"] = [f"{stamp(1)} of the worker"]
    assert podtune("logs", "run").stdout.split() == ["one", "two", "three"]
    assert "run-worker-0 | of the worker" in podtune("logs", "run", "--all").stdout


def test_the_list_of_jobs_sorts_like_that_of_folders(api: Api) -> None:
    api.add("slow", "Running", [*HEAD, train(5)])
    api.add("fast", "Running", [*HEAD, train(5), train(45)])
    api.logs["fast-master-0"][-1:] = [f"{stamp(seconds_ago(1))} {train(45)}"]
    api.add("over", "Succeeded", [*HEAD, *printed(record_of("over"))])
    assert "running 75%, 15 s left" in podtune("runs", "--cluster").stdout
    assert [
        row["name"] for row in json.loads(podtune("runs", "--cluster", "--json", "--sort=-steps").stdout)
    ] == ["over", "fast", "slow"]


def test_a_job_is_stalled_when_no_line_comes_for_much_longer_than_its_lines_are_apart(api: Api) -> None:
    for name, pause, ago in (("hangs", 5, 120), ("slow", 300, 120), ("first", 0, 120)):
        api.add(name, "Running", HEAD)
        moments = [seconds_ago(ago + pause), seconds_ago(ago)] if pause else [seconds_ago(ago)]
        api.logs[f"{name}-master-0"] += [
            (f"{stamp(moment)} {train(5 * index)}") for index, moment in enumerate(moments, 1)
        ]
    rows = json.loads(podtune("runs", "--cluster", "--json").stdout)
    assert {row["name"]: row["stalled"] for row in rows} == {"hangs": True, "slow": False, "first": False}
    assert "no step for" in podtune("watch", "hangs").stdout
    assert "no step for" not in podtune("watch", "slow").stdout


def test_a_long_log_is_listed_from_its_end(api: Api) -> None:
    steps = [train(step, 9000) for step in range(1, 5001)]
    api.add("long", "Running", [*HEAD, *steps])
    (row,) = json.loads(podtune("runs", "--cluster", "--json").stdout)
    assert (row["steps"], row["total_steps"]) == (5000, 9000)


def test_each_look_asks_for_new_lines_alone_and_takes_each_once(api: Api) -> None:
    api.add("run", "Running", [*HEAD, train(5)])
    job = JobWatch(connect(), "run")
    job.look()
    # one in the second of the last line
    api.logs["run-master-0"] += [f"{stamp(2)} {train(10)}", f"{stamp(3)} {train(15)}"]
    job.look()
    assert [entry["step"] for entry in job.look().entries["train"]] == [5, 10, 15]
    assert api.asked == ["", stamp(2), stamp(3)]


def test_a_pod_made_again_goes_on_from_its_checkpoint(api: Api) -> None:
    api.add("run", "Running", [*HEAD, train(5), train(10), train(15)])
    job = JobWatch(connect(), "run")
    job.look()
    api.logs["run-master-0"] = [
        f"{stamp(40)} {HEAD[0]}",
        f"{stamp(41)} {start_line(10, 60)}",
        f"{stamp(42)} {train(15, loss=1.0)}",
    ]
    assert [(entry["step"], entry["loss"]) for entry in job.look().entries["train"]] == [
        (5, 7.5),
        (10, 7.0),
        (15, 1.0),
    ]


def test_a_silent_server_keeps_the_last_picture_and_a_deleted_job_ends_it(api: Api) -> None:
    api.add("run", "Running", [*HEAD, train(5)])
    job = JobWatch(connect(), "run")
    job.look()
    api.refused = {"pytorchjobs": 503}
    (run,) = job_runs(job.look())
    assert any("trying again" in warning for warning in warnings(run))
    assert run.entries["train"]
    api.refused = {}
    api.jobs.clear()
    with pytest.raises(UserError, match="the job 'run' was deleted"):
        job.look()


@pytest.mark.parametrize(
    ("part", "status", "code"), [("/log", 403, 77), ("/pods", 403, 77), ("pytorchjobs", 401, 77)]
)
def test_a_missing_right_is_one_sentence_with_its_code(api: Api, part: str, status: int, code: int) -> None:
    api.add("run", "Running", [*HEAD, train(5)])
    api.refused = {part: status}
    for command in (("watch", "run"), ("runs", "--cluster")):
        error = podtune(*command).exception
        assert isinstance(error, UserError)
        assert (error.code, f"not you: {part}" in str(error)) == (code, True)


def test_a_name_that_is_neither_folder_nor_job_says_both(api: Api) -> None:
    error = podtune("watch", "nothing").exception
    assert isinstance(error, UserError)
    assert (
        "there is no folder 'nothing' here, and as a job: there is no job 'nothing' in the namespace team"
        in str(error)
    )
    assert isinstance(podtune("runs", ".", "--cluster").exception, UserError)


def test_records_of_a_benchmark_are_rows_of_their_own() -> None:
    log = RunLog()
    for line in [*printed(record_of("cell-a")), "other", *printed(record_of("cell-b"))]:
        log.see(stamp(1), line)
    assert [record["name"] for record in log.records()] == ["cell-a", "cell-b"]


def test_a_line_that_is_sent_again_is_not_new_and_another_of_its_second_is() -> None:
    unseen = Unseen()
    first, second = f"{stamp(1)} one", f"{stamp(1)} two"
    assert [unseen.split(line) for line in (first, first, second, first)] == [
        (stamp(1), "one"),
        None,
        (stamp(1), "two"),
        None,
    ]
    assert unseen.split(f"{stamp(0)} one") is None
