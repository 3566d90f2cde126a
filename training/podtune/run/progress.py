"""Progress of work on many items: done, rate and time left, as a bar or as lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

SAY_EVERY_S = 10.0


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of items that were done since the last call.

    On a terminal a bar, which goes when all is done; elsewhere a line on stderr every
    :data:`SAY_EVERY_S` seconds, so that work that ends sooner prints nothing.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
        console, began = Console(stderr=True), time.monotonic()
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
            task = bar.add_task("", total=total, rate="")

            def show(count: int) -> None:
                done = bar.tasks[0].completed + count
                bar.update(task, advance=count, rate=f"{done / max(1e-9, time.monotonic() - began):,.0f}/s")

            yield show
        return
    done, began = 0, time.monotonic()
    said = began

    def say(count: int) -> None:
        nonlocal done, said
        done += count
        now = time.monotonic()
        if now - said >= SAY_EVERY_S and done < total:
            said, rate = now, done / (now - began)
            left = (total - done) / max(rate, 1e-9)
            line = f"podtune: {what}: {done:,} of {total:,}, {rate:,.0f}/s, {left:,.0f} s left"
            print(line, file=sys.stderr, flush=True)

    yield say
