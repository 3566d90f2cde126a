"""A watchdog for hangs: if no step ends in time, the record says so and the process goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Watchdog:
    """Calls ``on_hang(what)`` once if :meth:`beat` stays away for ``timeout_s`` plus a grace.

    The grace lets the process group's own timeout, which can name a rank, speak first.
    """

    GRACE_S = 15.0

    def __init__(self, timeout_s: float, on_hang: Callable[[str], None]) -> None:
        self.patience = timeout_s + self.GRACE_S
        self._on_hang = on_hang
        self._doing, self._since = "starting", time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def beat(self, doing: str) -> None:
        """Something ended, and ``doing`` begins."""
        self._doing, self._since = doing, time.monotonic()

    def stop(self) -> None:
        """Watch no longer."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self.patience / 4)):
            if time.monotonic() - self._since > self.patience:
                self._on_hang(self._doing)
                return
