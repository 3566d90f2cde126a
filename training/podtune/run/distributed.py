"""The process group: who am I among how many, opened with bounds and closed so that a good run exits 0.

The only file that reads the rendezvous environment or opens and closes the process group. :func:`read_world`
needs no torch and checks the environment before anything expensive starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from podtune.run.errors import (
    OK,
    PEER_LOST,
    ConfigError,
    PeerLost,
    Unavailable,
    UserError,
    out_of_memory,
    out_of_space,
    terminate_log,
)

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 600.0
LAUNCHER = "PODTUNE_LAUNCHER"  # podtune launch's process
ENDS = "PODTUNE_ENDS"  # its folder in which ranks note a good end
SLACK_S = 30.0  # for what has no bound of its own, beyond timeout_s
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
GPUS_PER_POD = "PODTUNE_GPUS_PER_POD"  # what the chart promises a pod


@dataclass(frozen=True)
class World:
    """One process's place in the job. Ranks and sizes count processes, not pods, except node_rank and
    nnodes.
    """

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
    """True under PODTUNE_FORCE_GPU_PATH=1, by which tests run on a CPU what otherwise only a GPU runs: the
    fused head on scored rows, bf16 and activation checkpointing by default, verdicts one step late.
    """
    return os.environ.get("PODTUNE_FORCE_GPU_PATH") == "1"


def read_world(env: Mapping[str, str] = os.environ) -> World:
    """Parse and check the environment that torchrun sets. Needs no torch.

    Raises:
        UserError: the variables contradict each other, for example a pod started by plain ``python`` under
            the training operator, which would train as many separate models as there are pods.
    """
    if "LOCAL_RANK" not in env:
        claimed = _integer(env, "WORLD_SIZE", 1)
        if claimed > 1:
            raise ConfigError(
                f"WORLD_SIZE is {claimed} but LOCAL_RANK is not set: the operator (or you) announced "
                f"{claimed} processes "
                "and this one was started by plain python, so every pod would train a model of its own",
                where="environment",
                fix="start it with torchrun, which reads the operator's PET_* variables: torchrun -m "
                "podtune.training ...",
            )
        if _integer(env, "PET_NNODES", 1, first_of_range=True) > 1:
            raise ConfigError(
                f"PET_NNODES is {env['PET_NNODES']} but the program was started by plain python",
                where="environment",
                fix="start it with torchrun, which reads PET_*: torchrun -m podtune.training ...",
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
    if not 0 <= rank < size:
        raise ConfigError(
            f"RANK is {rank} but WORLD_SIZE is {size}: ranks go from 0 to {size - 1}",
            where="environment",
            fix="do not set RANK or WORLD_SIZE by hand; torchrun sets them",
        )
    if not 0 <= local_rank < local_size or local_size > size:
        raise ConfigError(
            f"LOCAL_RANK {local_rank}, LOCAL_WORLD_SIZE {local_size} and WORLD_SIZE {size} contradict each "
            "other",
            where="environment",
            fix="do not set them by hand; torchrun sets them",
        )
    return World(
        rank=rank,
        local_rank=local_rank,
        world_size=size,
        local_world_size=local_size,
        node_rank=_integer(env, "GROUP_RANK", rank // local_size),
        nnodes=_integer(env, "GROUP_WORLD_SIZE", max(1, size // local_size)),
        master=f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}",
    )


@dataclass(frozen=True)
class PodPlace:
    """A pod's place in a job, for a program that starts torchrun itself. ``master_addr`` is the first pod's
    name.
    """

    node_rank: int
    nnodes: int
    nproc_per_node: int
    master_addr: str
    master_port: int


def in_pod(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this is a pod of a job, whose log is all that is left when it is gone."""
    return any(env.get(name) for name in ("KUBERNETES_SERVICE_HOST", "PET_NNODES", "PODTUNE_POD_NAME"))


