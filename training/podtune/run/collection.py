"""Python's garbage collection, paused where many objects are made and none of them is garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Leave cycles alone inside the block. With torch loaded, looking for them takes a quarter of the time
    and more.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
