"""Ties between ``podtune launch`` and the ranks that it starts: they end with it, and note how they end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from podtune.run.errors import OK, PEER_LOST

LAUNCHER = "PODTUNE_LAUNCHER"  # podtune launch's process
ENDS = "PODTUNE_ENDS"  # its folder in which ranks note a good end
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def follow_launcher(env: Mapping[str, str] = os.environ) -> None:
    """Let this rank die with its launcher: without it nobody would end the rank, or learn its exit code."""
    if LAUNCHER not in env or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.kill(int(env[LAUNCHER]), 0)
    except (ProcessLookupError, ValueError):  # it died before
        os._exit(PEER_LOST)


def note_end(code: int, env: Mapping[str, str] = os.environ) -> int:
    """Note a good end for the launcher, from which a signal that comes now would hide it; return ``code``."""
    if ENDS in env and code == OK:
        with contextlib.suppress(OSError):
            (Path(env[ENDS]) / f"{env.get('LOCAL_RANK')}-of-{env.get('LOCAL_WORLD_SIZE')}").touch()
    return code


def all_ended_well(folder: Path) -> bool:
    """True if every rank of this pod has noted a good end."""
    names = [path.name.partition("-of-") for path in folder.iterdir()]
    return bool(names) and all(len(names) == int(size) for _, _, size in names)
