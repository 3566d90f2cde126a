"""The record of a run survives restarts and says what it cannot say."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from podtune.machine.provenance import provenance
from podtune.run.metrics_log import MetricsLog, read_metrics
from podtune.run.record import (
    CUDA_PEAK,
    Communication,
    Losses,
    Measurements,
    MemoryPeaks,
    Summary,
    end_record,
    finite,
    new_record,
    write_json,
)
from podtune.run.summary import summary_lines
from podtune.run.world import World, in_pod
from podtune.sft.train.meter import Meter
from podtune.sft.train.progress import Progress


def test_a_resumed_metrics_file_has_one_line_for_each_step_and_split(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsLog(path)
    for step in (1, 2, 3):
        first.write("train", step, {"loss": float(step)})
    first.close()
    with path.open("a") as file:
        file.write('{"time": "torn')
    resumed = MetricsLog(path, from_step=2)
    resumed.write("train", 2, {"loss": 99.0})
    resumed.write("train", 3, {"loss": 3.5})
    resumed.close()
    assert [(entry["step"], entry["loss"]) for entry in read_metrics(path)[0]] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.5),
    ]


def test_a_record_with_nan_is_still_json_and_says_nan(tmp_path: Path) -> None:
    record = end_record(new_record(mode="sft", name="r", config={}), "error", 65, "loss is NaN")
    record["measurements"] = {"loss": {"last": float("nan")}}
    write_json(tmp_path / "run.json", record)
    assert json.loads((tmp_path / "run.json").read_text())["measurements"]["loss"]["last"] == "nan"
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_both_programs_mean_the_same_by_a_step_time() -> None:
    """The sample standard deviation and the interpolated 95th percentile."""
    meter = Meter(World())
    progress = Progress(Path(), meter, World(rank=1, world_size=2), from_step=0, rows=1)
    progress.step_times = [9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0]  # the first two are left out
    assert progress.measurements().step_time_s == Summary.of([1.0, 2.0, 3.0, 4.0, 5.0])
    repeated = Summary.of([1.0, 2.0, 3.0], [4.0, 5.0])
    assert repeated == replace(progress.measurements().step_time_s, p50_by_repeat=(2.0, 4.5))
    assert (repeated.mean, repeated.p50, repeated.p95, repeated.n) == (3.0, 3.0, pytest.approx(4.8), 5)
    assert repeated.std == pytest.approx(1.5811, abs=1e-4)


def test_one_step_has_no_standard_deviation() -> None:
    assert Measurements(step_time_s=Summary.of([0.5])).to_json() == {
        "step_time_s": {"mean": 0.5, "p50": 0.5, "p95": 0.5, "n": 1}
    }


def test_measurements_come_back_as_they_were_written() -> None:
    measured = Measurements(
        steps=3,
        step_time_s=Summary.of([1.0, 2.0], [3.0]),
        peak_memory_gib=MemoryPeaks(2.0, (2.0, 1.0), CUDA_PEAK),
        communication=Communication(12, {"all_reduce": 12}),
        loss=Losses(first=math.inf, eval=2.0),
    )
    assert Measurements.read({"measurements": json.loads(json.dumps(finite(measured.to_json())))}) == measured


@pytest.mark.parametrize(
    "odd", ["x", [], 1, None, {"steps": "many", "loss": [1], "step_time_s": {"mean": {}}, "mfu": 10**400}]
)
def test_odd_measurements_are_absent(odd: object) -> None:
    assert Measurements.read({"measurements": odd}) == Measurements()


def test_a_broken_line_costs_that_line_and_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(1, 101):
        log.write("train", step, {"loss": 1.0})
    log.close()
    lines = path.read_bytes().split(b"\n")
    lines[9] = lines[9].replace(b"train", b"tr\0in")
    lines[20], lines[30] = b'{"step": 1e999, "split": "train"}', b"[" * 10_000
    path.write_bytes(b"\n".join(lines))
    entries, broken = read_metrics(path)
    assert (len(entries), broken) == (97, [10, 21, 31])
    resumed = MetricsLog(path, from_step=80)
    assert len(resumed.kept) == 77
    assert f"{path}: lines that cannot be read are dropped: 10, 21, 31" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["KUBERNETES_SERVICE_HOST", "PET_NNODES", "PODTUNE_POD_NAME"])
def test_only_a_pod_prints_its_record_for_whoever_has_its_log(name: str) -> None:
    assert in_pod({name: "1"})
    assert not in_pod({"PATH": "/bin"})


def test_the_command_of_a_run_names_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import podtune

    program = Path(podtune.__file__).with_name("training.py")
    monkeypatch.setattr(sys, "argv", [str(program), "--config", "sft.yaml"])
    assert provenance()["command"] == ["podtune.training", "--config", "sft.yaml"]


def test_the_first_loss_is_the_whole_runs_also_after_starts_that_were_killed(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step, loss in ((1, 6.94), (2, 6.5)):
        log.write("train", step, {"loss": loss})
    log.write("eval", 2, {"loss": 6.6})  # and killed: no run.json tells of them
    resumed = Progress(tmp_path, Meter(World()), World(), from_step=2, rows=8)
    assert resumed.measurements().loss == Losses(first=6.94, last=6.5, eval_first=6.6, eval=6.6)


@pytest.mark.parametrize("terminal", [True, False])
def test_in_a_terminal_every_step_is_seen_and_the_next_line_is_written_over_it(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meter = Meter(World())
    meter.step_began = 0.0
    progress = Progress(tmp_path, meter, World(), from_step=0, rows=8)
    progress.time_to_first_step_s = 1.0
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    progress.on_step_end(
        TrainingArguments(output_dir=str(tmp_path)),
        TrainerState(global_step=7, max_steps=1200),
        TrainerControl(),
    )
    assert capsys.readouterr().out == ("step 7 of 1,200\r" if terminal else "")


def test_a_run_ends_with_the_answers_of_base_and_tuned_model() -> None:
    record = new_record(mode="sft", name="run", config={}) | {"reason": ""}
    answers = {"rows": 400, "base": {"exact_match": 0.0}, "tuned": {"exact_match": 0.905}}
    record["measurements"] = {"answers": answers | {"most_frequent_answer": 0.31}}
    expected = (
        "answers 0.0% -> 90.5% of 400 held-out rows exactly right; the most frequent answer alone: 31.0%"
    )
    assert expected in summary_lines(record, Path("run"))
    record["measurements"] = {"answers": {"rows": 3, "base": {"loss": 1.0}, "tuned": {"loss": 0.5}}}
    assert not [line for line in summary_lines(record, Path("run")) if line.startswith("answers")]
