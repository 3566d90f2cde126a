"""How many threads a process computes with on the CPU. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from podtune.machine.provenance import usable_cpus
from podtune.run.distributed import World


def cpu_threads(world: World, env: Mapping[str, str] = os.environ) -> int:
    """This process's share of the CPUs that the pod may use, at least 1; the user's OMP_NUM_THREADS where it
    is set.

    More threads than cores wait for each other and can halve the speed. torchrun sets OMP_NUM_THREADS to 1 by
    itself when it starts several processes, which nobody chose: that is not taken for the user's word.
    """
    chosen = env.get("OMP_NUM_THREADS", "")
    if chosen.isdigit() and int(chosen) > 0 and not (chosen == "1" and world.local_world_size > 1):
        return int(chosen)
    return max(1, usable_cpus() // world.local_world_size)
