"""The exit of a program: a failure as a sentence and a code, and no wait for ever."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

from podtune.run.errors import PEER_LOST, report, terminate_log
from podtune.run.peers import peer_failure
from podtune.run.world import World


def end_now(message: str, code: int = PEER_LOST) -> NoReturn:
    """Say why, and end the process without unwinding: something in it may never come back."""
    print(f"podtune: error: {message}", file=sys.stderr, flush=True)
    terminate_log(message, code)
    os._exit(code)


@contextlib.contextmanager
def bounded(limit_s: float, message: str, code: int = PEER_LOST) -> Iterator[None]:
    """End the process with ``message`` if the block takes longer than ``limit_s``."""
    timer = threading.Timer(limit_s, end_now, (message, code))
    timer.daemon = True
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
