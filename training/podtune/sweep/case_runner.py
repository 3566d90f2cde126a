"""Running a sweep of benchmark cases: each leaves a record whatever happens. Needs no torch itself.

Files below the output folder: ``sweep.json`` (the sweep, and how each case ended), and for each case
``cells/NAME/{run.json,cell.json,log.txt}``.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from podtune.bench.case.record import summary
from podtune.machine.provenance import provenance
from podtune.run.collect import emit_record
from podtune.run.errors import OUT_OF_MEMORY, PEER_LOST, SOFTWARE
from podtune.run.follow import read_record
from podtune.run.record import RUN_FILE, Json, Status, end_record, new_record, now, write_json
from podtune.run.world import PodPlace
from podtune.sweep.cases import Case, CaseSweep, Expansion, code_hash
from podtune.sweep.processes import ForkServer, torchrun
from podtune.sweep.runner import (
    LOG_FILE,
    SWEEP_FILE,
    Job,
    Outcome,
    Running,
    Say,
    State,
    SweepRunner,
    own_folder,
    to_stderr,
)

CASE_FILE = "cell.json"
START_S = 120.0  # for the imports, on top of the case's own time limit, where processes start from nothing


@dataclass
class CaseRunner:
    """A sweep of benchmark cases into one folder, one after another.

    Args:
        resume: keep cases that have a record of the same arguments by the same code; ok and oom, and inside a
            job, where all pods must decide alike, error too.
        pod: this pod's place, inside a job; only the first pod writes records.
        say: takes progress lines.
        emit: where to print each record between markers; None for nowhere.
    """

    sweep: CaseSweep
    expansion: Expansion
    output: Path
    resume: bool = True
    pod: PodPlace | None = None
    say: Say = to_stderr
    emit: IO[str] | None = None
    _server: ForkServer | None = field(init=False, default=None)
    _kills_before: int = field(init=False, default=0)

    @property
    def _writes(self) -> bool:
        return self.pod is None or self.pod.node_rank == 0

    def run(self) -> dict[str, State]:
        """Run all cases; how each ended, by name.

        Raises:
            SweepStopped: on Ctrl-C or SIGTERM; the same command resumes.
            UserError: the folder cannot be written, or another sweep works there.
        """
        with own_folder(self.output) if self._writes else contextlib.nullcontext():
            return self._run()

    def _run(self) -> dict[str, State]:
        if self.sweep.launch == "fork" and self.pod is None:
            self._server = ForkServer({case.strategy for case in self.expansion.cases})
        for name, why in self.expansion.impossible.items():
            self.say(f"skipped {name}: {why}")
        return SweepRunner(self._jobs(), self._write, say=self.say).run()

    def _jobs(self) -> list[Job]:
        jobs, waited_s = [], 0.0
        for index, case in enumerate(self.expansion.cases):
            finished = self.resume and self._is_finished(case)
            absent = self.pod is not None and self.pod.node_rank >= case.nodes
            limit_s = self.sweep.timeout_per_cell_s + waited_s
            if not finished:  # the others may take so long before they meet this pod again
                waited_s = limit_s if absent else 0.0
            jobs.append(
                Job(
                    name=case.name,
                    start=partial(self._start, case, index, limit_s),
                    limit_s=limit_s + (0.0 if self._server else START_S),
                    conclude=partial(self._conclude, case),
                    summary=partial(self._summary, case),
                    before="kept" if finished or absent else None,
                )
            )
        return jobs

    def _folder(self, case: Case) -> Path:
        return self.output / "cells" / case.name

    def _is_finished(self, case: Case) -> bool:
        try:
            recorded = json.loads((self._folder(case) / CASE_FILE).read_text())
        except (OSError, ValueError):
            return False
        good = ("ok", "oom") if self.pod is None else ("ok", "oom", "error")
        return recorded.get("key") == case.key and (self._record(case) or {}).get("status") in good

    def _record(self, case: Case) -> Json | None:
        return read_record(self._folder(case))

    def _log(self, case: Case) -> Path:
        name = LOG_FILE if self.pod is None or self._writes else f"log.pod{self.pod.node_rank}.txt"
        return self._folder(case) / name

    def _start(self, case: Case, index: int, timeout_s: float) -> Running:
        """Fork the ranks, or start torchrun, in an empty folder."""
        folder = self._folder(case)
        if self._writes:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        self._kills_before = _kernel_kills()
        arguments = [*case.arguments, "--output", str(folder)]
        if self._server:
            return self._server.start(arguments, self._log(case), case.world_size)
        return torchrun(
            ["-m", "podtune.benchmark", *arguments],
            self._log(case),
            nodes=case.nodes,
            local_ranks=case.world_size // case.nodes,
            threads=case.options.threads,
            timeout_s=timeout_s,
            pod=self.pod,
            index=index,
        )

    def _conclude(self, case: Case, outcome: Outcome) -> State:
        """Complete the record: that of a failure where the processes left none."""
        if not self._writes:
            return "ok" if outcome.code == 0 else "error"
        folder, record = self._folder(case), self._record(case)
        if record is None:
            record = self._failure(case, outcome)
            write_json(folder / RUN_FILE, record)
        elif outcome.code is None and record.get("status") != "ok":  # written when it was told to end
            record["reason"] = (
                f"hang: not done after {outcome.seconds:.0f} s, ended by the sweep; its last word: "
                f"{record.get('reason')}"
            )
            write_json(folder / RUN_FILE, record)
        written = {
            "key": case.key,
            "arguments": list(case.arguments),
            "world_size": case.world_size,
            "seconds": outcome.seconds,
        }
        write_json(folder / CASE_FILE, written)
        if self.emit is not None:
            emit_record(record, self.emit)
        status = record.get("status")
        return "ok" if status == "ok" else "oom" if status == "oom" else "error"

    def _failure(self, case: Case, outcome: Outcome) -> Json:
        record = new_record(
            mode="benchmark",
            name=case.name,
            config=asdict(case.options),
            strategy=case.strategy,
            model=case.model,
            world_size=case.world_size,
            nnodes=case.nodes,
            nproc_per_node=case.world_size // case.nodes,
            global_batch_size=case.options.global_batch_size,
            seed=case.options.seed,
            provenance=provenance(),
        )
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
        return end_record(record, status, code, f"{reason}; last words: {_last_words(self._log(case))}")

    def _summary(self, case: Case, state: State) -> str:
        if not self._writes:
            return state
        return summary(self._record(case) or {}) + (" (kept)" if state == "kept" else "")

    def _write(self, states: dict[str, str]) -> None:
        if not self._writes:
            return
        content = {
            "written_at": now(),
            "sweep": asdict(self.sweep),
            "code": code_hash(),
            "cells": states,
            "impossible": self.expansion.impossible,
        }
        write_json(self.output / SWEEP_FILE, content)


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
