"""What ``podtune skill`` tells an agent to type works as it stands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from support.run_folders import RunMaker

from podtune.cli import COMMANDS, load
from podtune.commands.skill import TEXT

ROOT = Path(__file__).parents[1]
LINES = re.findall(r"^(podtune .*)$", TEXT.read_text(), re.MULTILINE)
INLINE = re.findall(r"`(podtune [a-z][^`]*)`", TEXT.read_text())
# tests/test_readme.py runs the same lines, on the same data
IN_THE_README = ("data build", "model build", "train", "generate")
# minutes, or a network: their options are held against the help here, and they run in the tests named
ELSEWHERE = {"dry-run": "tests/cluster/dry_run", "sweep": "tests/sweep/test_trials.py"}


def typed(line: str) -> Result:
    words = shlex.split(line)[1:]
    return CliRunner().invoke(load(words[0]), words[1:], catch_exceptions=False)


def test_it_is_short_and_printed_by_the_command() -> None:
    assert len(TEXT.read_text().splitlines()) <= 150
    assert typed("podtune skill").stdout == TEXT.read_text()


def test_every_line_that_can_run_here_runs_in_its_order(
    qa_data: Path, micro_model: Path, make_run: RunMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    (work / "data").symlink_to(qa_data)
    (work / "model").symlink_to(micro_model)
    for name, rate in (("run", 1e-3), ("other", 3e-4)):
        make_run(f"work/{name}", learning_rate=rate)
    said = {}
    for line in LINES:
        command = line.removeprefix("podtune ")
        if command.startswith((*IN_THE_README, *ELSEWHERE)):
            continue
        ended = typed(line)
        assert ended.exit_code == 0, f"{line}\n{ended.output}"
        said[command.split()[0]] = ended.stdout
        if command.startswith("render"):
            (work / "manifests.yaml").write_text(ended.stdout)
    assert {"doctor", "data", "bench", "model", "runs", "watch", "compare", "init", "lint"} <= set(said)
    compared = json.loads(said["compare"])
    assert {"verdict", "answers"} <= set(compared)
    assert said["bench"].splitlines()[-1].startswith("Take ")


@pytest.mark.parametrize("line", [*LINES, *INLINE])
def test_every_word_is_known(line: str) -> None:
    words = shlex.split(line)[1:]
    assert words[0] in COMMANDS
    command = load(words[0])
    if isinstance(command, click.Group):
        command = command.commands[words[1]]
    if getattr(command, "ignore_unknown_options", False) or words[0] in ("lint", "train"):
        return  # these pass their options on
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known
