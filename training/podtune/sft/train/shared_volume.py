"""The output volume of a job: one for all pods (ReadWriteMany), or one for each."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from podtune.run.errors import ConfigError
from podtune.run.world import World

SEEN_S = 5.0  # until a file on a shared volume is seen by all pods


def find_shared_volume(output_dir: Path, world: World) -> tuple[bool, str]:
    """Find out if all pods see the same ``output_dir``; also return a token of this start.

    Every pod leaves a file there and looks for those of the others. A collective call.

    Raises:
        ConfigError: some pods share the folder and others do not.
    """
    token = secrets.token_hex(4)
    if world.nnodes == 1:
        return True, token
    words: list[Any] = [token]
    dist.broadcast_object_list(words)
    token, nodes = words[0], range(world.nnodes)
    signs = [output_dir / f".{token}.{node}.part" for node in nodes]
    if world.local_rank == 0:
        output_dir.mkdir(parents=True, exist_ok=True)
        signs[world.node_rank].touch()
    numbers: list[Any] = [None] * world.world_size
    dist.all_gather_object(numbers, output_dir.stat().st_ino)
    # one folder has one number on every pod; two folders may have the same
    seen, end = set(nodes), time.monotonic() + (SEEN_S if len(set(numbers)) == 1 else 0.5)
    while world.local_rank == 0 and time.monotonic() < end:
        names = {path.name for path in output_dir.iterdir()}
        seen = {node for node in nodes if signs[node].name in names}
        if len(seen) == world.nnodes:
            break
        time.sleep(0.1)
    answers: list[Any] = [None] * world.world_size
    dist.all_gather_object(answers, (world.node_rank, world.local_rank, seen))
    signs[world.node_rank].unlink(missing_ok=True)
    views = {node: view for node, local_rank, view in answers if local_rank == 0}
    complete = {node: view == set(nodes) for node, view in views.items()}
    alone = all(complete[node] or view == {node} for node, view in views.items())
    if not alone or len(set(complete.values())) > 1:
        raise ConfigError(
            "some of the pods share the output volume and others do not",
            where=str(output_dir),
            fix="one ReadWriteMany volume for all pods, or one of its own for each",
        )
    return all(complete.values()), token
