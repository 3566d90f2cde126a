"""This process's place in the job: rank, sizes and pod, read from the environment and checked once. No torch.

Only this file, podtune.run.distributed and podtune.run.launcher read the rendezvous environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from podtune.run.errors import ConfigError

GPUS_PER_POD = "PODTUNE_GPUS_PER_POD"  # what the chart promises a pod


@dataclass(frozen=True)
class World:
    """One process's place in the job. Ranks and sizes count processes; node_rank and nnodes count pods."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    nnodes: int = 1
    device_type: str = "cpu"
    backend: str = ""
    master: str = ""

    @property
    def is_main(self) -> bool:
        """True on the one process that writes files, prints and tracks."""
        return self.rank == 0

    @property
    def device(self) -> str:
        """The torch device of this process, ``cuda:1`` or ``cpu``."""
        return f"cuda:{self.local_rank}" if self.device_type == "cuda" else self.device_type

    @property
    def gpu_path(self) -> bool:
        """True where training takes the branch that a GPU takes: on one, or where it is forced."""
        return self.device_type == "cuda" or forced_gpu_path()


def forced_gpu_path() -> bool:
    """True under PODTUNE_FORCE_GPU_PATH=1, by which tests run on a CPU what otherwise only a GPU runs.

    That is the fused head on scored rows, bf16 and activation checkpointing by default, and a verdict on
    non-finite losses that comes one step late.
    """
    return os.environ.get("PODTUNE_FORCE_GPU_PATH") == "1"


def read_world(env: Mapping[str, str] = os.environ) -> World:
    """Parse and check the environment that torchrun sets. Needs no torch.

    Raises:
        UserError: the variables contradict each other, for example a pod started by plain ``python`` under
            the training operator, which would train as many separate models as there are pods.
    """
    # the operator gives every pod RANK and WORLD_SIZE, of pods; LOCAL_RANK is torchrun's alone
    if "LOCAL_RANK" not in env:
        announced = max(_integer(env, "WORLD_SIZE", 1), _integer(env, "PET_NNODES", 1))
        if announced > 1:
            raise ConfigError(
                f"WORLD_SIZE or PET_NNODES is {announced} but LOCAL_RANK is not set: this one was started "
                "by plain python, so every pod would train a model of its own",
                where="environment",
                fix="start it with torchrun, which reads the operator's PET_* variables: torchrun -m "
                "podtune.training ...",
            )
        return World()
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise ConfigError(
            f"LOCAL_RANK is set but {', '.join(missing)} is not",
            where="environment",
            fix="start the program with torchrun",
        )
    rank, size = _integer(env, "RANK", 0), _integer(env, "WORLD_SIZE", 1)
    local_rank, local_size = _integer(env, "LOCAL_RANK", 0), _integer(env, "LOCAL_WORLD_SIZE", size)
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise ConfigError(
            f"RANK {rank}, WORLD_SIZE {size}, LOCAL_RANK {local_rank} and LOCAL_WORLD_SIZE {local_size} "
            f"contradict each other: ranks go from 0 to {size - 1}",
            where="environment",
            fix="do not set them by hand; torchrun sets them",
        )
    return World(
        rank=rank,
        local_rank=local_rank,
        world_size=size,
        local_world_size=local_size,
        # torchrun's names for the node's number, and for how many there are
        node_rank=_integer(env, "GROUP_RANK", rank // local_size),
        nnodes=_integer(env, "GROUP_WORLD_SIZE", max(1, size // local_size)),
        master=f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}",
    )


@dataclass(frozen=True)
class PodPlace:
    """A pod's place in a job, for a program that starts torchrun; ``master_addr`` is the first pod's name."""

    node_rank: int
    nnodes: int
    nproc_per_node: int
    master_addr: str
    master_port: int


def in_pod(env: Mapping[str, str] = os.environ) -> bool:
    """True in a pod of a job, whose log is all that is left when it is gone."""
    return any(env.get(name) for name in ("KUBERNETES_SERVICE_HOST", "PET_NNODES", "PODTUNE_POD_NAME"))


def read_pod(env: Mapping[str, str] = os.environ) -> PodPlace:
    """Read this pod's place from the PET_* variables that the operator sets for torchrun.

    Raises:
        UserError: not a pod of a job, an elastic job (its size may change), or processes a pod not given as a
        number.
    """
    missing = [name for name in ("PET_NNODES", "PET_NPROC_PER_NODE") if not env.get(name)]
    nodes = env.get("PET_NNODES", "")
    if missing or (nodes != "1" and not env.get("PET_MASTER_ADDR")):
        raise ConfigError(
            f"{', '.join(missing) or 'PET_MASTER_ADDR'} is not set: this is not a pod of a job with a fixed "
            "number of pods",
            where="environment",
            fix="let the training operator start it (the chart's mode: benchmark), without elasticPolicy",
        )
    return PodPlace(
        node_rank=_integer(env, "PET_NODE_RANK", 0),
        nnodes=_integer(env, "PET_NNODES", 1),
        nproc_per_node=_integer(env, "PET_NPROC_PER_NODE", 1),
        master_addr=env.get("PET_MASTER_ADDR", "127.0.0.1"),
        master_port=_integer(env, "PET_MASTER_PORT", 29500),
    )


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    """Read a number, of a range such as an elastic job's 2:4 the first."""
    try:
        return int(env.get(name, "").partition(":")[0] or default)
    except ValueError:
        raise ConfigError(f"{name} is {env[name]!r}, not a number", where="environment") from None


def promised_gpus() -> int:
    """Number of GPUs that the chart promised this pod, 0 where it promised none."""
    return _integer(os.environ, GPUS_PER_POD, 0)
