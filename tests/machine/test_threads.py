"""Each process computes with its share of the CPUs."""

from __future__ import annotations

from podtune.machine.provenance import usable_cpus
from podtune.machine.threads import cpu_threads
from podtune.run.distributed import World

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
