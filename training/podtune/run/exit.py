"""The exit of a program: a failure as a sentence and a code, and no wait for ever."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

from podtune.run.errors import (
    PEER_LOST,
    PeerLost,
    UserError,
    out_of_memory,
    out_of_space,
    report,
    terminate_log,
)
from podtune.run.world import World

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


def end_now(message: str, code: int = PEER_LOST) -> NoReturn:
    """Say why, and end the process without unwinding: something in it may never come back."""
    print(f"podtune: error: {message}", file=sys.stderr, flush=True)
    terminate_log(message, code)
    os._exit(code)


@contextlib.contextmanager
def bounded(limit_s: float, message: str, code: int = PEER_LOST) -> Iterator[None]:
    """End the process with ``message`` if the block takes longer than ``limit_s``."""
    timer = threading.Timer(limit_s, end_now, (message, code))
    timer.daemon = True  # a program that has ended does not wait for it
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def exit_after(error: Exception, world: World) -> int:
    """Report ``error`` and return the exit code; under NCCL end the process with it.

    Nothing is tidied up: peers may sit in a collective, and the launcher ends them.
    """
    reason = (peer_failure(error) if "torch" in sys.modules else None) or error
    code = report(reason, rank=world.rank)
    if world.device_type == "cuda" and world.backend:
        # Python's way out would wait in NCCL for the others
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


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