def read_pod(env: Mapping[str, str] = os.environ) -> PodPlace:
    """What the operator tells torchrun of this pod, in PET_* variables. Needs no torch.

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


def _integer(env: Mapping[str, str], name: str, default: int, *, first_of_range: bool = False) -> int:
    value = env.get(name, "")
    text = value.split(":")[0] if first_of_range else value
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is {value!r}, not a number", where="environment") from None


def follow_launcher(env: Mapping[str, str] = os.environ) -> None:
    """Let this rank die with the launcher that started it: without it nobody would end it, or know its
    code.
    """
    if LAUNCHER not in env or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.kill(int(env[LAUNCHER]), 0)
    except (ProcessLookupError, ValueError):  # it died before
        os._exit(PEER_LOST)


def note_end(code: int, env: Mapping[str, str] = os.environ) -> int:
    """Tell the launcher how this rank ends, which a signal that comes now would hide from it; returns
    ``code``.
    """
    if ENDS in env and code == OK:
        with contextlib.suppress(OSError):
            (Path(env[ENDS]) / f"{env.get('LOCAL_RANK')}-of-{env.get('LOCAL_WORLD_SIZE')}").touch()
    return code


def all_ended_well(folder: Path) -> bool:
    """Whether every rank of this pod has noted a good end."""
    names = [path.name.partition("-of-") for path in folder.iterdir()]
    return bool(names) and all(len(names) == int(size) for _, _, size in names)


def setup_distributed(timeout_s: float = DEFAULT_TIMEOUT_S, *, use_cpu: bool = False) -> World:
    """Open the default process group and return this process's :class:`World`.

    A single process without torchrun opens none. ``timeout_s`` bounds the rendezvous and every collective; it
    is passed here, before accelerate looks, because accelerate drops it on the CPU. A CPU never stands in for
    GPUs that were promised and cannot be used: that is an error.

    Raises:
        UserError: the environment contradicts itself, or there are too few GPUs that CUDA can open.
        PeerLost: the others did not arrive within ``timeout_s``; says whom this process waited for.
    """
    import torch
    import torch.distributed as dist

    world = read_world()
    device_type = "cpu" if use_cpu else _device_type()
    if device_type == "cuda":
        if world.local_rank >= torch.cuda.device_count():
            raise Unavailable(
                f"local rank {world.local_rank} has no GPU: {world.local_world_size} processes were started "
                "on this node, "
                f"which shows {torch.cuda.device_count()} GPUs",
                where=socket.gethostname(),
                fix="make nprocPerNode (--nproc-per-node) equal to the GPUs of one pod",
            )
        torch.cuda.set_device(world.local_rank)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    world = World(
        **{
            **world.__dict__,
            "device_type": device_type,
            "backend": backend if "LOCAL_RANK" in os.environ else "",
        }
    )
    if "LOCAL_RANK" not in os.environ or dist.is_initialized():
        return world
    device_id = torch.device(world.device) if device_type == "cuda" else None
    timeout = datetime.timedelta(seconds=timeout_s)
    met = f"rank {world.rank} of {world.world_size} has not met the others at {world.master}"
    try:
        with _bounded(timeout_s + SLACK_S, met):
            dist.init_process_group(
                backend, timeout=timeout, device_id=device_id, **_store_of_a_restart(world, timeout)
            )
            # a first collective, so that a bad network shows here and not after the model is loaded
            dist.barrier()
    except Exception as error:
        raise PeerLost(
            f"rank {world.rank} of {world.world_size} on {socket.gethostname()} could not meet the others at "
            f"{world.master} "
            f"within {timeout_s:.0f} s: {str(error).splitlines()[0][:300]}\n"
            "  likely: a pod that never started, a name that does not resolve, a closed port, or the wrong "
            "network interface "
            "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)"
        ) from error
    return world


@contextlib.contextmanager
def _bounded(limit_s: float, what: str) -> Iterator[None]:
    """End the process if the block takes longer: NCCL makes and closes its communicators without a bound."""

    def end() -> None:
        message = f"{what} within {limit_s:.0f} s"
        print(f"podtune: error: {message}", file=sys.stderr, flush=True)
        terminate_log(message, PEER_LOST)
        os._exit(PEER_LOST)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _device_type() -> str:
    """``cuda`` where it works, ``cpu`` where no GPU is expected.

    Raises:
        UserError: fewer usable GPUs than the pod was promised (PODTUNE_GPUS_PER_POD), or devices that CUDA
            cannot open, with torch's own reason; the same job on the CPU would take a thousand times as long.
    """
    import torch

    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    promised = promised_gpus()
    # a GPU that is hidden on purpose is not expected
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    devices = 0 if hidden else len(list(Path("/dev").glob("nvidia[0-9]*")))
    if usable < promised or (devices and not usable):
        count = promised or devices
        there = f"promised to this pod ({GPUS_PER_POD})" if promised else "on this machine"
        raise Unavailable(
            f"{count} GPU{'s' if count > 1 else ''} {there}, and CUDA can use {usable or 'none'}: "
            f"{why_no_cuda()}",
            where=socket.gethostname(),
            fix="podtune doctor looks at driver and devices; or ask for the CPU: --use_cpu (--cpu)",
        )
    return "cuda" if usable else "cpu"


def promised_gpus() -> int:
    """GPUs that whoever started this pod says it has, 0 where nothing is said."""
    return _integer(os.environ, GPUS_PER_POD, 0)


def why_no_cuda() -> str:
    """Torch's own reason why CUDA cannot be used, on one line; ``torch.cuda.is_available`` swallows it."""
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())[:300]
    return "the others are hidden (CUDA_VISIBLE_DEVICES)"


