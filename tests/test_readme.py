"""The README's commands work as pasted: what can run here runs, in their order; of the rest, every word is
known.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {  # why a command of the README is not run here
    "doctor --cluster": "needs a cluster",
    "dry-run": "tests/cluster/dry_run/test_dry_run.py runs dry runs",
    "helm install": "needs a cluster; tests/cluster/real",
    "watch my-run": "needs a cluster",
    "bench run": "minutes; tests/bench/strategies runs them",
    "bench report": "needs the sweep before it",
    "podtune aim-ui": "a server; tests/run/aim/test_ui.py starts it",
}


def commands() -> list[str]:
    """The commands of the README's blocks, one string each, comments and continuation lines resolved."""
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [
        part.strip()
        for line in lines
        for part in re.sub(r"\s+# .*", "", line).split("&&")
        if part.strip() and not part.startswith("make ")
    ]


def reason(command: str) -> str | None:
    return next((why for words, why in ELSEWHERE.items() if words in command), None)


@pytest.mark.timeout(1500)
def test_the_commands_that_can_run_here_run_in_their_order(tmp_path: Path) -> None:
    for name in ("deploy", "charts", "training"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    ran = []
    for command in commands():
        if reason(command):
            continue
        words = shlex.split(command)
        if "train" in words:  # the same, but short
            words += ["--max_steps", "20", "--eval_steps", "20", "--answer_rows", "4"]
        done = subprocess.run(
            words,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, "PATH": f"{sys.prefix}/bin:/usr/bin:/bin"},
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        ran.append(command)
    assert len(ran) >= 8
    for made in ("run/final/model.safetensors", "run/loss.png", "aim/.aim"):
        assert (tmp_path / "work" / made).exists(), made
    assert (tmp_path / "compare.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    "command", [command for command in commands() if reason(command) and "bin/podtune" in command]
)
def test_of_the_others_every_option_is_known(command: str) -> None:
    words = shlex.split(command)[1:]
    names = words[: next((index for index, word in enumerate(words) if word.startswith("-")), len(words))]
    path = names[: 2 if names[0] in ("bench", "data", "model") else 1]
    help_text = subprocess.run(
        [sys.prefix + "/bin/podtune", *path, "--help"], capture_output=True, text=True, timeout=60
    ).stdout
    for word in words:
        if word.startswith("-"):
            assert word.split("=")[0] in help_text, f"{word} in {command}"
