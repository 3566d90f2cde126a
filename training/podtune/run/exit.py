"""The exit of a program: a failure as a sentence and a code, the web hook told, and no wait for NCCL."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from podtune.run.errors import report
from podtune.run.peers import peer_failure
from podtune.run.world import World

if TYPE_CHECKING:
    from podtune.run.notify import Notification


def exit_after(error: Exception, world: World, notification: Notification | None) -> int:
    """Report ``error`` and return the exit code; under NCCL end the process with it.

    Nothing is tidied up: peers may sit in a collective, and the launcher ends them.
    """
    reason = (peer_failure(error) if "torch" in sys.modules else None) or error
    code = report(reason, rank=world.rank)
    if notification:
        notification.send(code, reason)
    if world.device_type == "cuda" and world.backend:
        # Python's way out would wait in NCCL for the others
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