def _store_of_a_restart(world: World, timeout: datetime.timedelta) -> dict[str, Any]:
    """Arguments for init_process_group in a group of processes that torchrun has started again.

    Its agent keeps one store for all attempts, and torch reads the addresses of the ranks before out of it: a
    prefix keeps them apart.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    import torch.distributed as dist

    c10d: Any = dist  # torch's type hints do not export the stores
    host, _, port = world.master.rpartition(":")
    store = c10d.TCPStore(host, int(port), world.world_size, is_master=False, timeout=timeout)
    return {
        "store": c10d.PrefixStore(f"podtune/attempt-{attempt}", store),
        "rank": world.rank,
        "world_size": world.world_size,
    }


def cleanup_distributed() -> None:
    """Close the process group after success. Never call it after a failure: peers may sit in a collective.

    Model and optimizer must be unreachable by now: gloo's threads end badly (exit code 134) when DDP's
    reducer outlives the group, hence the collection first.
    """
    import torch.distributed as dist

    gc.collect()
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        with _bounded(SLACK_S, "the process group has not closed"):
            dist.destroy_process_group()


def on_main(world: World, function: Callable[[], T]) -> T:
    """Run ``function`` on rank 0 and give every rank its result, or its UserError (a collective call).

    So a fault that only rank 0 can see ends all ranks with one message, not one rank with it and the others
    in a timeout.
    """
    import torch.distributed as dist

    answer: list[Any] = [None, None]
    if world.is_main:
        try:
            answer[0] = function()
        except UserError as error:
            answer[1] = error
    if world.world_size > 1:
        dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    result: T = answer[0]
    return result


# How CUDA says that this GPU is broken: the same job runs on another one. The words of
# cudaGetErrorString and of NVML.
BROKEN_GPU = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "unspecified launch failure",
    "hardware stack error",
    "busy or unavailable",
    "fallen off the bus",
    "GPU is lost",
    "CUDA error: unknown error",
)
PEER_SIGNS = (
    "Connection closed by peer",
    "Connection reset",
    "Timed out waiting",
    "Broken pipe",
    "NCCL",
    "wait timeout",
    "collective operation",
)


def peer_failure(error: BaseException) -> PeerLost | None:
    """``error`` as a :class:`PeerLost` if a restart (elsewhere) may mend it: a dead, hung or unreachable
    rank, or a GPU that broke.

    None for everything else, full memory and full /dev/shm included, of which NCCL tells in its own words:
    they are full in every attempt.
    """
    if isinstance(error, PeerLost):
        return error
    import torch.distributed as dist

    text = str(error)
    if isinstance(error, UserError) or out_of_memory(error) or out_of_space(error):
        return None
    if isinstance(error, RuntimeError) and any(sign in text for sign in BROKEN_GPU):
        return PeerLost(f"a GPU of {socket.gethostname()} failed: {text.splitlines()[0][:300]}")
    if isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in PEER_SIGNS)
    ):
        return PeerLost(f"another rank died or stopped answering: {text.splitlines()[0][:300]}")
    return None
