"""A sweep of fine-tunes: its file, and its trials, one after another here or some at once in a cluster.

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
Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from podtune.run.errors import ConfigError
from podtune.run.files import write_atomically
from podtune.run.follow import read_record
from podtune.run.metrics_log import read_metrics
from podtune.run.record import METRICS_FILE, Json, now, number, write_json
from podtune.run.yaml_text import read_mapping
from podtune.sft.config import settings as config
from podtune.sft.config.keys import known_keys
from podtune.sweep.processes import Process
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
from podtune.sweep.sweep_file import SECONDS, check_keys, check_values, combinations, is_a

NAMED = ("output_dir", "run_name")  # the sweep says where
SAVE_S = 300.0  # to save, after SIGTERM
MIN_FINISHED_TRIALS = 3  # before one is stopped for being worse
CONFIG_FILE = "config.yaml"
DEFAULT_TIMEOUT_S = 7 * 86400


def _is_count(value: Any) -> bool:
    return str(value) == "gpu" or (str(value).isdigit() and int(value) > 0)


#: the sweep's own keys; any other is a key of training
KEYS = {
    "config": ("the path of a training YAML", lambda value: True),
    "options": ("a mapping", is_a(dict)),
    "runs": ("a list of mappings", lambda value: isinstance(value, list) and all(map(is_a(dict), value))),
    "processes": ("a number of processes, or gpu", _is_count),
    "stop": ("median", lambda value: value in (None, "median")),
    "timeout_per_run_s": SECONDS,
}


@dataclass(frozen=True)
class Trial:
    """One fine-tune of a sweep.

    Args:
        varies: the keys that tell it from the others.
        content: its whole training YAML.
        place: where it runs: the number of processes on this machine, or what else tells places apart.
    """

    varies: dict[str, Any]
    content: dict[str, Any]
    place: str

    @property
    def key(self) -> str:
        """A hash of its configuration and place: a finished trial of an equal one need not be repeated."""
        asked = json.dumps([self.content, self.place], sort_keys=True, default=str)
        return hashlib.sha256(asked.encode()).hexdigest()

    @property
    def name(self) -> str:
        """The keys it varies, and the beginning of its hash."""
        words = [f"{key}-{value}".replace("/", "_").replace(" ", "") for key, value in self.varies.items()]
        return "_".join([*words, self.key[:6]])[-120:].lstrip("-_.")


@dataclass(frozen=True)
class TrialSweep:
    """A sweep file, every trial of it checked."""

    trials: tuple[Trial, ...]
    median: bool
    timeout_s: float


def read_sweep(path: Path, *, place: str = "", below: Mapping[str, Any] | None = None) -> TrialSweep:
    """Parse a sweep file, and check each trial's configuration as training would. Starts nothing.

    Args:
        place: where the trials are started, if not in processes of this machine.
        below: training keys that the file's own ones overrule.

    Raises:
        UserError: unreadable, a key that neither sweeps nor training know, or a value that training refuses.
    """
    content = read_mapping(path, fix="give a sweep file: see podtune sweep --help")
    check_values(content, KEYS, path)
    axes = _axes(content, path)
    if place and "processes" in content:
        raise ConfigError(
            "the number of processes of a run in a cluster is said by the values",
            where=f"{path}: processes",
            fix="remove the key, and set distributed.nodes and nprocPerNode",
        )
    shared = dict(below or {})
    if content.get("config"):
        shared |= config.read_yaml(path.parent / str(content["config"]))
    shared |= content.get("options", {})
    trials = []
    for entry in content.get("runs") or [{}]:
        for point in combinations(axes):
            varies = entry | point
            kept = {key: value for key, value in (shared | varies).items() if key not in NAMED}
            trials.append(Trial(varies, kept, place or str(content.get("processes", 1))))
    if len({trial.key for trial in trials}) < len(trials):
        raise ConfigError("two runs are the same", where=str(path), fix="name each combination once")
    median = content.get("stop") == "median"
    for trial in trials:
        _check_trial(trial, path, median=median)
    return TrialSweep(tuple(trials), median, float(content.get("timeout_per_run_s", DEFAULT_TIMEOUT_S)))


def _axes(content: Json, path: Path) -> dict[str, list[Any]]:
    """The training keys with a list of values each."""
    known = [*KEYS, *known_keys()]
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
                f"{values!r} is not a list, and what a sweep varies is one",
                where=f"{path}: {key}",
                fix=f"write {key}: [...], or put it under options",
            )
    return axes


def _check_trial(trial: Trial, path: Path, *, median: bool) -> None:
    where = f"{path}: {trial.name}"
    settings = config.merged([(where, trial.content | {"output_dir": "out"})])
    if median and settings.values.get("eval_strategy", "no") == "no":
        raise ConfigError(
            "stop: median compares evaluations, and eval_strategy is no",
            where=where,
            fix="options: {eval_strategy: steps, eval_steps: ...}",
        )


Begin = Callable[[Trial, Path], Running]  # a trial, and its folder


def start_here(trial: Trial, folder: Path) -> Running:
    """Start ``podtune train`` on this machine, its output in ``log.txt``."""
    import yaml

    whole = trial.content | {"output_dir": str(folder), "run_name": trial.name}
    write_atomically(folder / CONFIG_FILE, yaml.safe_dump(whole, sort_keys=False))
    words = [sys.executable, "-m", "podtune.cli", "train", "-n", trial.place]
    return Process([*words, "--config", str(folder / CONFIG_FILE)], folder / LOG_FILE, SAVE_S)


@dataclass
class TrialRunner:
    """A sweep of fine-tunes into a folder; a later one into the same folder resumes it.

    Args:
        begin: starts a trial, which leaves ``run.json`` and ``metrics.jsonl`` in its folder.
        at_once: how many run at a time.
        say: takes progress lines.
    """

    sweep: TrialSweep
    output: Path
    begin: Begin = start_here
    at_once: int = 1
    say: Say = to_stderr
    _runner: SweepRunner = field(init=False)

    def run(self) -> dict[str, State]:
        """Run all trials; how each ended, by name.

        Raises:
            SweepStopped: on Ctrl-C or SIGTERM; the same command resumes.
            UserError: the folder cannot be written, or another sweep works there.
        """
        with own_folder(self.output):
            return self._run()

    def _run(self) -> dict[str, State]:
        stopped = self._stopped_before()
        jobs = [
            Job(
                name=trial.name,
                start=partial(self._start, trial),
                limit_s=self.sweep.timeout_s,
                conclude=partial(self._conclude, trial),
                summary=partial(self._summary, trial),
                progress=partial(last_line, self.output / trial.name / LOG_FILE),
                is_worse=partial(self._is_worse, trial),
                before="stopped" if trial.name in stopped else self._kept(trial),
            )
            for trial in self.sweep.trials
        ]
        self._runner = SweepRunner(jobs, self._write, self.at_once, self.say)
        return self._runner.run()

    def _stopped_before(self) -> set[str]:
        try:
            content = json.loads((self.output / SWEEP_FILE).read_text(encoding="utf-8"))
            return {name for name, state in content["runs"].items() if state == "stopped"}
        except (OSError, ValueError, KeyError, AttributeError):
            return set()

    def _kept(self, trial: Trial) -> State | None:
        return "kept" if (read_record(self.output / trial.name) or {}).get("status") == "ok" else None

    def _start(self, trial: Trial) -> Running:
        folder = self.output / trial.name
        folder.mkdir(exist_ok=True)
        running = self.begin(trial, folder)
        if (folder / LOG_FILE).exists():
            self.say(f"    log {folder / LOG_FILE}; or: podtune watch {folder}")
        return running

    def _conclude(self, trial: Trial, outcome: Outcome) -> State:
        if outcome.code is None:
            self.say(f"    {trial.name}: not done after {self.sweep.timeout_s:.0f} s, ended")
        return "ok" if outcome.code == 0 else "failed"

    def _is_worse(self, trial: Trial) -> bool:
        """The median rule: its best evaluation is above the median of the best of the others by that step."""
        own = _evaluations(self.output / trial.name) if self.sweep.median else {}
        if not own:
            return False
        step, best = max(own), min(own.values())
        finished = [name for name, state in self._runner.states.items() if state in ("ok", "kept")]
        others = [
            min(by_then)
            for losses in (_evaluations(self.output / name) for name in finished)
            if (by_then := [loss for at, loss in losses.items() if at <= step])
        ]
        if len(others) < MIN_FINISHED_TRIALS or best <= (median := statistics.median(others)):
            return False
        self.say(
            f"    {trial.name}: stopped at step {step}, eval loss {best:.4f}, the median of "
            f"{len(others)} others had {median:.4f}"
        )
        return True

    def _summary(self, trial: Trial, state: State) -> str:
        folder = self.output / trial.name
        record, losses = read_record(folder) or {}, _evaluations(folder)
        best = f"best eval loss {min(losses.values()):.4f}" if losses else ""
        end = best or record.get("reason") or record.get("status") or f"see {folder / LOG_FILE}"
        return f"{state}, {end}"

    def _write(self, states: dict[str, str]) -> None:
        varies = {trial.name: trial.varies for trial in self.sweep.trials}
        write_json(self.output / SWEEP_FILE, {"written_at": now(), "runs": states, "varies": varies})


def last_line(log: Path) -> str:
    """The last whole line of a log, of which only the end is read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""


def _evaluations(folder: Path) -> dict[int, float]:
    """Evaluation losses of a trial by step, so far."""
    try:
        entries, _ = read_metrics(folder / METRICS_FILE)
    except OSError:
        return {}
    losses = {entry["step"]: number(entry.get("loss")) for entry in entries if entry["split"] == "eval"}
    return {step: loss for step, loss in losses.items() if loss is not None}
