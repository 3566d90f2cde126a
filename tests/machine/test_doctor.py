"""podtune doctor says what is wrong with a machine, with the fix, in seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from podtune.machine import doctor
from podtune.machine.checks import Check, Result, exit_code, run_checks
from podtune.run.distributed import why_no_cuda

ROOT = Path(__file__).parents[2]
NAMES = ["gpu", "/dev/shm", "output", "compiler"]


def podtune_doctor(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "podtune.cli", "doctor", *words]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **env},
        timeout=120,
    )


def test_every_check_has_one_line_and_a_sound_machine_passes(tmp_path: Path) -> None:
    done = podtune_doctor("--output-dir", str(tmp_path), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    names = [check["name"] for check in said["checks"]]
    assert names == NAMES
    assert said["state"] in ("ok", "warn")
    by_name = {check["name"]: check for check in said["checks"]}
    assert "GiB free" in by_name["output"]["found"]
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_an_output_folder_that_cannot_be_written_is_a_failure_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = doctor.output(tmp_path / "file" / "run")
    assert found.state == "fail"
    assert "cannot be written" in found.found
    assert "output_dir" in found.fix
    assert exit_code([found]) == 69


def test_a_folder_that_is_not_there_yet_is_looked_at_and_not_made(tmp_path: Path) -> None:
    assert doctor.output(tmp_path / "a" / "b").state in ("ok", "warn")
    assert list(tmp_path.iterdir()) == []


def test_gpus_that_torch_cannot_use_fail_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    monkeypatch.setattr(doctor.facts, "visible_gpus", lambda: 2)
    found = doctor.gpu()
    assert (found.state, exit_code([found])) == ("fail", 69)
    assert found.found == f"there are GPUs, and torch can use none: {why_no_cuda()}"


@pytest.mark.parametrize(
    ("program", "state", "words"),
    [
        ("print(2, '2.13.0+cu130')", "ok", "2, torch 2.13.0+cu130"),
        ("import sys; sys.exit('no module')", "fail", "torch can use none: no module"),
        ("import time; time.sleep(60)", "fail", "does not open them within 1 s"),
    ],
)
def test_torch_is_asked_in_a_process_that_may_break_or_hang(
    program: str, state: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.facts, "visible_gpus", lambda: 2)
    monkeypatch.setattr(doctor, "PROBE", program)
    monkeypatch.setattr(doctor, "GPU_S", 1.0 if "sleep" in program else 30.0)
    found = doctor.gpu()
    assert (found.state, words in found.found) == (state, True), found


def test_what_does_not_answer_is_a_warning_and_holds_nobody_up() -> None:
    ended = threading.Event()
    asked = [
        Check("hangs", lambda: ended.wait(60) and Result("hangs", "ok", ""), "kick it", 0.3),
        Check("compiler", doctor.compiler),
    ]
    started = time.monotonic()
    found = run_checks(asked)
    ended.set()
    assert time.monotonic() - started < 10
    assert found[0] == Result("hangs", "warn", "no answer within 0.3 s", "kick it")
    assert found[1].name == "compiler"


def test_a_check_that_breaks_does_not_take_the_others_with_it() -> None:
    def breaks() -> Result:
        raise RuntimeError("no such ioctl")

    found = run_checks([Check("breaks", breaks), Check("memory", lambda: Result("memory", "ok", "4 GiB"))])
    assert [check.state for check in found] == ["warn", "ok"]
    assert "no such ioctl" in found[0].found


def test_a_cluster_that_is_not_configured_is_one_failing_line(tmp_path: Path) -> None:
    done = podtune_doctor("--cluster", "--output-dir", str(tmp_path), KUBECONFIG=str(tmp_path / "none"))
    lines = [line for line in done.stdout.splitlines() if line.split()[1] == "cluster"]
    assert done.returncode == 69
    assert len(lines) == 1
    assert lines[0].startswith("fail")
    assert "KUBECONFIG" in lines[0]


def test_a_gpu_without_a_c_compiler_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "c_compiler", lambda: None)
    assert doctor.compiler().state != "fail"
    monkeypatch.setattr(doctor.facts, "visible_gpus", lambda: 1)
    assert doctor.compiler().state == "fail"


CORE = """
import sys
sys.modules |= dict.fromkeys(("pynvml", "packaging", "huggingface_hub", "torch"))
sys.argv = ["podtune", "doctor", "--json", "--output-dir", sys.argv[1]]
from podtune.cli import main
main()
"""


def test_without_the_extra_train_nothing_fails_and_no_gpu_is_blamed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CORE, str(tmp_path)], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["gpu"]["state"] == "ok", checks
    assert "no GPU" in checks["gpu"]["found"] or "without torch" in checks["gpu"]["found"]


@pytest.mark.parametrize("content", ["a: b: c\n", "only words\n", "[1, 2]\n"])
def test_a_kubeconfig_that_is_not_one_is_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "config").write_text(content)
    command = [sys.executable, "-m", "podtune.cli", "status", "first"]
    env = {**os.environ, "KUBECONFIG": str(tmp_path / "config")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, "Traceback" in done.stderr) == (66, False), done.stderr
    assert "no cluster is configured" in done.stderr
