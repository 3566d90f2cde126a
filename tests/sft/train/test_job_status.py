"""A TrainJob that asks for it is told a run's progress."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.launch import Launcher, free_port
from transformers import TrainerState


class Controller(http.server.ThreadingHTTPServer):
    """A controller that keeps what it is told."""

    def __init__(self) -> None:
        self.given: list[tuple[str, dict[str, Any]]] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Controller

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.given.append((self.path, content))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def controller() -> Iterator[Controller]:
    with Controller() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_run_in_a_trainjob_tells_its_progress(
    controller: Controller, launcher: Launcher, micro_model: Path, qa_data: Path, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("of the service account")
    words = ["--model_name_or_path", micro_model, "--dataset_name", qa_data, "--output_dir", tmp_path / "run"]
    words += ["--max_steps", 2, "--max_length", 64, "--save_strategy", "no"]
    job = {
        "KUBEFLOW_TRAINER_SERVER_URL": f"http://127.0.0.1:{controller.server_address[1]}/status",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
    }
    launcher.run(*words, env=job)
    assert {path for path, _ in controller.given} == {"/status"}
    percent = [content["trainerStatus"]["progressPercentage"] for _, content in controller.given]
    assert (percent[0], percent[-1]) == (0, 100)


def test_a_run_that_goes_on_and_is_preempted_says_what_is_left_and_not_that_it_is_done(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from podtune.sft.train.job_status import JobStatus

    (tmp_path / "token").write_text("of the service account")
    url = f"http://127.0.0.1:{controller.server_address[1]}/status"
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", url)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    status = JobStatus()
    state = TrainerState(max_steps=100, global_step=80, is_world_process_zero=True)
    status.on_train_begin(None, state, None)
    status._began_s -= 10  # for the two steps that follow
    status._last_update_time = 0.0
    state.global_step = 82
    status.on_step_end(None, state, None)
    status.on_train_end(None, state, None)
    _, (_, last) = controller.given
    assert last["trainerStatus"]["progressPercentage"] == 82
    assert last["trainerStatus"]["estimatedRemainingSeconds"] == pytest.approx(90, abs=5)


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
