"""The benchmark on one GPU: precision and parity of every strategy, and a known model's speed (15, 16)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.launch import free_port


def cell(folder: Path, *words: object) -> dict[str, Any]:
    """One measured cell under torchrun with one rank; its record."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    command += ["--master-port", str(free_port()), "-m", "podtune.benchmark", "--output", str(folder)]
    done = subprocess.run([*command, *map(str, words)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    record: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return record


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp-grad-op", "zero2", "zero3"])
def test_every_strategy_in_bf16_has_the_losses_of_one_process(strategy: str, tmp_path: Path) -> None:
    words = ("--model", "tinygpt-test", "--precision", "bf16", "--steps", 5, "--warmup", 2, "--repeats", 1)
    record = cell(tmp_path, "--strategy", strategy, *words)
    assert record["measurements"]["parity"]["status"] in ("ok", "skipped")


def test_zero_computes_in_the_precision_that_it_names(tmp_path: Path) -> None:
    """In fp32 it would take several times as long as ddp."""
    times = {}
    for strategy in ("ddp", "zero2", "zero3"):
        words = ("--model", "tinygpt-124m", "--precision", "bf16", "--steps", 5, "--repeats", 1)
        record = cell(tmp_path / strategy, "--strategy", strategy, "--global-batch-size", 16, *words)
        times[strategy] = record["measurements"]["step_time_s"]["p50"]
    assert max(times["zero2"], times["zero3"]) < 1.5 * times["ddp"], times


@pytest.mark.parametrize(
    ("words", "least"),
    [(("--precision", "bf16"), 380e3), (("--precision", "bf16", "--compile"), 500e3)],
    ids=["eager", "compiled"],
)
def test_gpt2_124m_reaches_its_speed_on_an_h200(words: tuple[str, ...], least: float, tmp_path: Path) -> None:
    import torch

    if "H200" not in torch.cuda.get_device_name():
        pytest.skip("the figure is an H200's")
    record = cell(
        tmp_path, "--model", "tinygpt-124m", "--strategy", "single", "--global-batch-size", 32, *words
    )
    measured = record["measurements"]
    assert measured["tokens_per_s"] >= least
    expected = measured["flops_per_token"] * measured["tokens_per_s"] / 989.4e12
    assert measured["mfu"] == pytest.approx(expected, rel=0.01)
