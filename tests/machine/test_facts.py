"""Each process computes with its share of the CPUs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from podtune.machine.facts import (
    CORES,
    cpu_threads,
    gpu_reading,
    memory,
    memory_limit,
    shared_memory,
    usable_cpus,
)
from podtune.run.world import World

TWO_RANKS = World(local_world_size=2, world_size=2)


def test_one_process_takes_every_usable_cpu() -> None:
    assert cpu_threads(World(), {}) == usable_cpus()


def test_ranks_share_the_cpus_and_get_at_least_one_each() -> None:
    assert cpu_threads(TWO_RANKS, {}) == max(1, usable_cpus() // 2)
    assert cpu_threads(World(local_world_size=10_000, world_size=10_000), {}) == 1


def test_the_users_word_counts_but_torchruns_default_of_one_does_not() -> None:
    assert cpu_threads(World(), {"OMP_NUM_THREADS": "1"}) == 1
    assert cpu_threads(TWO_RANKS, {"OMP_NUM_THREADS": "3"}) == 3
    assert cpu_threads(TWO_RANKS, {"OMP_NUM_THREADS": "1"}) == cpu_threads(TWO_RANKS, {})


def test_pods_that_share_a_node_share_its_cores_whatever_their_limits_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CORES, "1")
    assert usable_cpus() == 1
    for chosen in ({}, {"OMP_NUM_THREADS": "2"}):  # the second: of the pod's limit, by the chart
        assert cpu_threads(World(), {CORES: "1", **chosen}) == 1


def test_a_metric_that_the_driver_does_not_tell_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def no_power(device: str) -> int:
        raise RuntimeError("Not Supported")

    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 42)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda device: 2**31)
    monkeypatch.setattr(torch.cuda, "power_draw", no_power)
    assert gpu_reading("cuda:1") == {"gpu_utilisation_percent": 42.0, "gpu_memory_gib": 2.0}


def test_memory_and_shared_memory_are_those_of_this_machine(tmp_path: Path) -> None:
    assert 0 < memory() <= memory_limit()
    assert shared_memory(tmp_path) == shutil.disk_usage(tmp_path).total
    assert shared_memory(tmp_path / "absent") is None
