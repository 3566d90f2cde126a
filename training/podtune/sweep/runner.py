"""The engine of every sweep: start its configurations, wait for them, judge them, keep what is finished.

A :class:`Sweep` says what is started, and where: a process of this machine, ranks of a fork server, a job of
a cluster. Needs no torch.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

from podtune.run import lock
from podtune.run.errors import CannotCreate, printable, working
from podtune.run.log_lines import duration
from podtune.run.record import now, write_json

SWEEP_FILE, LOG_FILE = "sweep.json", "log.txt"
POLL_S = 2.0
State = Literal["ok", "oom", "error", "failed", "kept"]
Say = Callable[[str], None]


def to_stderr(line: str) -> None:
    """Print a line of progress, which may quote records and messages of pods."""
    print(printable(line), file=sys.stderr, flush=True)


class Running(Protocol):
    """A started configuration, on this machine or elsewhere."""

    def poll(self, wait_s: float) -> int | None:
        """The exit code, negative for a signal; None while it runs. Waits at most ``wait_s`` for the end."""

    def end(self) -> None:
        """Ask it to save and end, and return when it is gone; a job elsewhere is left to itself."""


class Configuration(Protocol):
    """What a sweep runs, told from the others by its name."""

    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=Configuration)
Begin = Callable[[C, Path], Running]  # starts a configuration, which leaves its record in the folder


@dataclass(frozen=True)
class Outcome:
    """The end of a run: its exit code, None if it was ended at the time limit, and its duration."""

    code: int | None
    seconds: float


class SweepStopped(Exception):
    """The sweep was asked to end (Ctrl-C or SIGTERM); ``code`` is the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


class Sweep(ABC, Generic[C]):
    """Runs named configurations into a folder; a later sweep into the same folder resumes it.

    Args:
        configurations: in the order in which they start.
        at_once: how many run at a time.
        say: takes progress lines.
    """

    writes = True  # false in a pod that only takes part

    def __init__(
        self, configurations: Sequence[C], output: Path, *, at_once: int = 1, say: Say = to_stderr
    ) -> None:
        self.configurations, self.output, self.at_once, self.say = configurations, output, at_once, say
        self.states: dict[str, State] = {}
        self._seconds: list[float] = []

    @abstractmethod
    def before(self, configuration: C) -> State | None:
        """The state of one that need not be started: it is there from an earlier sweep."""

    @abstractmethod
    def start(self, configuration: C) -> Running:
        """Start it in its folder."""

    @abstractmethod
    def conclude(self, configuration: C, outcome: Outcome) -> State:
        """Complete the records of one that has ended."""

    @abstractmethod
    def summary(self, configuration: C, state: State) -> str:
        """How it ended, in a line for people."""

    @abstractmethod
    def content(self, states: dict[str, str]) -> dict[str, object]:
        """What ``sweep.json`` says, where one that has not ended is "not run"."""

    def limit_s(self, configuration: C) -> float:
        return float("inf")

    def run(self) -> dict[str, State]:
        """Run all; how each ended, by name. One that fails does not end the sweep.

        Raises:
            SweepStopped: on Ctrl-C or SIGTERM, with what runs ended or left and what is done recorded; the
            same command resumes.
            UserError: the folder cannot be written, or another sweep works there.
        """
        with own_folder(self.output) if self.writes else contextlib.nullcontext():
            waiting = []
            for each in self.configurations:
                if state := self.before(each):
                    self._ended(each, state)
                else:
                    waiting.append(each)
            self._run(waiting)
        return {each.name: self.states[each.name] for each in self.configurations}

    def _run(self, waiting: list[C]) -> None:
        current: list[tuple[C, Running, float]] = []
        try:
            with stoppable(), working(f"{len(waiting)} runs", shown=bool(waiting) and sys.stderr.isatty()):
                while waiting or current:
                    while waiting and len(current) < self.at_once:
                        configuration = waiting.pop(0)
                        self.say(f"{self._count(configuration)} {configuration.name} ...")
                        current.append((configuration, self.start(configuration), time.monotonic()))
                    for each in tuple(current):
                        if state := self._state(*each, POLL_S / len(current)):
                            current.remove(each)
                            self._ended(each[0], state)
        finally:
            for _, running, _ in current:
                running.end()
            self._write()

    def _state(self, configuration: C, running: Running, started: float, wait_s: float) -> State | None:
        """The state of one that has ended, None while it runs."""
        code, seconds = running.poll(wait_s), time.monotonic() - started
        if code is None:
            if seconds < self.limit_s(configuration):
                return None
            running.end()
        self._seconds.append(seconds)
        return self.conclude(configuration, Outcome(code, seconds))

    def _ended(self, configuration: C, state: State) -> None:
        self.states[configuration.name] = state
        self._write()
        left, line = len(self.configurations) - len(self.states), self.summary(configuration, state)
        if self._seconds and left:
            seconds = left * sum(self._seconds) / len(self._seconds) / self.at_once
            line += f"; about {duration(seconds)} left"
        self.say(f"{self._count(configuration)} {configuration.name}: {line}")

    def _write(self) -> None:
        if self.writes:
            states = {each.name: str(self.states.get(each.name, "not run")) for each in self.configurations}
            write_json(self.output / SWEEP_FILE, {"written_at": now(), **self.content(states)})

    def _count(self, configuration: C) -> str:
        total = len(self.configurations)
        return f"[{self.configurations.index(configuration) + 1:>{len(str(total))}}/{total}]"


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
