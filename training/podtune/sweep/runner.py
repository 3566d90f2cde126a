"""The engine of every sweep: start its jobs, wait for them, judge them, keep what is finished.

What is started, and where, is a :class:`Running` of somebody else: a process of this machine, ranks of a fork
server, a job of a cluster. Needs no torch.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from podtune.run import lock
from podtune.run.errors import CannotCreate, printable
from podtune.run.log_lines import duration

SWEEP_FILE, LOG_FILE = "sweep.json", "log.txt"
POLL_S = 2.0
State = Literal["ok", "oom", "error", "failed", "stopped", "kept"]
Say = Callable[[str], None]


def to_stderr(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


class Running(Protocol):
    """A started configuration, on this machine or elsewhere."""

    def poll(self, wait_s: float) -> int | None:
        """The exit code, negative for a signal; None while it runs. Waits at most ``wait_s`` for the end."""

    def end(self) -> None:
        """Ask it to save and end; return when it is gone."""

    def leave(self) -> None:
        """The sweep itself ends: end what runs here, leave what runs elsewhere."""


@dataclass(frozen=True)
class Outcome:
    """The end of a run: its exit code, None if it was ended at the time limit, and its duration."""

    code: int | None
    seconds: float


@dataclass(frozen=True)
class Job:
    """One named configuration of a sweep: how it is started and judged.

    Args:
        limit_s: seconds that it may take.
        conclude: completes the records of one that has ended, and gives its state.
        summary: how it ended, in a line for people.
        progress: the last line that it printed, shown in a terminal while it runs.
        is_worse: true while it runs if it is to be stopped for its results so far.
        before: the state of one that need not be started.
    """

    name: str
    start: Callable[[], Running]
    limit_s: float
    conclude: Callable[[Outcome], State]
    summary: Callable[[State], str]
    progress: Callable[[], str] = lambda: ""
    is_worse: Callable[[], bool] = lambda: False
    before: State | None = None


@dataclass(frozen=True)
class _Started:
    job: Job
    running: Running
    at: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.at


class SweepStopped(Exception):
    """The sweep was asked to end (Ctrl-C or SIGTERM); ``code`` is the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into :class:`SweepStopped` in the block, once."""

    def stop(number: int, _frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second Ctrl-C must not cut short the ending of what runs
        raise SweepStopped(128 + number)

    before = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@dataclass
class SweepRunner:
    """Runs jobs, one after another or some at once.

    Args:
        jobs: all of the sweep, in the order in which they start.
        write: records the states by name, those without one "not run"; called after every change.
        at_once: how many run at a time.
        say: takes progress lines.
    """

    jobs: Sequence[Job]
    write: Callable[[dict[str, str]], None]
    at_once: int = 1
    say: Say = to_stderr
    states: dict[str, State] = field(init=False, default_factory=dict)
    _durations: list[float] = field(init=False, default_factory=list)

    def run(self) -> dict[str, State]:
        """Run all jobs; how each ended, by name. One that fails does not end the sweep.

        Raises:
            SweepStopped: on Ctrl-C or SIGTERM, with what runs ended or left and what is done recorded; the
            same command resumes.
        """
        for job in self.jobs:
            if job.before:
                self._ended(job, job.before)
        waiting = [job for job in self.jobs if not job.before]
        current: list[_Started] = []
        try:
            with stoppable():
                while waiting or current:
                    while waiting and len(current) < self.at_once:
                        current.append(self._started(waiting.pop(0)))
                    for each in tuple(current):
                        if state := self._state(each, POLL_S / len(current)):
                            current.remove(each)
                            self._ended(each.job, state)
        finally:
            for each in current:
                each.running.leave()
            self._write()
        return {job.name: self.states[job.name] for job in self.jobs}

    def _started(self, job: Job) -> _Started:
        self.say(f"{self._count(job)} {job.name} ...")
        return _Started(job, job.start(), time.monotonic())

    def _state(self, each: _Started, wait_s: float) -> State | None:
        """The state of one that has ended, None while it runs."""
        code = each.running.poll(wait_s)
        if sys.stderr.isatty():  # a line that the next one overwrites
            line = "" if code is not None else f"{each.job.name[-30:]}: {each.job.progress()}"
            print(
                f"\r\033[K{printable(line)[: shutil.get_terminal_size().columns - 1]}",
                end="",
                file=sys.stderr,
            )
        if code is None:
            if each.job.is_worse():
                each.running.end()
                return "stopped"
            if each.seconds < each.job.limit_s:
                return None
            each.running.end()
        self._durations.append(each.seconds)
        return each.job.conclude(Outcome(code, each.seconds))

    def _ended(self, job: Job, state: State) -> None:
        self.states[job.name] = state
        self._write()
        waiting = sum(each.name not in self.states for each in self.jobs)
        time_left = ""
        if self._durations and waiting:
            seconds = waiting * sum(self._durations) / len(self._durations) / self.at_once
            time_left = f"; about {duration(seconds)} left"
        self.say(f"{self._count(job)} {job.name}: {job.summary(state)}{time_left}")

    def _write(self) -> None:
        self.write({job.name: self.states.get(job.name, "not run") for job in self.jobs})

    def _count(self, job: Job) -> str:
        total = len(self.jobs)
        return f"[{self.jobs.index(job) + 1:>{len(str(total))}}/{total}]"


@contextlib.contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Make the folder of a sweep, and keep others out of it: two would start, and delete, the same runs.

    Raises:
        UserError: it cannot be written, or another sweep works there.
    """
    path = folder / ".lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = lock.take(path)
    except OSError as error:
        raise CannotCreate(f"cannot write there: {error.strerror}", where=f"--output {folder}") from None
    if held is None:
        raise CannotCreate(
            f"another sweep works here: {lock.holder(path)}",
            where=f"--output {folder}",
            fix="give this one another --output, or wait for that one to end",
        )
    with held:
        yield
