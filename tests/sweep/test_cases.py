"""A sweep is checked before it starts, leaves a record for every case, and goes on where it was stopped."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from podtune.run.collect import collect
from podtune.run.errors import UserError
from podtune.sweep import case_runner, processes
from podtune.sweep.case_runner import CaseRunner
from podtune.sweep.cases import CaseSweep, Expansion, expand, preset, preset_names, read_sweep

TINY = {"steps": 1, "warmup": 0, "repeats": 1, "cpu": True, "timeout_s": 60}
TINY |= {"sequence_length": 16, "global_batch_size": 4}
RUN = [sys.executable, "-m", "podtune.cli", "bench", "run"]


def sweep_file(path: Path, **content: Any) -> Path:
    path.write_text(
        yaml.safe_dump({"models": ["tinygpt-test"], "strategies": ["single"], "options": TINY, **content})
    )
    return path


def cells_of(tmp_path: Path, **content: Any) -> Expansion:
    return expand(read_sweep(sweep_file(tmp_path / "sweep.yaml", **content)))


def test_every_combination_is_one_cell(tmp_path: Path) -> None:
    found = cells_of(tmp_path, strategies=["ddp", "fsdp"], world_sizes=[1, 2], precisions=["fp32", "bf16"])
    assert len(found.cases) == 8
    assert len({case.name for case in found.cases}) == 8
    assert found.cases[0].options.steps == 1


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_expands_and_names_what_cannot_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podtune.sweep.cases.visible_gpus", lambda: 8)
    found = expand(read_sweep(preset(name)), nodes=4, nproc_per_node=8)
    assert found.cases
    assert all(
        any(name in case for name in ("tensor", "single", "pipeline", "naive", "zero3"))
        for case in found.impossible
    ), found.impossible
    if name != "smoke":  # what a GPU gains by compiling is measured beside what it does without
        assert {case.options.compile for case in found.cases if "tinygpt" in case.options.model} == {
            False,
            True,
        }


def test_smoke_has_every_strategy_on_both_models_at_one_and_two_processes() -> None:
    from podtune.bench.strategies.table import STRATEGIES

    found = expand(read_sweep(preset("smoke")))
    there = {(case.options.model, case.options.strategy, case.world.world_size) for case in found.cases}
    for model in ("tinygpt-test", "resnet18-cifar"):
        for strategy in STRATEGIES:
            for world_size in (1, 2):
                impossible = (
                    (strategy == "single" and world_size == 2)
                    or (strategy == "tensor" and model == "resnet18-cifar")
                    or "+" in strategy  # several groups of several: from four processes on
                )
                assert ((model, strategy, world_size) in there) is not impossible, (
                    model,
                    strategy,
                    world_size,
                )


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ({"strategies": ["ddpp"]}, "did you mean 'ddp'"),
        ({"models": ["tinygpt-tset"]}, "did you mean 'tinygpt-test'"),
        ({"modles": ["x"]}, "did you mean 'models'"),
        ({"options": {"step": 3}}, "did you mean 'steps'"),
        ({"world_sizes": [0]}, "positive number"),
        ({"timeout_per_cell_s": "soon"}, "positive number"),
        ({"strategies": ["tensor"], "world_sizes": [3]}, "3 processes do not divide the 4 attention heads"),
        ({"strategies": ["ddp"], "world_sizes": [3]}, "use 6 or 3 rows"),
        ({"per_model": {"resnet50": {"steps": 1}}}, "unknown model 'resnet50'"),
        ({"launch": "mpirun"}, "torchrun or fork"),
        ({"precisions": ["fp33"]}, "fp33"),
    ],
)
def test_a_wrong_sweep_is_answered_before_anything_starts(
    content: dict[str, Any], wanted: str, tmp_path: Path, capfd: Any
) -> None:
    with pytest.raises((UserError, SystemExit)) as refusal:
        cells_of(tmp_path, **content)
    assert wanted in str(refusal.value) + capfd.readouterr().err


def test_impossible_cells_are_skipped_by_name_only_where_the_sweep_allows(tmp_path: Path) -> None:
    found = cells_of(
        tmp_path,
        strategies=["ddp", "tensor"],
        models=["tinygpt-test", "resnet18-cifar"],
        skip_impossible=True,
        options={},
    )
    assert list(found.impossible) == ["resnet18-cifar.tensor.w1.fp32"]
    with pytest.raises(UserError, match="cases cannot be"):
        cells_of(tmp_path, strategies=["ddp", "tensor"], models=["resnet18-cifar"], options={})


def test_more_processes_than_gpus_are_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podtune.sweep.cases.visible_gpus", lambda: 1)
    with pytest.raises(UserError, match="need 2 GPUs and it shows 1"):
        cells_of(tmp_path, strategies=["ddp"], world_sizes=[2], options={**TINY, "cpu": False})


def test_the_key_changes_with_arguments_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = cells_of(tmp_path).cases[0]
    other = cells_of(tmp_path, options={**TINY, "seed": 1}).cases[0]
    assert one.key != other.key
    before = one.key
    monkeypatch.setattr("podtune.sweep.cases.code_hash", lambda: "other code")
    assert one.key != before


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[str]]:
    """A real sweep of three cases: its folder, what it printed, and its progress lines."""
    folder = tmp_path_factory.mktemp("swept")
    path = sweep_file(
        folder / "sweep.yaml",
        strategies=["single", "ddp"],
        world_sizes=[1, 2],
        skip_impossible=True,
        launch="fork",
    )
    printed, lines = io.StringIO(), []
    sweep = read_sweep(path)
    states = CaseRunner(sweep, expand(sweep), folder / "out", say=lines.append, emit=printed).run()
    assert set(states.values()) == {"ok"}, lines
    return folder, printed.getvalue(), lines


def test_a_sweep_writes_a_record_a_cell_into_the_folder_and_between_the_markers(
    swept: tuple[Path, str, list[str]],
) -> None:
    folder, printed, lines = swept
    in_folder = [json.loads(path.read_text()) for path in sorted((folder / "out/cells").glob("*/run.json"))]
    assert len(in_folder) == 3
    assert all(
        record["status"] == "ok" and record["measurements"]["parity"]["status"] == "ok"
        for record in in_folder
    )
    assert {record["world_size"] for record in in_folder} == {1, 2}
    collected = collect(printed.splitlines(keepends=True))
    assert sorted(collected.records, key=lambda record: record["name"]) == in_folder
    assert json.loads((folder / "out/sweep.json").read_text())["impossible"]
    assert any("left" in line for line in lines)


def test_a_finished_cell_is_kept_and_a_changed_one_is_measured_again(
    swept: tuple[Path, str, list[str]],
) -> None:
    folder, _, _ = swept
    before = {path: path.stat().st_mtime_ns for path in (folder / "out/cells").glob("*/run.json")}
    single = next(path for path in before if "single" in str(path))
    (single.parent / "cell.json").write_text('{"key": "of other code"}')
    sweep = read_sweep(folder / "sweep.yaml")
    states = CaseRunner(sweep, expand(sweep), folder / "out", say=lambda line: None).run()
    assert sorted(states.values()) == ["kept", "kept", "ok"]
    changed = [path for path, time_ns in before.items() if path.stat().st_mtime_ns != time_ns]
    assert changed == [single]


def test_the_report_of_a_real_sweep_has_its_page_pictures_and_advice(
    swept: tuple[Path, str, list[str]],
) -> None:
    folder, _, _ = swept
    command = [sys.executable, "-m", "podtune.cli", "bench", "report", str(folder / "out"), "--json"]
    said = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert sum(len(comparison["cells"]) for comparison in said["comparisons"]) == 3
    ddp = next(
        case
        for one in said["comparisons"]
        for case in one["cells"]
        if (case["strategy"], case["world_size"]) == ("ddp", 2)
    )
    assert ddp["bytes_per_step"] == pytest.approx(ddp["bytes_per_step_formula"], rel=0.01)
    assert (folder / "out/report.html").stat().st_size > 10_000


def test_a_cell_that_hangs_or_dies_has_a_record_and_the_next_one_runs(
    swept: tuple[Path, str, list[str]], tmp_path: Path
) -> None:
    sweep = read_sweep(
        sweep_file(
            tmp_path / "s.yaml",
            strategies=["ddp"],
            world_sizes=[2],
            options={**TINY, "steps": 10**7},
            launch="fork",
            timeout_per_cell_s=4,
        )
    )
    lines: list[str] = []
    states = CaseRunner(sweep, expand(sweep), tmp_path / "out", say=lines.append).run()
    assert set(states.values()) == {"error"}
    record = json.loads(next((tmp_path / "out/cells").glob("*/run.json")).read_text())
    assert record["status"] == "error"
    assert "hang: not done after" in record["reason"]
    assert record["strategy"] == "ddp"
    assert record["world_size"] == 2


def test_every_process_of_a_torchrun_cell_is_ended_at_its_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    monkeypatch.setattr(case_runner, "START_S", 0.0)
    path = sweep_file(
        tmp_path / "s.yaml", strategies=["ddp"], world_sizes=[2], options={**TINY, "steps": 10**7}
    )
    sweep = replace(read_sweep(path), timeout_per_cell_s=8.0)
    states = CaseRunner(sweep, expand(sweep), tmp_path / "out", say=print).run()
    assert set(states.values()) == {"error"}
    record = json.loads(next((tmp_path / "out/cells").glob("*/run.json")).read_text())
    assert "hang: not done after" in record["reason"]
    left = [
        one
        for one in psutil.process_iter(["cmdline"])
        if str(tmp_path / "out") in " ".join(one.info["cmdline"] or [])
    ]
    assert left == []


def test_ctrl_c_ends_the_cell_keeps_what_is_done_and_says_how_to_go_on(tmp_path: Path) -> None:
    path = sweep_file(tmp_path / "s.yaml", options={**TINY, "steps": 10**7}, launch="fork")
    command = [*RUN, "--sweep", str(path), "--output", str(tmp_path / "out")]
    log = tmp_path / "out/cells/tinygpt-test.single.w1.fp32"
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stderr is not None
            assert "tinygpt-test.single" in process.stderr.readline()  # the case has begun
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "the same command resumes" in said
    assert not (log / "run.json").exists()
    assert json.loads((tmp_path / "out/sweep.json").read_text())["cells"] == {
        "tinygpt-test.single.w1.fp32": "not run"
    }


def test_two_pods_of_a_job_run_the_same_cells_together(tmp_path: Path) -> None:
    """What the operator sets in each pod; rank 0's pod writes, and a case of one process leaves the other pod
    out.
    """
    path = sweep_file(tmp_path / "s.yaml", strategies=["ddp"], world_sizes=[1, 2])
    port = processes.free_port()
    pods = []
    for node_rank in (0, 1):
        env = {
            **os.environ,
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "1",
            "PET_NODE_RANK": str(node_rank),
            "OMP_NUM_THREADS": "1",
        }
        env |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
        command = [*RUN, "--in-job", "--sweep", str(path), "--output", str(tmp_path / "out")]
        pods.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        outputs = [pod.communicate(timeout=200) for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    first, second = (collect(output.splitlines(keepends=True)) for output, _ in outputs)
    assert sorted(
        (record["strategy"], record["world_size"], record["nnodes"]) for record in first.records
    ) == [
        ("ddp", 1, 1),
        ("ddp", 2, 2),
    ]
    assert second.records == []


def test_outside_a_job_in_job_is_refused() -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("PET_")}
    command = [*RUN, "--in-job", "--preset", "smoke", "--output", "/nowhere"]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 78
    assert "PET_NNODES" in result.stderr


def test_an_unwritable_output_and_an_unknown_preset_are_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sweep = CaseSweep(models=("tinygpt-test",), strategies=("single",))
    with pytest.raises(UserError, match="cannot write there"):
        CaseRunner(sweep, expand(sweep), tmp_path / "file").run()
    with pytest.raises(UserError, match="did you mean 'smoke'"):
        preset("smok")
    start = time.perf_counter()
    with pytest.raises(UserError, match="no such file"):
        read_sweep(tmp_path / "none.yaml")
    assert time.perf_counter() - start < 1


def test_the_ranks_of_a_sweep_that_was_killed_end_too(tmp_path: Path) -> None:
    import psutil

    path = sweep_file(tmp_path / "s.yaml", options={**TINY, "steps": 10**7}, launch="fork")
    command = [*RUN, "--sweep", str(path), "--output", str(tmp_path / "out")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            log = tmp_path / "out/cells/tinygpt-test.single.w1.fp32/log.txt"
            family: list[psutil.Process] = []
            while len(family) < 3:  # the fork server, the resource tracker, and the rank that it forked
                assert process.poll() is None, log.read_text()
                family = psutil.Process(process.pid).children(recursive=True)
                time.sleep(0.05)
        finally:
            process.kill()
    _, left = psutil.wait_procs(family, timeout=60)
    assert left == []
