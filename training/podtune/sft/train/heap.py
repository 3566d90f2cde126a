"""The memory that tensors of a CPU run leave behind: kept for the next ones, and given back now and then.

glibc returns a large tensor's memory to the system as soon as it is freed, and the next one's comes page by
page, each filled with zeros: a tenth of the time of a step whose rows are long. What it keeps of smaller
ones, on the other hand, fits few others where each batch has another length: resident memory climbs for
hundreds of steps although nothing leaks. So all of it is kept, for a few steps, and while training lasts.
(What oneDNN keeps for each shape it has met is bounded in :func:`podtune.training.before_imports`.)
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import psutil
from transformers import TrainerCallback

MICRO_BATCHES = 10  # between two looks: trimming after each took a tenth of the time, after ten a hundredth
GROWN = 32 * 2**20  # resident bytes since the last time that are worth it
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # glibc's mallopt()
KEEP = {_TRIM_THRESHOLD: -1, _MMAP_MAX: 0}
USUAL = {_TRIM_THRESHOLD: 128 * 2**10, _MMAP_MAX: 2**16}  # glibc's own


class GiveBack(TrainerCallback):  # type: ignore[misc]
    """Has the C library keep what is freed, and trims its heap now and then; does nothing where that is not
    glibc's. Who sets glibc's own variables has the first of it as they say.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._trim = getattr(self._library, "malloc_trim", None)
        self._chosen = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
        self._process = psutil.Process()
        self._seen, self._least = 0, 0
        self.times = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """From here on what is freed is kept."""
        self._set(KEEP)

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """After each micro-batch but a step's last."""
        self._seen += 1
        if self._seen % MICRO_BATCHES == 0 and self._process.memory_info().rss > self._least + GROWN:
            self._give_back()

    on_step_end = on_substep_end

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Nothing is kept for what comes after training, nor of it."""
        self._set(USUAL)
        self._give_back()

    def _set(self, values: dict[int, int]) -> None:
        if self._trim and not self._chosen:
            for name, value in values.items():
                self._library.mallopt(name, value)

    def _give_back(self) -> None:
        if self._trim:
            self._trim(0)
            self.times += 1
            self._least = self._process.memory_info().rss
