"""glibc's heap in CPU training: memory that tensors free is kept for the next ones, and trimmed now and then.

glibc returns a large tensor's memory to the system as soon as it is freed, and the next one's comes page by
page, each filled with zeros: a tenth of the time of a step whose rows are long. The memory of smaller
tensors, which it keeps, fits few others where each batch has another length: resident memory climbs for
hundreds of steps although nothing leaks. So all of it is kept for a few steps, and then trimmed, while
training lasts. (What oneDNN keeps for each shape it has met is bounded in
:mod:`podtune.run.library_environment`.)
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import psutil
from transformers import TrainerCallback

MICRO_BATCHES = 10  # between two checks: trimming after each took a tenth of the time, after ten a hundredth
GROWN = 32 * 2**20  # resident bytes since the last trim that are worth another
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # glibc's mallopt()
KEEP = {_TRIM_THRESHOLD: -1, _MMAP_MAX: 0}
DEFAULTS = {_TRIM_THRESHOLD: 128 * 2**10, _MMAP_MAX: 2**16}  # glibc's own


class HeapTrimCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that has glibc keep freed memory while training lasts, and trims its heap now and then."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        # another C library has none
        self._malloc_trim = getattr(self._library, "malloc_trim", None)
        # what the environment says stands: the heap is trimmed alone
        self._configured = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
        self._process = psutil.Process()
        self._micro_batches, self._resident_after_trim = 0, 0
        self.times = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._set(KEEP)

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._micro_batches += 1
        if self._micro_batches % MICRO_BATCHES:
            return
        if self._process.memory_info().rss > self._resident_after_trim + GROWN:
            self._trim_heap()

    on_step_end = on_substep_end

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Restore glibc's defaults and trim once more: what follows training needs little of its memory."""
        self._set(DEFAULTS)
        self._trim_heap()

    def _set(self, values: dict[int, int]) -> None:
        if self._malloc_trim and not self._configured:
            for name, value in values.items():
                self._library.mallopt(name, value)

    def _trim_heap(self) -> None:
        if self._malloc_trim:
            self._malloc_trim(0)
            self.times += 1
            self._resident_after_trim = self._process.memory_info().rss
