"""Checks with a deadline, run at once: the frame of ``podtune doctor``. Needs no torch.

None is awaited beyond its deadline, so that a hanging driver or a name that does not resolve costs seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from podtune.run.errors import OK, UNAVAILABLE, UserError

State = Literal["ok", "warn", "fail"]
DEADLINE_S = 4.5


@dataclass(frozen=True)
class Result:
    """A finding: subject, state, text, and the fix."""

    name: str
    state: State
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Check:
    """A named function that looks at one thing, with the fix to give when it does not return in time."""

    name: str
    run: Callable[[], Result | Iterable[Result]]
    timeout_fix: str = "call it by hand to see where it hangs"
    deadline_s: float = DEADLINE_S

    def results(self) -> list[Result]:
        """Run it; a warning where it raises."""
        try:
            found = self.run()
            return [found] if isinstance(found, Result) else list(found)
        except UserError as error:
            return [Result(self.name, "warn", error.what, error.fix)]
        except Exception as error:  # whatever a driver or a library throws: the other checks still count
            text = f"could not be found out: {type(error).__name__}: {error}"
            return [Result(self.name, "warn", text)]


def run_checks(checks: Sequence[Check]) -> list[Result]:
    """Run all checks at once; results in their order, a warning for each that missed its deadline."""
    results: dict[str, list[Result]] = {}

    def run(check: Check) -> None:
        results[check.name] = check.results()

    # daemons, because a call into a dead driver never comes back and must not keep the process
    threads = [threading.Thread(target=run, args=(check,), daemon=True) for check in checks]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for check, thread in zip(checks, threads, strict=True):
        thread.join(max(0.0, started + check.deadline_s - time.monotonic()))
        late = Result(check.name, "warn", f"no answer within {check.deadline_s:g} s", check.timeout_fix)
        results.setdefault(check.name, [late])
    return [result for check in checks for result in results[check.name]]


def exit_code(results: Iterable[Result]) -> int:
    """Exit code 0, or 69 if a check failed."""
    return UNAVAILABLE if any(result.state == "fail" for result in results) else OK
