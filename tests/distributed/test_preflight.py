"""Preflight by two pods: they agree on one verdict, and it names the pod that is to blame."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launch import free_port


def pods(
    folder: Path, configs: list[str], *, ranks: tuple[int, ...] = (0, 1), timeout_s: int = 30
) -> tuple[list[int], list[dict[str, Any]]]:
    """Exit codes and verdicts of the pods with ``ranks`` out of two, one process each, as the operator would set them up."""
    (folder / "output").mkdir()
    shared = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    started = []
    for rank in ranks:
        config = folder / f"config-{rank}.yaml"
        config.write_text(configs[rank] + f"\noutput_dir: {folder / 'output'}\n")
        words = [sys.executable, "-m", "training.cli", "preflight", "--json", "--config", str(config), "--timeout", str(timeout_s)]
        env = {**os.environ, **shared, "PET_NODE_RANK": str(rank), "PODTUNE_POD_NAME": f"pod-{rank}", "OUTPUT_DIR": str(folder / "output")}
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
    ended = [(*process.communicate(timeout=120), process.returncode) for process in started]
    assert all(out for out, _, _ in ended), [error for _, error, _ in ended]
    return [code for *_, code in ended], [json.loads(out.splitlines()[-1]) for out, *_ in ended]


def test_two_pods_that_fit_agree_and_measure_an_all_reduce(tmp_path: Path) -> None:
    codes, (one, other) = pods(tmp_path, ["max_steps: 1", "max_steps: 1"])
    assert codes == [0, 0], one
    assert one == other
    assert one["measured"]["all_reduce"]["bus_gb_per_s"] > 0
    assert [facts["pod"] for facts in one["pods"]] == ["pod-0", "pod-1"]


def test_another_configuration_on_one_pod_is_named_by_both(tmp_path: Path) -> None:
    codes, (one, other) = pods(tmp_path, ["max_steps: 1", "max_steps: 2"])
    assert codes == [65, 65], one
    assert one["sentence"] == other["sentence"]
    assert any("config" in problem["text"] or "config" in problem["check"] for problem in one["problems"]), one


@pytest.mark.parametrize("present", [0, 1])
def test_a_pod_that_never_comes_is_missed_within_the_time(present: int, tmp_path: Path) -> None:
    started = time.monotonic()
    codes, (verdict,) = pods(tmp_path, ["", ""], ranks=(present,), timeout_s=6)
    assert codes == [69], verdict
    assert time.monotonic() - started < 45  # six seconds, and the import of torch on a busy machine
    assert not verdict["ok"]
