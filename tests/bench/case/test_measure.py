"""The instruments of the benchmark, and what becomes of a cell that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from podtune.bench.case.command_line import read_options
from podtune.bench.case.communication import sent_bytes
from podtune.bench.case.loop import measure
from podtune.bench.case.measure import Telemetry
from podtune.bench.case.parity import compare_losses
from podtune.bench.case.profiling import exposed_seconds
from podtune.bench.case.run import CaseRun
from podtune.bench.options import Options
from podtune.bench.strategies import deepspeed_zero
from podtune.run.errors import UserError
from podtune.run.world import World

FP32 = Options(model="tinygpt-test", strategy="ddp")


@pytest.mark.parametrize(
    ("collective", "ranks", "expected"),
    [
        ("all_reduce", 2, 100),
        ("all_reduce", 4, 150),
        ("all_gather", 4, 75),
        ("reduce_scatter", 4, 75),
        ("reduce", 2, 50),
        ("send", 2, 100),
    ],
)
def test_bytes_sent_are_those_of_the_ring(collective: str, ranks: int, expected: float) -> None:
    assert sent_bytes(collective, 100, ranks) == expected


def test_communication_is_exposed_where_nothing_is_computed() -> None:
    def event(name: str, start: float, duration: float, **more: object) -> dict[str, object]:
        return {"ph": "X", "name": name, "ts": start, "dur": duration, **more}

    on_cpu = [
        event("gloo:all_reduce", 0, 10),
        event("aten::mm", 4, 2),
        event("aten::mm", 5, 20),
        event("c10d::allreduce_", 0, 30),
    ]
    assert exposed_seconds(on_cpu) == pytest.approx(4e-6)
    on_gpu = [
        event("ncclDevKernel_AllReduce", 0, 10, cat="kernel"),
        event("gemm", 7, 9, cat="kernel"),
        event("aten::mm", 0, 99),
    ]
    assert exposed_seconds(on_gpu) == pytest.approx(7e-6)


def test_telemetry_of_a_short_run_is_one_look() -> None:
    with Telemetry("cpu") as telemetry:
        pass
    assert telemetry.means()["host_rss_gib"] > 0


@pytest.mark.parametrize(("precision", "status"), [("fp32", "failed"), ("bf16", "ok")])
def test_a_difference_is_a_failure_beyond_the_tolerance(precision: str, status: str) -> None:
    options = replace(FP32, precision=precision)  # type: ignore[arg-type]
    assert compare_losses([2.0, 1.0], [2.0, 1.001], options, World()).status == status
    assert compare_losses([2.0, float("nan")], [2.0, 1.0], options, World()).status == "failed"
    assert compare_losses([2.0, 1.0], [2.0, float("nan")], options, World()).status == "failed"


def test_batch_norm_over_a_split_batch_leaves_parity_undefined() -> None:
    options = replace(FP32, norm="batch")
    found = compare_losses([2.0], [1.0], options, World(world_size=2))
    assert found.status == "undefined"
    assert found.reason is not None
    assert "batch norm" in found.reason
    assert compare_losses([2.0], [1.0], options, World()).status == "failed"


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_channels_lie_together_where_the_norm_keeps_them_so(norm: str) -> None:
    """On a GPU group norm puts images out channel by channel, whatever it is given."""
    words = ["--model", "resnet18-cifar", "--strategy", "single", "--norm", norm, "--cpu"]
    options, size, _ = read_options(words, World())
    run = CaseRun(options, size, World())
    images = run.laid_out(torch.zeros(2, 3, 8, 8))
    assert images.is_contiguous(memory_format=torch.channels_last) == (norm == "batch")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_deepspeed_takes_the_device_of_the_case_whatever_the_environment_says(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    seen = []

    def stop() -> None:
        seen.append(os.environ["DS_ACCELERATOR"])
        raise ImportError

    monkeypatch.setattr(deepspeed_zero, "deepspeed_that_builds_nothing", stop)
    with pytest.raises(UserError, match="DeepSpeed cannot be imported"):
        deepspeed_zero._import_deepspeed(World(device_type=device))
    assert seen == [device]


def test_without_parity_there_is_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podtune.bench.case.loop.reference_losses", lambda run: [6.0] * 5)
    words = ["--model", "tinygpt-test", "--strategy", "single", "--sequence-length", "16"]
    words += ["--global-batch-size", "2", "--steps", "1"]
    options, size, _ = read_options(words, World())
    found = measure(CaseRun(options, size, World()))
    assert found.parity is not None
    assert found.parity.status == "failed"
    assert not {"step_time_s", "tokens_per_s", "mfu"} & set(found.to_json())


def test_running_out_of_memory_is_a_result_with_what_was_held(tmp_path: Path) -> None:
    cell = [sys.executable, "-m", "podtune.benchmark", "--model", "tinygpt-test", "--strategy", "single"]
    words = ["--cpu", "--skip-parity", "--global-batch-size", "8192", "--steps", "1", "--repeats", "1"]
    words += ["--warmup", "0", "--output", str(tmp_path)]
    limited = ["bash", "-c", 'ulimit -v 9000000; exec "$@"', "cell", *cell, *words]
    done = subprocess.run(limited, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=600)
    assert done.returncode == 71, done.stderr[-2000:]
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["status"] == "oom"
    assert record["measurements"]["held_at_oom"]["parameters_gib"] > 0
    assert "--activation-checkpointing full" in done.stderr
