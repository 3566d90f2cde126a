"""What a start took, from its launcher to the first step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.launch import Launcher

from podtune.report.runs.runs import load_run
from podtune.report.runs.watch import facts

RANK = """
from podtune.run.start_phases import begin, durations, phase_ended
begin()
phase_ended("imports")
print(*durations())
"""


def test_a_ranks_phases_go_on_from_its_launchers() -> None:
    code = "import subprocess, sys; from podtune.run.start_phases import *; begin(); phase_ended('prepare'); "
    code += "phase_ended('preflight'); hand_on(); subprocess.run([sys.executable, '-c', sys.argv[1]])"
    done = subprocess.run([sys.executable, "-c", code, RANK], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["prepare", "preflight", "imports"]
    alone = subprocess.run([sys.executable, "-c", RANK], capture_output=True, text=True, check=True)
    assert alone.stdout.split() == ["imports"]


def test_a_run_says_what_its_first_step_waited_for(
    micro_model: Path, qa_data: Path, launcher: Launcher, tmp_path: Path
) -> None:
    words = ["--model_name_or_path", micro_model, "--dataset_name", qa_data, "--max_steps", 1]
    output = launcher.run(*words, "--output_dir", tmp_path)
    measured = json.loads((tmp_path / "run.json").read_text())["measurements"]
    assert list(measured["start_s"]) == ["imports", "data", "model", "step"]
    assert abs(sum(measured["start_s"].values()) - measured["time_to_first_step_s"]) < 0.2
    (line,) = [line for line in output.splitlines() if line.startswith("first step done after")]
    assert dict(facts(load_run(tmp_path)))["start"] == line
