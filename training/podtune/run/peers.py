"""Faults of other ranks, of the network and of a broken GPU, told from those of this process's own job."""

from __future__ import annotations

import socket

from podtune.run.errors import PeerLost, UserError, out_of_memory, out_of_space

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
    """``error`` as a :class:`PeerLost` if a restart, perhaps on another node, may mend it.

    That is a dead, hung or unreachable rank, or a GPU that broke. None for everything else, full memory and
    full /dev/shm included, which NCCL reports in its own words: they are full in every attempt.
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
