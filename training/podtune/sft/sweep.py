"""A sweep of fine-tunes, each with what it varies: one after another on this machine, or some at once where
others start them. Needs no torch.

A sweep file is YAML::

    config: sft.yaml                      # a training YAML that all have in common, beside this file
    options: {max_steps: 200}             # more keys of it, for every run
    learning_rate: [1.0e-4, 3.0e-4]       # any key with a list: an axis; every combination is a run
    seed: [1, 2]
    runs: [{packing: true}, {}]           # a list of its own, each with every point of the grid
    processes: 2                          # of each run; gpu: one on each GPU
    stop: median                          # end a run that is worse than half of those before it
    timeout_per_run_s: 36000

Below the output folder: ``sweep.json`` and, for each run, a folder with its ``config.yaml``, ``log.txt`` and
what training leaves there (of a run elsewhere: its ``run.json`` and ``metrics.jsonl``). A run's folder is
named by what it varies and a hash of its whole configuration, so that another configuration is another run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from podtune.run.errors import CannotCreate, ConfigError, UserError
from podtune.run.files import write_whole
from podtune.run.follow import read_record
from podtune.run.metrics_log import metrics_entries
from podtune.run.record import METRICS_FILE, now, number, write_json
from podtune.run.sweeps import check_keys, combinations, read_mapping, stoppable
from podtune.sft.config import settings as config

KEYS = ("config", "options", "runs", "processes", "stop", "timeout_per_run_s")
NAMED = ("output_dir", "run_name")  # the sweep says where
POLL_S = 2.0
ENDING_S = 300.0  # to save, after SIGTERM
MOST_JUDGES = 3  # runs that have to be finished before one is stopped for being worse
SWEEP_FILE, CONFIG_FILE, LOG_FILE = "sweep.json", "config.yaml", "log.txt"
State = Literal["ok", "kept", "stopped", "failed"]


@dataclass(frozen=True)
class FineTuneOf:
    """One run of a sweep: what it ``varies``, its whole training YAML, and where it runs: ``processes`` of
    this machine, or what else tells places apart.
    """

    varies: dict[str, Any]
    content: dict[str, Any]
    place: str

    @property
    def key(self) -> str:
        """A hash of all that was asked: a finished run of an equal one need not be repeated."""
        asked = json.dumps([self.content, self.place], sort_keys=True, default=str)
        return hashlib.sha256(asked.encode()).hexdigest()

    @property
    def name(self) -> str:
        """What it varies, and the beginning of its key."""
        words = [f"{key}-{value}".replace("/", "_").replace(" ", "") for key, value in self.varies.items()]
        return "_".join([*words, self.key[:6]])[-120:].lstrip("-_.")


@dataclass(frozen=True)
class SweepFile:
    """A sweep file, every run of it checked."""

    runs: tuple[FineTuneOf, ...]
    median: bool
    timeout_s: float


def read(path: Path, *, place: str = "", below: Mapping[str, Any] | None = None) -> SweepFile:
    """Parse a sweep file, and check each run's configuration as training would. Starts nothing.

    Args:
        place: where the runs are started, if not in processes of this machine.
        below: training keys that the file's own ones overrule.

    Raises:
        UserError: unreadable, a key that neither sweeps nor training know, or a value that training refuses.
    """
    content = read_mapping(path, fix="give a sweep file", usage="see podtune sweep --help")
    known = [*KEYS, *config.known_keys()]

    def wrong(key: str, wanted: str) -> UserError:
        return ConfigError(f"{content[key]!r} is not {wanted}", where=f"{path}: {key}")

    check_keys([key for key in content if key not in NAMED], known, str(path))
    if set(NAMED) & set(content) | set(NAMED) & set(content.get("options") or {}):
        raise ConfigError(
            "a sweep names its runs and their folders itself",
            where=f"{path}: output_dir, run_name",
            fix="remove the key; --output says where",
        )
    axes = {key: value for key, value in content.items() if key not in KEYS}
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"{values!r} is no list, and what a sweep varies is one",
                where=f"{path}: {key}",
                fix=f"write {key}: [...], or put it under options",
            )
    for key, kind, wanted in (("options", dict, "a mapping"), ("runs", list, "a list of mappings")):
        if not isinstance(content.get(key, kind()), kind):
            raise wrong(key, wanted)
    listed = content.get("runs") or [{}]
    if not all(isinstance(entry, dict) for entry in listed):
        raise wrong("runs", "a list of mappings")
    if place and "processes" in content:
        raise ConfigError(
            "how many processes a run has in a cluster is said by the values",
            where=f"{path}: processes",
            fix="remove the key, and set distributed.nodes and nprocPerNode",
        )
    processes = str(content.get("processes", 1))
    if processes != "gpu" and not (processes.isdigit() and int(processes)):
        raise wrong("processes", "a number of processes, or gpu")
    if content.get("stop") not in (None, "median"):
        raise wrong("stop", "median")
    timeout_s = content.get("timeout_per_run_s", 7 * 86400)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0:
        raise wrong("timeout_per_run_s", "a positive number of seconds")
    shared = dict(below or {})
    if content.get("config"):
        shared |= config.read_yaml(path.parent / str(content["config"]))
    runs = []
    for entry in listed:
        for point in combinations(axes):
            varies = entry | point
            whole = shared | (content.get("options") or {}) | varies
            kept = {key: value for key, value in whole.items() if key not in NAMED}
            runs.append(FineTuneOf(varies, kept, place or processes))
    if len({run.key for run in runs}) < len(runs):
        raise ConfigError("two runs are the same", where=str(path), fix="name each combination once")
    for run in runs:
        _check(run, path, median=content.get("stop") == "median")
    return SweepFile(tuple(runs), content.get("stop") == "median", float(timeout_s))


def _check(run: FineTuneOf, path: Path, *, median: bool) -> None:
    where = f"{path}: {run.name}"
    settings = config.merged([(where, run.content | {"output_dir": "out"})])
    if median and settings.values.get("eval_strategy", "no") == "no":
        raise ConfigError(
            "stop: median compares evaluations, and eval_strategy is no",
            where=where,
            fix="options: {eval_strategy: steps, eval_steps: ...}",
        )


class Running(Protocol):
    """A run of a sweep that has been started, on this machine or elsewhere."""

    def ended(self, wait_s: float) -> bool | None:
        """Whether it ended well, None while it goes on; an end within ``wait_s`` is not missed."""

    def end(self) -> None:
        """Have it save and end, if it goes on."""

    def leave(self) -> None:
        """The sweep itself is ended: what becomes of a run that goes on."""


Begin = Callable[[FineTuneOf, Path], Running]  # a run, and its folder


class Process:
    """``podtune train`` on this machine, in a process group of its own, its output in ``log.txt``."""

    def __init__(self, run: FineTuneOf, folder: Path) -> None:
        import yaml

        whole = run.content | {"output_dir": str(folder), "run_name": run.name}
        write_whole(folder / CONFIG_FILE, yaml.safe_dump(whole, sort_keys=False))
        words = [sys.executable, "-m", "podtune.cli", "train", "-n", run.place]
        with (folder / LOG_FILE).open("ab") as output:
            self._process = subprocess.Popen(
                [*words, "--config", str(folder / CONFIG_FILE)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ended(self, wait_s: float) -> bool | None:
        """Whether it ended with 0."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        code = self._process.poll()
        return None if code is None else code == 0

    def end(self) -> None:
        """SIGTERM, and SIGKILL for one that has not saved within :data:`ENDING_S`."""
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    leave = end


