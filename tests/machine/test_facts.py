"""Each process computes with its share of the CPUs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from podtune.machine.facts import (
    CORES,
    Gpus,
    cpu_threads,
    gpus,
    memory,
    memory_limit,
    shared_memory,
    too_old,
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


def test_a_driver_is_held_against_the_cuda_that_torch_was_built_for() -> None:
    assert too_old("570.86.10", "13.0") == "580.65"
    assert (too_old("580.65.06", "13.0"), too_old("580.95", "12.8"), too_old("580.95", "")) == ("", "", "")


def test_without_a_gpu_nothing_is_counted_and_nothing_is_wrong() -> None:
    if not list(Path("/dev").glob("nvidia*")):
        assert (gpus().count, gpus().error) == (0, "")
    silent = Gpus(devices=2, error="NVML does not answer: Driver Not Loaded")
    assert (silent.count, Gpus(devices=2).count) == (0, 2)  # the second: no library to ask


def test_memory_and_shared_memory_are_those_of_this_machine(tmp_path: Path) -> None:
    assert 0 < memory() <= memory_limit()
    assert shared_memory(tmp_path) == shutil.disk_usage(tmp_path).total
    assert shared_memory(tmp_path / "absent") is None
