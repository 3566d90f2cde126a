"""The README's commands work as pasted: what can run here runs, in their order; of the rest, every word is
known.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import Launcher

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
def test_the_commands_that_can_run_here_run_in_their_order(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first fine-tune as it is pasted; the rest with the imports of torch done."""
    for name in ("deploy", "charts", "training"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin:/usr/bin:/bin")
    short = ["--max_steps", "20", "--eval_steps", "20", "--answer_rows", "4"]
    ran, trained = 0, 0
    for command in commands():
        if reason(command):
            continue
        program, *words = shlex.split(command)
        ran, trained = ran + 1, trained + (words[0] == "train")
        if words[0] != "train":
            code, out, err = launcher.podtune(*words).end(600)
            assert code == 0, f"{command}\n{out[-1500:]}\n{err[-1500:]}"
        elif trained == 1:
            done = subprocess.run([program, *words, *short], capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, f"{command}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        else:
            assert words[1:3] == ["-n", "2"]
            launcher.run(*words[3:], *short, ranks=2)
    assert (ran >= 8, trained) == (True, 2)
    for made in ("run/final/model.safetensors", "run/loss.png", "other/final", "aim/.aim"):
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