@dataclass
class _Current:
    """A run that goes on, and until when it may."""

    run: FineTuneOf
    running: Running
    deadline: float


@dataclass
class Sweeper:
    """Runs a sweep into a folder, and goes on with one that was ended.

    Args:
        begin: starts a run, which leaves ``run.json`` and ``metrics.jsonl`` in its folder.
        at_once: how many runs go on at a time.
        say: takes progress lines.
    """

    sweep: SweepFile
    output: Path
    begin: Begin = Process
    at_once: int = 1
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    states: dict[str, State] = field(init=False, default_factory=dict)

    def run(self) -> dict[str, State]:
        """All runs; how each ended, by name. A run that fails does not end the sweep.

        Raises:
            SweepStopped: on Ctrl-C or SIGTERM; one that goes on is left as its kind does, and the same
            command goes on with it.
            UserError: the folder cannot be written.
        """
        try:
            self.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotCreate(f"cannot be written: {error.strerror}", where=str(self.output)) from None
        stopped = self._stopped_before()
        waiting: list[FineTuneOf] = []
        for run in self.sweep.runs:
            if run.name in stopped:
                self._has_ended(run, "stopped")
            elif (read_record(self.folder(run)) or {}).get("status") == "ok":
                self._has_ended(run, "kept")
            else:
                waiting.append(run)
        current: list[_Current] = []
        try:
            with stoppable():
                while waiting or current:
                    while waiting and len(current) < self.at_once:
                        current.append(self._begun(waiting.pop(0)))
                    for each in tuple(current):
                        if state := self._state(each, POLL_S / len(current)):
                            current.remove(each)
                            self._has_ended(each.run, state)
        finally:
            for each in current:
                each.running.leave()
        return {run.name: self.states[run.name] for run in self.sweep.runs}

    def folder(self, run: FineTuneOf) -> Path:
        """Where a run is."""
        return self.output / run.name

    def _begun(self, run: FineTuneOf) -> _Current:
        self.say(f"[{self.sweep.runs.index(run) + 1}/{len(self.sweep.runs)}] {run.name}")
        folder = self.folder(run)
        folder.mkdir(exist_ok=True)
        return _Current(run, self.begin(run, folder), time.monotonic() + self.sweep.timeout_s)

    def _state(self, current: _Current, wait_s: float) -> State | None:
        """How the run ended, None while it goes on."""
        well = current.running.ended(wait_s)
        if well is not None:
            return "ok" if well else "failed"
        verdict: State | None = None
        if self.sweep.median and self._is_worse(current.run):
            verdict = "stopped"
        elif time.monotonic() > current.deadline:
            self.say(f"    {current.run.name}: not done after {self.sweep.timeout_s:.0f} s, ended")
            verdict = "failed"
        if verdict:
            current.running.end()
        return verdict

    def _has_ended(self, run: FineTuneOf, state: State) -> None:
        self.states[run.name] = state
        runs = {run.name: self.states.get(run.name, "not run") for run in self.sweep.runs}
        varies = {run.name: run.varies for run in self.sweep.runs}
        write_json(self.output / SWEEP_FILE, {"written_at": now(), "runs": runs, "varies": varies})
        self.say(f"    {run.name}: {state}, {self._summary(run)}")

    def _is_worse(self, run: FineTuneOf) -> bool:
        """The median rule: the best evaluation so far is above the median of what the others had by then."""
        mine = _evaluations(self.folder(run))
        whole = [name for name, state in self.states.items() if state in ("ok", "kept")]
        if not mine or len(whole) < MOST_JUDGES:
            return False
        step = max(mine)
        theirs = [
            min(by_then)
            for losses in map(_evaluations, (self.output / name for name in whole))
            if (by_then := [v for s, v in losses.items() if s <= step])
        ]
        if len(theirs) < MOST_JUDGES or min(mine.values()) <= statistics.median(theirs):
            return False
        self.say(
            f"    {run.name}: stopped at step {step}, eval loss {min(mine.values()):.4f}, the median of "
            f"{len(theirs)} others had {statistics.median(theirs):.4f}"
        )
        return True

    def _summary(self, run: FineTuneOf) -> str:
        record = read_record(self.folder(run)) or {}
        losses = _evaluations(self.folder(run))
        best = f"best eval loss {min(losses.values()):.4f}" if losses else ""
        return best or str(
            record.get("reason") or record.get("status") or f"see {self.folder(run) / LOG_FILE}"
        )

    def _stopped_before(self) -> set[str]:
        try:
            content = json.loads((self.output / SWEEP_FILE).read_text(encoding="utf-8"))
            return {name for name, state in content["runs"].items() if state == "stopped"}
        except (OSError, ValueError, KeyError, AttributeError):
            return set()


def _evaluations(folder: Path) -> dict[int, float]:
    """Evaluation losses of a run by step, as far as it is."""
    try:
        lines = (folder / METRICS_FILE).read_bytes().splitlines()
    except OSError:
        return {}
    entries, _ = metrics_entries(lines)
    losses = {entry["step"]: number(entry.get("loss")) for entry in entries if entry["split"] == "eval"}
    return {step: loss for step, loss in losses.items() if loss is not None}
