"""This CPU is measured once, kept for the user, and a step's time follows from what was measured."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from podtune.plan import calibration
from podtune.plan.calibration import SECTIONS, Calibration, Curve, at, calibrate, calibration_path
from podtune.plan.hardware import Hardware, link_row
from podtune.plan.layout import DATA_PARALLEL
from podtune.plan.models import shape_of
from podtune.plan.plan import Plan, estimate
from podtune.run.errors import UNAVAILABLE, UserError


def found(seconds: float = 1e-9) -> dict[str, Any]:
    """What the probe writes for two processes."""
    operations: dict[str, Curve] = {name: [[0, 0, seconds]] for name in SECTIONS["operations"]}
    return {
        "alone": operations,
        "together": operations,
        "machinery": {name: [[0, 0, 1e-3]] for name in SECTIONS["machinery"]},
        "copies": {name: [[0, 0, 1e-9]] for name in SECTIONS["copies"]},
        "messages": {name: [[0, 1e-4, seconds]] for name in SECTIONS["messages"]},
    }


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, int]]:
    """The (processes, threads) that were measured; nothing is, in truth."""
    calls: list[tuple[int, int]] = []

    def measure(processes: int, threads: int) -> dict[str, Any]:
        calls.append((processes, threads))
        return found()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "_measure", measure)
    return calls


def test_a_machine_is_measured_once_for_each_count_of_processes_and_threads(
    measured: list[tuple[int, int]], tmp_path: Path
) -> None:
    first = calibrate(2)
    assert calibration_path() == tmp_path / "cache" / "podtune" / "cpu.json"
    assert calibrate(2) == first
    calibrate(1, 2)
    calibrate(2)
    assert measured == [(2, 1), (1, 2)]
    calibrate(2, anew=True)
    assert measured == [(2, 1), (1, 2), (2, 1)]


BAD_ROWS: list[Any] = [[0, 0], [0, math.nan, 1], [0, -1, 1], [0, 1, 0], [0, "1", 1], [0, True, 1], None]


@pytest.mark.parametrize("row", BAD_ROWS)
def test_a_figure_that_cannot_be_is_measured_anew(measured: list[tuple[int, int]], row: Any) -> None:
    calibrate(2)
    content = json.loads(calibration_path().read_text())
    content["entries"]["2x1"]["together"]["gelu"] = [row]
    calibration_path().write_text(json.dumps(content))
    calibrate(2)
    calibrate(2)
    assert measured == [(2, 1), (2, 1)]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"schema": 1}', '{"schema": 0}', "\x00\xff", "[" * 100_000]
)
def test_a_damaged_or_foreign_file_is_measured_anew(measured: list[tuple[int, int]], text: str) -> None:
    calibration_path().parent.mkdir(parents=True)
    calibration_path().write_text(text, encoding="latin-1")
    calibrate(2)
    calibrate(2)
    assert measured == [(2, 1)]


@pytest.mark.parametrize(
    "changed", [{"schema": -1}, {"key": None}, {"entries": []}, {"entries": {"2x1": {"measured_at": ""}}}]
)
def test_a_file_with_a_part_that_is_none_of_ours_is_measured_anew(
    measured: list[tuple[int, int]], changed: dict[str, Any]
) -> None:
    calibrate(2)
    content = json.loads(calibration_path().read_text())
    calibration_path().write_text(json.dumps(content | changed))
    calibrate(2)
    assert measured == [(2, 1), (2, 1)]


@pytest.mark.parametrize(("fact", "value"), [("cpu_model", "another CPU"), ("usable_cpus", 977)])
def test_another_cpu_or_limit_is_measured_anew(
    measured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, fact: str, value: Any
) -> None:
    calibrate(2)
    monkeypatch.setattr(calibration, fact, lambda: value)
    calibrate(2)
    assert measured == [(2, 1), (2, 1)]


def test_without_a_folder_to_keep_it_the_plan_goes_on_and_says_so(
    measured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(
        "XDG_CACHE_HOME", str(tmp_path / "file")
    )  # no folder can be made there, by root neither
    kept = calibrate(2)
    assert kept.said.startswith("not kept: ")
    assert kept.messages["send"][0][2] > 0
    assert measured == [(2, 1)]


def test_a_probe_that_fails_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="measuring this CPU failed") as error:
        calibrate(2)
    assert error.value.code == UNAVAILABLE
    assert not calibration_path().exists()


def test_between_two_sizes_figures_follow_the_logarithm_and_beyond_them_the_nearest() -> None:
    curve = [[100.0, 1.0, 4.0], [10_000.0, 3.0, 8.0]]
    assert at(1000, curve) == pytest.approx((2.0, 6.0))
    assert at(1, curve) == (1.0, 4.0)
    assert at(100, curve) == (1.0, 4.0)
    assert at(1e9, curve) == (3.0, 8.0)


def planned(strategy: str, world_size: int, own: Curve | None = None, **operations: float) -> Plan:
    """Of a machine on which only ``operations`` take time (seconds a unit), half of it for a process alone;
    messages take 1 ms and 1e-9 s a byte. ``own`` is what a strategy adds, if that was measured, and then
    1e-9 s a byte of weights.
    """
    curves: dict[str, Curve] = {
        name: [[0, 0, operations.get(name.replace(" ", "_"), 0.0)]] for name in SECTIONS["operations"]
    }
    alone = {name: [[0, 0, rows[0][2] / 2]] for name, rows in curves.items()}
    messages: dict[str, Curve] = {name: [[0, 1e-3, 1e-9]] for name in SECTIONS["messages"]}
    machinery = {} if own is None else {strategy: own}
    copies: dict[str, Curve] = {strategy: [[0, 0, 1e-9]]} if strategy in DATA_PARALLEL else {}
    measured = Calibration(min(world_size, 2), 1, alone, curves, machinery, copies, messages, "", "")
    cpu = Hardware("cpu", 8.0, {"fp32": 1.0}, 1.0, "loopback", "", shared=True, calibration=measured)
    shape = shape_of("tinygpt-test")
    return estimate(
        shape,
        strategy=strategy,
        world_size=world_size,
        precision="fp32",
        batch_size=8,
        hardware=cpu,
        nodes=1,
    )


def seconds(strategy: str, world_size: int, **operations: float) -> float:
    step = planned(strategy, world_size, **operations).step_time_s
    assert step is not None
    return step


def test_products_and_attention_take_the_flops_of_the_formula() -> None:
    plan = planned("single", 1, linear_fp32=1e-9, attention=1e-9)
    assert plan.step_time_s == pytest.approx(plan.flops_per_step * 1e-9)
    gelu = 4 * 8 * 128 * 512  # layers, rows, tokens, width of the MLP
    assert seconds("single", 1, gelu=1e-9) == pytest.approx(gelu * 1e-9)
    assert seconds("single", 1, adamw=1e-9) == pytest.approx(plan.parameters * 1e-9)


def test_two_processes_share_the_work_and_pay_for_their_messages() -> None:
    one = seconds("single", 1, linear_fp32=1e-9)
    ddp = planned("ddp", 2, linear_fp32=1e-9)
    assert ddp.compute_time_s == pytest.approx(one / 2)
    assert ddp.communication_time_s == pytest.approx(1e-3 + 4 * ddp.parameters * 1e-9)
    assert ddp.step_time_s == pytest.approx(one / 2 + 1e-3 + 4 * ddp.parameters * 1e-9)
    gpipe = planned("pipeline-gpipe", 2, linear_fp32=1e-9)
    assert gpipe.communication_time_s is not None
    # two layers and the head, which is a third of one, are the longer stage
    assert gpipe.step_time_s == pytest.approx(one * 7 / 13 * 9 / 8 + gpipe.communication_time_s)
    naive = planned("naive-mp", 2, linear_fp32=1e-9)
    assert naive.communication_time_s is not None
    # one works at a time, and finds the machine idle
    assert naive.step_time_s == pytest.approx(one / 2 + naive.communication_time_s)


@pytest.mark.parametrize(
    ("strategy", "units"),  # blocks, tensors, turns of eight micro-batches
    [("tensor", 4), ("ddp", 68), ("zero2", 68), ("pipeline-1f1b", 9)],
)
def test_a_strategy_pays_for_its_own_code_and_the_latency_of_its_messages_in_it(
    strategy: str, units: int
) -> None:
    plan = planned(strategy, 2, own=[[0, 0.25, 0.5]])
    copied = 1e-9 * 4 * plan.parameters if strategy in DATA_PARALLEL else 0.0
    assert plan.compute_time_s == pytest.approx(0.25 + 0.5 * units + copied)
    sent = sum(each["message_bytes"] for each in plan.communication)
    assert plan.communication_time_s == pytest.approx(1e-9 * sent)


def test_more_processes_than_cores_take_turns() -> None:
    assert planned("ddp", 4, gelu=1e-9).compute_time_s == pytest.approx(seconds("single", 1, gelu=1e-9) / 2)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "podtune.cli", "bench", "plan", *arguments], capture_output=True, text=True
    )


def test_the_command_measures_this_cpu_once_and_shows_with_what_it_reckons(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ("--model", "tinygpt-test", "--hardware", "cpu", "--precision", "fp32", "--world-size", "2")
    first = command(*arguments)
    assert first.returncode == 0, first.stderr
    assert "measuring this CPU with 2 processes" in first.stderr
    assert str(calibration_path()) in first.stdout
    assert "GFLOP/s in fp32" in first.stdout
    again = command(*arguments, "--json")
    assert again.stderr == ""
    assert all(plan["step_time_s"] > 0 for plan in json.loads(again.stdout)["plans"])
    assert link_row("loopback").bandwidth > 1e6


def test_measuring_anew_is_refused_for_hardware_that_is_not_here() -> None:
    refused = command("--model", "tinygpt-test", "--hardware", "H100", "--calibrate")
    assert refused.returncode == 2
    assert "--hardware cpu" in refused.stderr
