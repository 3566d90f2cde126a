"""A sweep of fine-tunes: one after another on this machine, each with what it varies. Needs no torch.

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
what training leaves there. A run's folder is named by what it varies and a hash of its whole configuration,
so that another configuration is another run.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from podtune.run.errors import CANNOT_CREATE, CONFIG, UserError
from podtune.run.files import write_whole
from podtune.run.follow import read_record
from podtune.run.record import METRICS_FILE, metrics_entries, now, number, write_json
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
    """One run of a sweep: what it ``varies``, and its whole training YAML."""

    varies: dict[str, Any]
    content: dict[str, Any]
    processes: str

    @property
    def key(self) -> str:
        """A hash of all that was asked: a finished run of an equal one need not be repeated."""
        asked = json.dumps([self.content, self.processes], sort_keys=True, default=str)
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


def read(path: Path) -> SweepFile:
    """Parse a sweep file, and check each run's configuration as training would. Starts nothing.

    Raises:
        UserError: unreadable, a key that neither sweeps nor training know, or a value that training refuses.
    """
    content = read_mapping(path, fix="give a sweep file", usage="see podtune sweep --help")
    known = [*KEYS, *config.known_keys()]

    def wrong(key: str, wanted: str) -> UserError:
        return UserError(f"{content[key]!r} is not {wanted}", where=f"{path}: {key}", code=CONFIG)

    check_keys([key for key in content if key not in NAMED], known, str(path))
    if set(NAMED) & set(content) | set(NAMED) & set(content.get("options") or {}):
        raise UserError(
            "a sweep names its runs and their folders itself",
            where=f"{path}: output_dir, run_name",
            fix="remove the key; --output says where",
        )
    axes = {key: value for key, value in content.items() if key not in KEYS}
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise UserError(
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
    processes = str(content.get("processes", 1))
    if processes != "gpu" and not (processes.isdigit() and int(processes)):
        raise wrong("processes", "a number of processes, or gpu")
    if content.get("stop") not in (None, "median"):
        raise wrong("stop", "median")
    timeout_s = content.get("timeout_per_run_s", 7 * 86400)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0:
        raise wrong("timeout_per_run_s", "a positive number of seconds")
    shared = config.read_yaml(path.parent / str(content["config"])) if content.get("config") else {}
    runs = []
    for entry in listed:
        for point in combinations(axes):
            varies = entry | point
            whole = shared | (content.get("options") or {}) | varies
            runs.append(FineTuneOf(varies, {k: v for k, v in whole.items() if k not in NAMED}, processes))
    if len({run.key for run in runs}) < len(runs):
        raise UserError("two runs are the same", where=str(path), fix="name each combination once")
    for run in runs:
        _check(run, path, median=content.get("stop") == "median")
    return SweepFile(tuple(runs), content.get("stop") == "median", float(timeout_s))


def _check(run: FineTuneOf, path: Path, *, median: bool) -> None:
    where = f"{path}: {run.name}"
    settings = config.merged([(where, run.content | {"output_dir": "out"})])
    if median and settings.values.get("eval_strategy", "no") == "no":
        raise UserError(
            "stop: median compares evaluations, and eval_strategy is no",
            where=where,
            fix="options: {eval_strategy: steps, eval_steps: ...}",
        )


Start = Callable[[Path, str, Path], subprocess.Popen[bytes]]


def start(config_file: Path, processes: str, log: Path) -> subprocess.Popen[bytes]:
    """``podtune train`` in a process group of its own, its output in ``log``."""
    words = [sys.executable, "-m", "podtune.cli", "train", "-n", processes, "--config", str(config_file)]
    with log.open("ab") as output:
        return subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


@dataclass
class Sweeper:
    """Runs a sweep into a folder, and goes on with one that was ended.

    Args:
        begin: starts a run, see :func:`start`.
        say: takes progress lines.
    """

    sweep: SweepFile
    output: Path
    begin: Start = start
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)

    def run(self) -> dict[str, State]:
        """All runs; how each ended, by name. A run that fails does not end the sweep.

        Raises:
            SweepStopped: on Ctrl-C or SIGTERM; the running one saves first, and the same command goes on
            with it.
            UserError: the folder cannot be written.
        """
        try:
            self.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot be written: {error.strerror}", where=str(self.output), code=CANNOT_CREATE
            ) from None
        states: dict[str, State] = {}
        stopped = self._stopped_before()
        with stoppable():
            for index, run in enumerate(self.sweep.runs):
                self.say(f"[{index + 1}/{len(self.sweep.runs)}] {run.name}")
                if run.name in stopped:
                    states[run.name] = "stopped"
                elif (read_record(self.folder(run)) or {}).get("status") == "ok":
                    states[run.name] = "kept"
                else:
                    whole = [name for name, state in states.items() if state in ("ok", "kept")]
                    states[run.name] = self._train(run, whole)
                self._write(states)
                self.say(f"    {states[run.name]}: {self._summary(run)}")
        return states

    def folder(self, run: FineTuneOf) -> Path:
        """Where a run is."""
        return self.output / run.name

    def _train(self, run: FineTuneOf, before: Sequence[str]) -> State:
        import yaml

        folder = self.folder(run)
        folder.mkdir(exist_ok=True)
        whole = run.content | {"output_dir": str(folder), "run_name": run.name}
        write_whole(folder / CONFIG_FILE, yaml.safe_dump(whole, sort_keys=False))
        process = self.begin(folder / CONFIG_FILE, run.processes, folder / LOG_FILE)
        end = time.monotonic() + self.sweep.timeout_s
        verdict: State | None = None
        try:
            while process.poll() is None:
                if verdict is None and self.sweep.median and self._is_worse(run, before):
                    verdict = "stopped"
                elif verdict is None and time.monotonic() > end:
                    self.say(f"    not done after {self.sweep.timeout_s:.0f} s, ended")
                    verdict = "failed"
                if verdict:
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
        finally:
            _end(process)
        if verdict:
            return verdict
        return "ok" if process.returncode == 0 else "failed"

    def _is_worse(self, run: FineTuneOf, before: Sequence[str]) -> bool:
        """The median rule: the best evaluation so far is above the median of what the others had by then."""
        mine = _evaluations(self.folder(run))
        others = [_evaluations(self.output / name) for name in before]
        if not mine or len(others) < MOST_JUDGES:
            return False
        step = max(mine)
        theirs = [
            min(by_then) for losses in others if (by_then := [v for s, v in losses.items() if s <= step])
        ]
        if len(theirs) < MOST_JUDGES or min(mine.values()) <= statistics.median(theirs):
            return False
        self.say(
            f"    stopped at step {step}: eval loss {min(mine.values()):.4f}, the median of "
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

    def _write(self, states: Mapping[str, State]) -> None:
        runs = {run.name: states.get(run.name, "not run") for run in self.sweep.runs}
        varies = {run.name: run.varies for run in self.sweep.runs}
        write_json(self.output / SWEEP_FILE, {"written_at": now(), "runs": runs, "varies": varies})


def _evaluations(folder: Path) -> dict[int, float]:
    """Evaluation losses of a run by step, as far as it is."""
    try:
        lines = (folder / METRICS_FILE).read_bytes().splitlines()
    except OSError:
        return {}
    entries, _ = metrics_entries(lines)
    losses = {entry["step"]: number(entry.get("loss")) for entry in entries if entry["split"] == "eval"}
    return {step: loss for step, loss in losses.items() if loss is not None}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a run that goes on to save and end, and see that it does."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
