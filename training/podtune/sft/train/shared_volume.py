"""The output volume of a job: one for all pods (ReadWriteMany), or one for each."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from podtune.run.world import World

SEEN_S = 5.0  # until a file on a shared volume is seen by all pods


def find_shared_volume(output_dir: Path, world: World) -> bool:
    """Find out if all pods see the same ``output_dir``. A collective call.

    Every pod leaves a file there and looks for those of the others.
    """
    if world.nnodes == 1:
        return True
    words: list[Any] = [secrets.token_hex(4)]
    dist.broadcast_object_list(words)
    signs = [output_dir / f".{words[0]}.{node}.part" for node in range(world.nnodes)]
    if world.local_rank == 0:
        output_dir.mkdir(parents=True, exist_ok=True)
        signs[world.node_rank].touch()
    numbers: list[Any] = [None] * world.world_size
    dist.all_gather_object(numbers, output_dir.stat().st_ino)
    # one folder has one number on every pod; two folders may have the same
    end = time.monotonic() + (SEEN_S if len(set(numbers)) == 1 else 0.5)
    wanted = {sign.name for sign in signs}
    while not (complete := wanted <= {path.name for path in output_dir.iterdir()}) and time.monotonic() < end:
        time.sleep(0.1)
    answers: list[Any] = [None] * world.world_size
    dist.all_gather_object(answers, complete)
    signs[world.node_rank].unlink(missing_ok=True)
    return all(answers)
