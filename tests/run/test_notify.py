"""The end of a run is told to a web hook, in bounded time, and its address to nobody."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.launch import Launcher, free_port
from transformers import TrainerState

from podtune.run import notify
from podtune.run.errors import NO_INPUT, UserError
from podtune.run.record import new_record

SECRET = "T0/B0/very-secret"


class Hook(http.server.ThreadingHTTPServer):
    """A web hook that keeps what it is given, and answers with the codes of ``answers``, then 200."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.given: list[tuple[str, dict[str, Any]]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{path}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.given.append((self.path, content))
        code = self.server.answers.pop(0) if self.server.answers else 200
        if code == 0:  # hangs until the client is gone
            self.rfile.read(1)
            return
        self.send_response(code)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def hook() -> Iterator[Hook]:
    with Hook() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(("answers", "why"), [([404], "HTTP 404"), ([302], "HTTP 302")])
def test_a_hook_that_refuses_is_a_warning_without_its_address(
    hook: Hook, capsys: pytest.CaptureFixture[str], answers: list[int], why: str
) -> None:
    hook.answers = answers
    notify.post(hook.url(SECRET), {"loss": float("nan")})
    assert hook.given == [(f"/{SECRET}", {"loss": "nan"})]
    warning = capsys.readouterr().err
    assert f"127.0.0.1 was not notified of the run's end: {why}" in warning
    assert SECRET not in warning


def test_a_hook_that_hangs_costs_a_few_seconds(
    hook: Hook, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "POST_S", 0.3)
    hook.answers = [0]
    began = time.monotonic()
    notify.post(hook.url(SECRET), {})
    assert time.monotonic() - began < 10
    assert "was not notified of the run's end" in capsys.readouterr().err


def test_a_run_that_cannot_begin_is_told(
    hook: Hook, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from podtune.training import main

    words = ["--model_name_or_path", "absent", "--dataset_name", str(tmp_path / "absent.csv")]
    output = tmp_path / "first"
    code = main([*words, "--output_dir", str(output), "--notify_url", hook.url(SECRET)])
    assert code == NO_INPUT
    ((_, told),) = hook.given
    assert (told["name"], told["status"], told["exit_code"]) == ("first", "error", NO_INPUT)
    assert "absent.csv" in told["reason"]
    assert "absent.csv" in told["text"]
    assert SECRET not in "".join(capsys.readouterr())


def test_a_run_in_a_trainjob_tells_its_progress_and_its_end_and_keeps_the_address_to_itself(
    hook: Hook, launcher: Launcher, micro_model: Path, qa_data: Path, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("of the service account")
    words = ["--model_name_or_path", micro_model, "--dataset_name", qa_data, "--output_dir", tmp_path / "run"]
    words += ["--max_steps", 2, "--max_length", 64, "--save_strategy", "no", "--notify_url", hook.url(SECRET)]
    job = {
        "KUBEFLOW_TRAINER_SERVER_URL": hook.url("status"),
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
    }
    output = launcher.run(*words, env=job)
    *progress, (path, told) = hook.given
    assert {path for path, _ in progress} == {"/status"}
    percent = [content["trainerStatus"]["progressPercentage"] for _, content in progress]
    assert (percent[0], percent[-1]) == (0, 100)
    assert path == f"/{SECRET}"
    assert (told["status"], told["exit_code"], told["measurements"]["steps"]) == ("ok", 0, 2)
    assert told["text"].startswith("run: ok: 2 steps")
    kept = [output, *(file.read_text() for file in (tmp_path / "run").rglob("*.json"))]
    assert not [text for text in kept if SECRET in text]


def test_a_controller_that_cannot_be_reached_is_left_alone_after_three_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from podtune.sft.train.job_status import JobStatus

    (tmp_path / "token").write_text("of the service account")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{free_port()}/")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    status = JobStatus()
    state = TrainerState(max_steps=9, is_world_process_zero=True)
    for _ in range(3):
        assert "not kept up to date" not in capsys.readouterr().err
        status.on_train_begin(None, state, None)
    assert "not kept up to date" in capsys.readouterr().err
    assert not status._initialized


def test_kubeflow_asked_for_where_no_controller_offers_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from podtune.sft.config.resolve import check_installed

    monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_URL", raising=False)
    with pytest.raises(UserError, match="TrainJobStatus"):
        check_installed(SimpleNamespace(report_to=["kubeflow"]))  # type: ignore[arg-type]


def test_a_run_ends_with_the_answers_of_base_and_tuned_model() -> None:
    record = new_record(mode="sft", name="run", config={}) | {"reason": ""}
    answers = {"rows": 400, "base": {"exact_match": 0.0}, "tuned": {"exact_match": 0.905}}
    record["measurements"] = {"answers": answers | {"most_frequent_answer": 0.31}}
    expected = (
        "answers 0.0% -> 90.5% of 400 held-out rows exactly right; the most frequent answer alone: 31.0%"
    )
    assert expected in notify.summary_lines(record, Path("run"))
    record["measurements"] = {"answers": {"rows": 3, "base": {"loss": 1.0}, "tuned": {"loss": 0.5}}}
    assert not [line for line in notify.summary_lines(record, Path("run")) if line.startswith("answers")]
