"""The process group: opened with bounds, and closed so that a good run exits 0. Nobody else does either."""

from __future__ import annotations

import datetime
import gc
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from podtune.run.errors import PeerLost, Unavailable, UserError, warn
from podtune.run.exit import bounded
from podtune.run.library_environment import ALLOCATOR
from podtune.run.world import GPUS_PER_POD, World, promised_gpus, read_world

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 600.0
NO_SEGMENTS = "expandable_segments:False"
SLACK_S = 30.0  # for what has no bound of its own, beyond timeout_s


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
        _allocate_first(torch.device("cuda", world.local_rank))
    # gloo for what lies on the CPU, flags and objects: NCCL moves nothing from there
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    grouped = "LOCAL_RANK" in os.environ
    world = replace(world, device_type=device_type, backend=backend if grouped else "")
    if not grouped or dist.is_initialized():
        return world
    device_id = torch.device(world.device) if device_type == "cuda" else None
    timeout = datetime.timedelta(seconds=timeout_s)
    # groups that are opened later, as a device mesh's for hsdp, are given no timeout and take 30 minutes
    for default in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(dist.distributed_c10d, default, timeout)
    waited = f"{timeout_s + SLACK_S:.0f} s"
    met = f"rank {world.rank} of {world.world_size} has not met the others at {world.master} within {waited}"
    try:
        with bounded(timeout_s + SLACK_S, met):
            store = _store_of_a_restart(world, timeout)
            # without a store torch reads both from torchrun's environment
            rank, size = (world.rank, world.world_size) if store else (-1, -1)
            dist.init_process_group(
                backend, timeout=timeout, device_id=device_id, store=store, rank=rank, world_size=size
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


def _allocate_first(device: Any) -> None:
    """Allocate on a GPU, in blocks of fixed size where its driver refuses segments that grow (vGPU, WSL2)."""
    import torch

    try:
        torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.memory._set_allocator_settings(NO_SEGMENTS)
        torch.empty(1, device=device)
        os.environ[ALLOCATOR] = NO_SEGMENTS
        warn(f"this GPU's driver refuses memory in segments that grow: {ALLOCATOR}={NO_SEGMENTS} is taken")


def why_no_cuda() -> str:
    """Torch's own reason why CUDA cannot be used, on one line; ``torch.cuda.is_available`` swallows it."""
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())[:300]
    return "the others are hidden (CUDA_VISIBLE_DEVICES)"


def _store_of_a_restart(world: World, timeout: datetime.timedelta) -> Store | None:
    """The store of a group of processes that torchrun has started again, None at the first start.

    Its agent keeps one store for all attempts, and torch reads the addresses of the ranks before out of it: a
    prefix keeps them apart.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    import torch.distributed as dist

    c10d: Any = dist  # torch's type hints do not export the stores
    host, _, port = world.master.rpartition(":")
    store = c10d.TCPStore(host, int(port), world.world_size, is_master=False, timeout=timeout)
    prefixed: Store = c10d.PrefixStore(f"podtune/attempt-{attempt}", store)
    return prefixed


def cleanup_distributed() -> None:
    """Close the process group after success. Never call it after a failure: peers may sit in a collective.

    Model and optimizer must be unreachable by now: gloo's threads end badly (exit code 134) when DDP's
    reducer outlives the group, hence the collection first.
    """
    import torch.distributed as dist

    gc.collect()
    if dist.is_available() and dist.is_initialized():
        dist.barrier()  # rank 0 keeps the store: the others could not close without it
        with bounded(SLACK_S, f"the process group has not closed within {SLACK_S:.0f} s"):
            dist.destroy_process_group()


def on_main(world: World, function: Callable[[], T]) -> T:
    """Run ``function`` on rank 0 and give every rank its result, or its UserError. A collective call.

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
