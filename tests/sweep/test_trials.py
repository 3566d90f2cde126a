"""A sweep of fine-tunes: all of it checked first, finished runs kept, bad ones ended by the median."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from support.launch import Launcher

from podtune.cli import load
from podtune.run.errors import UserError
from podtune.run.record import SCHEMA, write_json
from podtune.sweep import runner, trials
from podtune.sweep.case_runner import CaseRunner
from podtune.sweep.cases import CaseSweep, expand

BASE = {"model_name_or_path": "m", "dataset_name": "rows.jsonl", "eval_strategy": "steps"}


def written(folder: Path, **content: Any) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"options": BASE, **content}))
    return path


def test_every_point_of_the_grid_with_every_entry_of_the_list_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("max_steps: 5\nseed: 3\nlearning_rate: 1e-5\n")
    found = trials.read_sweep(
        written(tmp_path, config="sft.yaml", learning_rate=[1e-4, 3e-4], runs=[{"use_peft": True}, {}])
    )
    assert [run.varies for run in found] == [
        {"use_peft": True, "learning_rate": 1e-4},
        {"use_peft": True, "learning_rate": 3e-4},
        {"learning_rate": 1e-4},
        {"learning_rate": 3e-4},
    ]
    assert found[2].content == {"max_steps": 5, "seed": 3, "learning_rate": 1e-4} | BASE
    assert found[2].name.startswith("learning_rate-0.0001_")
    assert len({run.name for run in found}) == 4


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"learning_rat": [1]}, "did you mean 'learning_rate'"),
        ({"learning_rate": 1e-4}, "is not a list"),
        ({"learning_rate": [1e-4, "fast"]}, "not a number"),
        ({"output_dir": ["a", "b"]}, "names its runs and their folders itself"),
        ({"seed": [1, 1]}, "two runs are the same"),
        ({"stop": "median"}, "unknown key 'stop'"),
        ({"processes": 0}, "a number of processes"),
        ({"runs": {"seed": 1}}, "not a list"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    tmp_path: Path, content: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        trials.read_sweep(written(tmp_path, **content))


def test_a_finished_run_is_repeated_only_if_its_configuration_changed(tmp_path: Path) -> None:
    found = trials.read_sweep(written(tmp_path, seed=[0, 1]))
    for run in found:
        (tmp_path / "out" / run.name).mkdir(parents=True)
        write_json(tmp_path / "out" / run.name / "run.json", {"schema": SCHEMA, "status": "ok"})
    sweeper = trials.TrialRunner(found, tmp_path / "out", say=lambda line: None)
    assert list(sweeper.run().values()) == ["kept", "kept"]
    other = trials.read_sweep(written(tmp_path, seed=[0, 2], options=BASE | {"max_steps": 7}))
    assert not {run.name for run in other} & {run.name for run in found}


def test_a_second_sweep_in_a_folder_starts_nothing(tmp_path: Path) -> None:
    cases = CaseSweep(models=("tinygpt-test",), strategies=("single",))
    found = trials.read_sweep(written(tmp_path, seed=[0, 1]))
    with runner.own_folder(tmp_path / "out"):
        for second in (
            trials.TrialRunner(found, tmp_path / "out"),
            CaseRunner(cases, expand(cases), tmp_path / "out"),
        ):
            with pytest.raises(UserError, match="another sweep works here"):
                second.run()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def test_a_run_that_training_refuses_is_said_to_have_failed_and_the_sweep_goes_on(tmp_path: Path) -> None:
    file = written(tmp_path, options=BASE | {"model_name_or_path": str(tmp_path)}, seed=[1, 2])
    ended = CliRunner().invoke(load("sweep"), [str(file), "--output", str(tmp_path / "out"), "--json"])
    assert ended.exit_code == 70, ended.output
    states = json.loads((tmp_path / "out" / "sweep.json").read_text())["runs"]
    assert list(states.values()) == ["failed", "failed"]
    log = (tmp_path / "out" / next(iter(states)) / "log.txt").read_text()
    assert "rows.jsonl: no such file or folder" in log
    assert f"log {tmp_path / 'out' / next(iter(states)) / 'log.txt'}; or: podtune watch" in ended.output


class Forked:
    """A training of the launcher, in the place of a process of its own."""

    def __init__(self, launcher: Launcher, run: trials.Trial, folder: Path) -> None:
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(run.content | {"output_dir": str(folder), "run_name": run.name}))
        self.rank = launcher.start("--config", config).ranks[0]

    def poll(self, wait_s: float) -> int | None:
        self.rank.join(wait_s)
        code: int | None = self.rank.exitcode
        return code

    def end(self) -> None:
        self.rank.terminate()

    leave = end


def test_so_many_runs_as_asked_for_go_on_at_once(tmp_path: Path) -> None:
    goes_on: list[str] = []
    most: list[int] = []

    class Counted:
        def __init__(self, run: trials.Trial, folder: Path) -> None:
            self.name, self.looks = run.name, 0
            goes_on.append(run.name)
            most.append(len(goes_on))

        def poll(self, wait_s: float) -> int | None:
            self.looks += 1
            if self.looks < 3:
                return None
            goes_on.remove(self.name)
            return 0

        def end(self) -> None: ...

        def leave(self) -> None: ...

    found = trials.read_sweep(written(tmp_path, seed=[0, 1, 2, 3, 4]))
    states = trials.TrialRunner(found, tmp_path / "out", Counted, at_once=2, say=lambda line: None).run()
    assert list(states.values()) == ["ok"] * 5
    assert list(states) == [run.name for run in found]
    assert max(most) == 2


def test_a_sweep_trains_every_run_and_compares_them(
    launcher: Launcher, qa_data: Path, micro_model: Path, tmp_path: Path
) -> None:
    options = {
        "model_name_or_path": str(micro_model),
        "dataset_name": str(qa_data / "train.parquet"),
        "max_steps": 2,
        "max_length": 32,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    file = written(tmp_path, options=options, learning_rate=[1e-3, 1e-4])
    found = trials.read_sweep(file)
    sweeper = trials.TrialRunner(found, tmp_path / "out", partial(Forked, launcher), say=print)
    assert list(sweeper.run().values()) == ["ok", "ok"]
    ended = CliRunner().invoke(load("sweep"), [str(file), "--output", str(tmp_path / "out")])
    assert ended.exit_code == 0, ended.output
    states = json.loads((tmp_path / "out" / "sweep.json").read_text())["runs"]
    assert list(states.values()) == ["kept", "kept"]
    page = (tmp_path / "out" / "compare.html").read_text()
    assert all(name in page for name in states)
