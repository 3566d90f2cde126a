"""Progress of work on many items as lines on stderr: done, rate and time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

SAY_EVERY_S = 10.0


def progress(what: str, total: int) -> Callable[[int], None]:
    """Return a function to call with the number of items that were done since the last call.

    It prints every :data:`SAY_EVERY_S` seconds, so that work that ends sooner prints nothing.
    """
    done, began = 0, time.monotonic()
    said = began

    def advance(count: int) -> None:
        nonlocal done, said
        done += count
        now = time.monotonic()
        if now - said >= SAY_EVERY_S and done < total:
            said, rate = now, done / (now - began)
            left = (total - done) / max(rate, 1e-9)
            line = f"podtune: {what}: {done:,} of {total:,}, {rate:,.0f}/s, {left:,.0f} s left"
            print(line, file=sys.stderr, flush=True)

    return advance
