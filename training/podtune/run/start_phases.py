"""Phases of a start, from the process that began it to the first step: what a pod's time goes into."""

from __future__ import annotations

import itertools
import json
import os
import time

import psutil

PHASES = "PODTUNE_START_PHASES"  # from podtune launch to its ranks
_times: dict[str, float] = {}  # when the start began, and when each phase ended


def begin() -> None:
    """Begin the phases of this process's start, or go on with those of its launcher."""
    _times.clear()
    # the process was created before Python could look at a clock
    _times.update(json.loads(os.environ.get(PHASES, "{}")) or {"began": psutil.Process().create_time()})


def phase_ended(name: str) -> None:
    """Note that the phase ends now; its first end counts."""
    _times.setdefault(name, time.time())


def hand_on() -> None:
    """Leave the phases to the ranks that are started next."""
    os.environ[PHASES] = json.dumps(_times)


def durations() -> dict[str, float]:
    """Seconds of each phase that has ended, in their order, each from the end of the one before."""
    pairs = itertools.pairwise(_times.items())
    return {name: round(end - before, 3) for (_, before), (name, end) in pairs}


def first_step_line(phases: dict[str, float]) -> str:
    """The line that says after how long the first step was done, and what took it."""
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
    return f"first step done after {sum(phases.values()):.1f} s: {parts}"
