"""Running a sweep of benchmark cases: each leaves a record whatever happens. Needs no torch itself.

Files below the output folder: ``sweep.json`` (the sweep, and how each case ended), and for each case
``cells/NAME/{run.json,cell.json,log.txt}``.
"""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import asdict
from pathlib import Path
from typing import IO

from podtune.bench.case.record import case_record, identity, summary
from podtune.machine.provenance import provenance
from podtune.run.collect import emit_record
from podtune.run.errors import OUT_OF_MEMORY, PEER_LOST, SOFTWARE
from podtune.run.follow import read_record
from podtune.run.record import RUN_FILE, Json, Status, end_record, write_json
from podtune.run.world import PodPlace
from podtune.sweep.cases import Case, CaseSweep, Expansion, code_hash
from podtune.sweep.processes import ForkServer, torchrun
from podtune.sweep.runner import LOG_FILE, Begin, Outcome, Running, Say, State, Sweep, to_stderr

CASE_FILE = "cell.json"
START_S = 120.0  # for the imports, on top of the case's own time limit, where processes start from nothing


class CaseRunner(Sweep[Case]):
    """A sweep of benchmark cases, one after another, or as jobs of a cluster.

    Kept are cases that have a record of the same arguments by the same code; ok and oom, and inside a job,
    where all pods must decide alike, error too.

    Args:
        begin: starts a case elsewhere; None for processes of this machine.
        pod: this pod's place, inside a job; only the first pod writes records.
        emit: where to print each record between markers; None for nowhere.
    """

    def __init__(
        self,
        sweep: CaseSweep,
        expansion: Expansion,
        output: Path,
        begin: Begin[Case] | None = None,
        *,
        pod: PodPlace | None = None,
        at_once: int = 1,
        say: Say = to_stderr,
        emit: IO[str] | None = None,
    ) -> None:
        super().__init__(expansion.cases, output, at_once=at_once, say=say)
        self.sweep, self.expansion, self.begin, self.pod, self.emit = sweep, expansion, begin, pod, emit
        self.writes = pod is None or pod.node_rank == 0
        self._waited_s = 0.0
        self._kills_before = 0
        self._server: ForkServer | None = None
        if sweep.launch == "fork" and pod is None and begin is None:
            self._server = ForkServer({case.options.strategy for case in expansion.cases})
        for name, why in expansion.impossible.items():
            say(f"skipped {name}: {why}")

    def before(self, case: Case) -> State | None:
        """Kept: measured before, or without a part for this pod."""
        if self._is_finished(case):
            return "kept"
        if self.pod is not None and self.pod.node_rank >= case.world.nnodes:
            # the others may take so long before they meet this pod again
            self._waited_s += self.sweep.timeout_per_cell_s + START_S
            return "kept"
        return None

    def limit_s(self, case: Case) -> float:
        """The sweep's, and what it takes to start, or to meet the other pods.

        None of a job elsewhere: a queue may hold it back, and its pods keep the limit.
        """
        if self.begin:
            return float("inf")
        return self.sweep.timeout_per_cell_s + (0.0 if self._server else START_S + self._waited_s)

    def start(self, case: Case) -> Running:
        """Fork the ranks, start torchrun, or begin a job, in an empty folder."""
        folder = self._folder(case)
        if self.writes:
            # the other pods share the volume: only one may empty the folder
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        if self.begin:
            return self.begin(case, folder)
        self._kills_before = _kernel_kills()
        arguments = [*case.arguments, "--output", str(folder)]
        log = folder / (LOG_FILE if self.pod is None or self.writes else f"log.pod{self.pod.node_rank}.txt")
        if self._server:
            return self._server.start(arguments, log, case.world.world_size)
        return torchrun(
            ["-m", "podtune.benchmark", *arguments],
            log,
            nodes=case.world.nnodes,
            local_ranks=case.world.local_world_size,
            threads=case.options.threads,
            timeout_s=self.limit_s(case),
            pod=self.pod,
            index=self.configurations.index(case),
        )

    def conclude(self, case: Case, outcome: Outcome) -> State:
        """Complete the record: that of a failure where the processes left none."""
        if not self.writes:
            return "ok" if outcome.code == 0 else "error"
        folder, record = self._folder(case), read_record(self._folder(case))
        if record is None:
            record = self._failure(case, outcome)
            write_json(folder / RUN_FILE, record)
        elif outcome.code is None and record.get("status") != "ok":  # written when it was told to end
            hang = f"hang: not done after {outcome.seconds:.0f} s, ended by the sweep"
            record["reason"] = f"{hang}; its last word: {record.get('reason')}"
            write_json(folder / RUN_FILE, record)
        written = {
            "key": case.key,
            "arguments": list(case.arguments),
            "world_size": case.world.world_size,
            "seconds": outcome.seconds,
        }
        write_json(folder / CASE_FILE, written)
        if self.emit is not None:
            emit_record(record, self.emit)
        status = record.get("status")
        return "ok" if status == "ok" else "oom" if status == "oom" else "error"

    def summary(self, case: Case, state: State) -> str:
        """Its speed and memory, or why there are none."""
        if not self.writes:
            return state
        record = read_record(self._folder(case)) or {}
        return summary(record) + (" (kept)" if state == "kept" else "")

    def content(self, states: dict[str, str]) -> dict[str, object]:
        impossible = self.expansion.impossible
        return {
            "sweep": asdict(self.sweep),
            "code": code_hash(),
            "cells": states,
            "impossible": impossible,
        }

    def _folder(self, case: Case) -> Path:
        return self.output / "cells" / case.name

    def _is_finished(self, case: Case) -> bool:
        try:
            recorded = json.loads((self._folder(case) / CASE_FILE).read_text())
        except (OSError, ValueError):
            return False
        good = ("ok", "oom") if self.pod is None else ("ok", "oom", "error")
        record = read_record(self._folder(case)) or {}
        return recorded.get("key") == case.key and record.get("status") in good

    def _failure(self, case: Case, outcome: Outcome) -> Json:
        record = case_record(case.options, case.name)
        record |= {"provenance": provenance(), **identity(case.world)}
        status: Status = "error"
        code = SOFTWARE
        if outcome.code is None:
            reason, code = f"hang: not done after {outcome.seconds:.0f} s, ended", PEER_LOST
        elif _kernel_kills() > self._kills_before:
            reason, status, code = "the kernel killed a process for want of memory", "oom", OUT_OF_MEMORY
        elif outcome.code < 0:
            reason = f"ended by {signal.Signals(-outcome.code).name}"
        else:
            reason = f"ended with exit code {outcome.code} and no record"
        words = _last_words(self._folder(case) / LOG_FILE)
        return end_record(record, status, code, f"{reason}; last words: {words}")


def _last_words(log: Path) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()] or lines
    return telling[-1][:300] if telling else "none"


def _kernel_kills() -> int:
    """Count the processes of this control group (v2) that the kernel has killed for memory; 0 if unknown."""
    try:
        events = Path("/sys/fs/cgroup/memory.events").read_text().split()
        return int(events[events.index("oom_kill") + 1])
    except (OSError, ValueError, IndexError):
        return 0
