"""Running a sweep: cell after cell, each with a record whatever happens, resumable, with progress. Needs no
torch itself.

Files below the output folder: ``sweep.json`` (what was asked, and how each cell ended), and for each cell
``cells/NAME/{run.json,cell.json,log.txt}``.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Literal

from podtune.bench.case.record import summary
from podtune.bench.sweep.launch import ForkServer, Launcher, Outcome, Torchrun
from podtune.bench.sweep.sweep import Cell, Expansion, Sweep, code_hash
from podtune.machine.provenance import provenance
from podtune.run.collect import emit_record
from podtune.run.distributed import PodPlace
from podtune.run.errors import OUT_OF_MEMORY, PEER_LOST, SOFTWARE, CannotCreate
from podtune.run.record import RUN_FILE, Json, Status, end_record, new_record, now, write_json
from podtune.run.sweeps import stoppable

CELL_FILE, SWEEP_FILE, LOG_FILE = "cell.json", "sweep.json", "log.txt"
State = Literal["ok", "oom", "error", "kept"]


@dataclass
class SweepProgress:
    """What is done. ``states`` by cell name; ``seconds`` of the cells that were run now."""

    total: int
    states: dict[str, State] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    @property
    def left_s(self) -> float | None:
        """Estimated seconds to the end: the mean of the cells so far. None before the first."""
        left = self.total - len(self.states)
        return left * sum(self.seconds) / len(self.seconds) if self.seconds else None


@dataclass
class Runner:
    """One sweep into one folder.

    Args:
        resume: keep cells that have a record of the same arguments by the same code; ok and oom, and inside a
            job, where all pods must decide alike, error too.
        pod: this pod's place, inside a job; only the first pod writes records.
        say: takes progress lines.
        emit: where to print each record between markers; None for nowhere.
    """

    sweep: Sweep
    expansion: Expansion
    output: Path
    resume: bool = True
    pod: PodPlace | None = None
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    emit: IO[str] | None = None

    def run(self) -> SweepProgress:
        """All cells. On Ctrl-C or SIGTERM the running cell is ended, what is done stays, and
        :class:`SweepStopped` is raised.

        Raises:
            UserError: the output folder cannot be written, or holds something else.
        """
        self._prepare()
        cells = self.expansion.cells
        progress = SweepProgress(len(cells))
        finished = {cell.name: self._finished(cell) for cell in cells} if self.resume else {}
        launcher: Launcher = self._launcher([cell.strategy for cell in cells])
        for name, why in self.expansion.impossible.items():
            self.say(f"skipped {name}: {why}")
        waited = 0.0
        try:
            with stoppable():
                for index, cell in enumerate(cells):
                    if finished.get(cell.name):
                        progress.states[cell.name] = "kept"
                        self._say(progress, cell, self._record(cell) or {})
                        continue
                    if self.pod is not None and self.pod.node_rank >= cell.nodes:
                        # the others may take so long before they meet us again
                        waited += self.sweep.timeout_per_cell_s
                        progress.states[cell.name] = "kept"
                        continue
                    self._measure(launcher, cell, index, progress, waited)
                    waited = 0.0
        finally:
            launcher.close()
            self._write(progress)
        return progress

    def _launcher(self, strategies: list[str]) -> Launcher:
        if self.sweep.launch == "fork" and self.pod is None:
            return ForkServer(strategies)
        return Torchrun(self.pod)

    def _prepare(self) -> None:
        try:
            (self.output / "cells").mkdir(parents=True, exist_ok=True)
            probe = self.output / f".write.{id(self)}.part"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise CannotCreate(
                f"cannot write there: {error.strerror}", where=f"--output {self.output}"
            ) from None

    def _folder(self, cell: Cell) -> Path:
        return self.output / "cells" / cell.name

    def _finished(self, cell: Cell) -> bool:
        """True if a record of this very cell is there."""
        folder = self._folder(cell)
        try:
            recorded = json.loads((folder / CELL_FILE).read_text())
            record = json.loads((folder / RUN_FILE).read_text())
        except (OSError, ValueError):
            return False
        good = ("ok", "oom") if self.pod is None else ("ok", "oom", "error")
        return recorded.get("key") == cell.key and record.get("status") in good

    def _record(self, cell: Cell) -> Json | None:
        try:
            record = json.loads((self._folder(cell) / RUN_FILE).read_text())
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) else None

    def _measure(
        self, launcher: Launcher, cell: Cell, index: int, progress: SweepProgress, waited: float
    ) -> None:
        folder = self._folder(cell)
        writer = self.pod is None or self.pod.node_rank == 0
        log = folder / (LOG_FILE if self.pod is None or writer else f"log.pod{self.pod.node_rank}.txt")
        if writer:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        self.say(f"{self._position(progress)} {cell.name} ...")
        started, kills = time.monotonic(), _kernel_kills()
        outcome = launcher.run(cell, index, folder, log, self.sweep.timeout_per_cell_s + waited)
        seconds = time.monotonic() - started
        progress.seconds.append(seconds)
        if not writer:
            progress.states[cell.name] = "ok" if outcome.code == 0 else "error"
            return
        record = self._record(cell)
        if record is None:
            record = _failure(cell, outcome, seconds, killed_for_memory=_kernel_kills() > kills, log=log)
            write_json(folder / RUN_FILE, record)
        # it wrote its record when it was told to end
        elif outcome.timed_out and record.get("status") != "ok":
            record["reason"] = (
                f"hang: not done after {seconds:.0f} s, ended by the sweep; its last word: "
                f"{record.get('reason')}"
            )
            write_json(folder / RUN_FILE, record)
        write_json(
            folder / CELL_FILE,
            {
                "key": cell.key,
                "arguments": list(cell.arguments),
                "world_size": cell.world_size,
                "seconds": seconds,
            },
        )
        status = record.get("status")
        progress.states[cell.name] = "ok" if status == "ok" else "oom" if status == "oom" else "error"
        if self.emit is not None:
            emit_record(record, self.emit)
        self._say(progress, cell, record)
        self._write(progress)

    def _position(self, progress: SweepProgress) -> str:
        return f"[{len(progress.states) + 1:>{len(str(progress.total))}}/{progress.total}]"

    def _say(self, progress: SweepProgress, cell: Cell, record: Json) -> None:
        count = f"[{len(progress.states):>{len(str(progress.total))}}/{progress.total}]"
        left = "" if progress.left_s is None else f"; about {_duration(progress.left_s)} left"
        kept = " (kept)" if progress.states[cell.name] == "kept" else ""
        self.say(f"{count} {cell.name}: {summary(record)}{kept}{left}")

    def _write(self, progress: SweepProgress) -> None:
        if self.pod is not None and self.pod.node_rank > 0:
            return
        content = {
            "written_at": now(),
            "sweep": asdict(self.sweep),
            "code": code_hash(),
            "cells": {cell.name: progress.states.get(cell.name, "not run") for cell in self.expansion.cells},
            "impossible": self.expansion.impossible,
        }
        write_json(self.output / SWEEP_FILE, content)


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )


def _failure(cell: Cell, outcome: Outcome, seconds: float, *, killed_for_memory: bool, log: Path) -> Json:
    """The record of a cell whose processes left none."""
    record = new_record(
        mode="benchmark",
        name=cell.name,
        config=asdict(cell.options),
        strategy=cell.strategy,
        model=cell.model,
        world_size=cell.world_size,
        nnodes=cell.nodes,
        nproc_per_node=cell.world_size // cell.nodes,
        global_batch_size=cell.options.global_batch_size,
        seed=cell.options.seed,
        provenance=provenance(),
    )
    status: Status = "error"
    code = SOFTWARE
    if outcome.timed_out:
        reason, code = f"hang: not done after {seconds:.0f} s, ended", PEER_LOST
    elif killed_for_memory:
        reason, status, code = "the kernel killed a process for want of memory", "oom", OUT_OF_MEMORY
    elif outcome.code < 0:
        reason = f"ended by {signal.Signals(-outcome.code).name}"
    else:
        reason = f"ended with exit code {outcome.code} and no record"
    return end_record(record, status, code, f"{reason}; last words: {_last_words(log)}")


def _last_words(log: Path) -> str:
    lines = (
        [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        if log.exists()
        else []
    )
    telling = [line for line in lines if "error" in line.lower()] or lines
    return telling[-1][:300] if telling else "none"


def _kernel_kills() -> int:
    """How many processes of this control group the kernel has killed for memory (cgroup v2); 0 where it does
    not say.
    """
    try:
        events = Path("/sys/fs/cgroup/memory.events").read_text().split()
        return int(events[events.index("oom_kill") + 1])
    except (OSError, ValueError, IndexError):
        return 0
