"""Freed memory of a CPU run, given back to the system, so that resident memory stays flat.

Each batch has another length, so each step asks for tensors of other sizes. glibc keeps what is freed for the
next tensor that fits, and few fit: resident memory climbs for hundreds of steps although nothing leaks. (What
oneDNN keeps for each shape it has met is bounded in :func:`podtune.training.before_imports`.)
"""

from __future__ import annotations

import ctypes
from typing import Any

import psutil
from transformers import TrainerCallback

MICRO_BATCHES = 10  # between two looks: trimming after each took a tenth of the time, after ten a hundredth
GROWN = 32 * 2**20  # resident bytes since the last time that are worth it


class GiveBack(TrainerCallback):  # type: ignore[misc]
    """Trims the C library's heap now and then; does nothing where that is not glibc's."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._process = psutil.Process()
        self._seen, self._least = 0, 0
        self.times = 0

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """After each micro-batch but a step's last."""
        self._seen += 1
        if self._trim is None or self._seen % MICRO_BATCHES:
            return
        if self._process.memory_info().rss > self._least + GROWN:
            self._trim(0)
            self.times += 1
            self._least = self._process.memory_info().rss

    on_step_end = on_substep_end
