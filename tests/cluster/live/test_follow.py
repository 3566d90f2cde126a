"""A job that is followed: conditions, problems and logs over restarts and API errors. The API server is a
small one of our own.
"""

from __future__ import annotations

import threading

import pytest
from support.cluster_jobs import HEAD, Api, podtune, stamp, train

from podtune.cluster.live import follow as following
from podtune.cluster.live.client import connect
from podtune.cluster.live.follow import JobWatch, Unseen, follow
from podtune.run.errors import UserError


def test_a_job_is_followed_to_its_end_with_its_problems_and_the_logs_of_all_pods(api: Api) -> None:
    api.add("run", "Running", [*HEAD, train(5)])
    api.logs["run-worker-0"] = [f"{stamp(1)} of the worker"]
    for pod in api.pods:
        pod["status"]["containerStatuses"] = [{"name": "pytorch", "state": {}}]
    seen: list[tuple[str, str]] = []
    got = threading.Event()

    def emit(who: str, line: str) -> None:
        seen.append((who, line))
        if {"run-master-0", "run-worker-0"} <= {each for each, _ in seen} and not got.is_set():
            got.set()
            api.jobs[0]["status"]["conditions"][0]["type"] = "Succeeded"

    assert follow(connect(), "run", emit) == "Succeeded"
    assert ("job", "Running: said the operator") in seen
    assert ("run-worker-0", "of the worker") in seen
    assert [line for who, line in seen if who == "run-master-0"] == [*HEAD, train(5)], "each line once"


def test_the_progress_that_a_trainjob_reports_is_followed(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "POLL_S", 0.02)
    api.add("run", "Running", [])
    job = api.jobs[0]
    job["status"] = {"trainerStatus": {"progressPercentage": 40, "estimatedRemainingSeconds": 75}}
    assert "PyTorchJob run in team: Running (40 % done, about 1m15s left)" in podtune("status", "run").stdout
    seen: list[str] = []

    def emit(_: str, line: str) -> None:
        seen.append(line)
        job["status"] = {"trainerStatus": {"progressPercentage": 99, "estimatedRemainingSeconds": 0}}
        if "99" in line:
            job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}

    assert follow(connect(), "run", emit) == "Succeeded"
    assert seen == ["Running: 40 % done, about 1m15s left", "Running: 99 % done", "Succeeded"]


def test_where_stdout_is_no_terminal_watch_prints_the_status_once(api: Api) -> None:
    api.add("run", "Failed", [*HEAD, train(5)], phase="Failed")
    shown = podtune("watch", "run").stdout
    assert "PyTorchJob run in team: Failed (said the operator)" in shown
    assert "run-worker-0" in shown


def test_logs_are_of_the_first_pod_or_of_all(api: Api) -> None:
    api.add("run", "Running", ["one", "two", "three"])
    api.logs["run-worker-0"] = [f"{stamp(1)} of the worker"]
    assert podtune("logs", "run").stdout.split() == ["one", "two", "three"]
    assert "run-worker-0 | of the worker" in podtune("logs", "run", "--all").stdout


def test_a_log_that_breaks_off_is_asked_for_again_and_each_line_comes_once(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "POLL_S", 0.02)
    api.add("run", "Running", [*HEAD, train(5)])
    seen: list[str] = []
    over = threading.Event()

    def emit(who: str, line: str) -> None:
        seen.append(line)
        if line == train(5):  # one in the second of the last line
            api.logs["run-master-0"] += [f"{stamp(2)} {train(10)}", f"{stamp(3)} {train(15)}"]
        if line == train(15):
            over.set()

    following._follow_log(connect(), "run-master-0", "pytorch", emit, over, [])
    assert seen == [*HEAD, train(5), train(10), train(15)]
    assert api.asked[:2] == ["", stamp(2)]


def test_a_silent_server_keeps_the_last_picture_and_a_deleted_job_ends_it(api: Api) -> None:
    api.add("run", "Running", [*HEAD, train(5)])
    job = JobWatch(connect(), "run")
    seen = job.look()
    api.refused = {"pytorchjobs": 503}
    assert job.look() == seen
    assert "not you: pytorchjobs" in job.unreachable
    api.refused = {}
    job.look()
    assert not job.unreachable
    api.jobs.clear()
    with pytest.raises(UserError, match="the job 'run' was deleted"):
        job.look()


@pytest.mark.parametrize(
    ("part", "status", "code"), [("/log", 403, 77), ("/pods", 403, 77), ("pytorchjobs", 401, 77)]
)
def test_a_missing_right_is_one_sentence_with_its_code(api: Api, part: str, status: int, code: int) -> None:
    api.add("run", "Running", [*HEAD, train(5)])
    for pod in api.pods:
        pod["status"]["containerStatuses"] = [{"name": "pytorch", "state": {}}]
    api.refused = {part: status}
    for more in ([], ["--follow"]):
        error = podtune("logs", "run", *more).exception
        assert isinstance(error, UserError), more
        assert (error.code, f"not you: {part}" in str(error)) == (code, True)


def test_a_name_that_is_neither_folder_nor_job_says_both(api: Api) -> None:
    error = podtune("watch", "nothing").exception
    assert isinstance(error, UserError)
    assert (
        "there is no folder 'nothing' here, and as a job: there is no job 'nothing' in the namespace team"
        in str(error)
    )


def test_a_line_that_is_sent_again_is_not_new_and_another_of_its_second_is() -> None:
    unseen = Unseen()
    first, second = f"{stamp(1)} one", f"{stamp(1)} two"
    assert [unseen.text(line) for line in (first, first, second, first)] == [
        "one",
        None,
        "two",
        None,
    ]
    assert unseen.text(f"{stamp(0)} one") is None
