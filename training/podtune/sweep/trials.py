"""A sweep of fine-tunes: its file, and its trials, one after another here or some at once in a cluster.

``podtune sweep --help`` shows a sweep file. Below the output folder: ``sweep.json`` and, for each run, a
folder with its ``config.yaml``, ``log.txt`` and what training leaves there (of a run elsewhere: its
``run.json`` and ``metrics.jsonl``). A run's folder is named by what it varies and a hash of its whole
configuration, so that another configuration is another run. Needs no torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podtune.run.errors import ConfigError
from podtune.run.files import write_atomically
from podtune.run.follow import read_record
from podtune.run.metrics_log import read_metrics
from podtune.run.record import METRICS_FILE, Json, number
from podtune.run.yaml_text import read_mapping
from podtune.sft.config import settings as config
from podtune.sft.config.keys import known_keys
from podtune.sweep.processes import Process
from podtune.sweep.runner import LOG_FILE, SWEEP_FILE, Outcome, Running, Say, State, Sweep, to_stderr
from podtune.sweep.sweep_file import check_keys, check_values

NAMED = ("output_dir", "run_name")  # the sweep says where
#: the sweep's own keys; any other is a key of training
KINDS = {"config": str, "options": dict, "runs": list, "processes": object, "stop": object}
SAVE_S = 300.0  # to save, after SIGTERM
MIN_FINISHED_TRIALS = 3  # before one is stopped for being worse
CONFIG_FILE = "config.yaml"


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
    def name(self) -> str:
        """The keys it varies, and the beginning of a hash of its configuration and place."""
        asked = json.dumps([self.content, self.place], sort_keys=True, default=str)
        words = [f"{key}-{value}".replace("/", "_").replace(" ", "") for key, value in self.varies.items()]
        key = hashlib.sha256(asked.encode()).hexdigest()[:6]
        return "_".join([*words, key])[-120:].lstrip("-_.")


@dataclass(frozen=True)
class TrialSweep:
    """A sweep file, every trial of it checked."""

    trials: tuple[Trial, ...]
    median: bool


def read_sweep(path: Path, *, place: str = "", below: Mapping[str, Any] | None = None) -> TrialSweep:
    """Parse a sweep file, and check each trial's configuration as training would. Starts nothing.

    Args:
        place: where the trials are started, if not in processes of this machine.
        below: training keys that the file's own ones overrule.

    Raises:
        UserError: unreadable, a key that neither sweeps nor training know, or a value that training refuses.
    """
    content = read_mapping(path, fix="give a sweep file: see podtune sweep --help")
    check_values(content, KINDS, path)
    axes = _axes(content, path)
    processes, stop = str(content.get("processes", 1)), content.get("stop")
    if processes != "gpu" and not (processes.isdigit() and int(processes)):
        raise ConfigError(f"{processes} is not a number of processes, or gpu", where=f"{path}: processes")
    if place and "processes" in content:
        raise ConfigError(
            "the number of processes of a run in a cluster is said by the values",
            where=f"{path}: processes",
            fix="remove the key, and set distributed.nodes and nprocPerNode",
        )
    if stop not in (None, "median"):
        raise ConfigError(f"{stop!r} is not median", where=f"{path}: stop")
    shared = dict(below or {})
    if content.get("config"):
        shared |= config.read_yaml(path.parent / content["config"])
    shared |= content.get("options", {})
    trials = []
    for entry in content.get("runs") or [{}]:
        for point in itertools.product(*axes.values()):
            varies = entry | dict(zip(axes, point, strict=True))
            kept = {key: value for key, value in (shared | varies).items() if key not in NAMED}
            trials.append(Trial(varies, kept, place or processes))
    if len({trial.name for trial in trials}) < len(trials):
        raise ConfigError("two runs are the same", where=str(path), fix="name each combination once")
    for trial in trials:
        _check_trial(trial, path, median=stop == "median")
    return TrialSweep(tuple(trials), stop == "median")


def _axes(content: Json, path: Path) -> dict[str, list[Any]]:
    """The training keys with a list of values each."""
    given = {*content, *content.get("options", {})}
    if named := given & {*NAMED}:
        raise ConfigError(
            "a sweep names its runs and their folders itself",
            where=f"{path}: {', '.join(sorted(named))}",
            fix="remove the key; --output says where",
        )
    check_keys(content, [*KINDS, *known_keys()], str(path))
    axes = {key: value for key, value in content.items() if key not in KINDS}
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


class TrialRunner(Sweep[Trial]):
    """A sweep of fine-tunes.

    Args:
        begin: starts a trial, which leaves ``run.json`` and ``metrics.jsonl`` in its folder.
    """

    def __init__(
        self,
        sweep: TrialSweep,
        output: Path,
        begin: Begin = start_here,
        *,
        at_once: int = 1,
        say: Say = to_stderr,
    ) -> None:
        super().__init__(sweep.trials, output, at_once=at_once, say=say)
        self.median, self.begin = sweep.median, begin
        self._recorded: Json = {}
        if (file := output / SWEEP_FILE).exists():
            self._recorded = json.loads(file.read_text(encoding="utf-8"))["runs"]

    def before(self, trial: Trial) -> State | None:
        """Stopped for its results, or kept."""
        if self._recorded.get(trial.name) == "stopped":
            return "stopped"
        return "kept" if (read_record(self.output / trial.name) or {}).get("status") == "ok" else None

    def start(self, trial: Trial) -> Running:
        """Begin it; say where its log is, if it has one here."""
        folder = self.output / trial.name
        folder.mkdir(exist_ok=True)
        running = self.begin(trial, folder)
        if (folder / LOG_FILE).exists():
            self.say(f"    log {folder / LOG_FILE}; or: podtune watch {folder}")
        return running

    def conclude(self, trial: Trial, outcome: Outcome) -> State:
        """Its records are there: training writes them."""
        return "ok" if outcome.code == 0 else "failed"

    def is_worse(self, trial: Trial) -> bool:
        """The median rule: its best evaluation is above the median of the best of the others by that step."""
        own = _evaluations(self.output / trial.name) if self.median else {}
        if not own:
            return False
        step, best = max(own), min(own.values())
        finished = [name for name, state in self.states.items() if state in ("ok", "kept")]
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

    def summary(self, trial: Trial, state: State) -> str:
        """Its best evaluation, or how it ended."""
        folder = self.output / trial.name
        record, losses = read_record(folder) or {}, _evaluations(folder)
        best = f"best eval loss {min(losses.values()):.4f}" if losses else ""
        end = best or record.get("reason") or record.get("status") or f"see {folder / LOG_FILE}"
        return f"{state}, {end}"

    def content(self, states: dict[str, str]) -> Json:
        """The trials' states, and what they vary."""
        return {"runs": states, "varies": {trial.name: trial.varies for trial in self.configurations}}


def _evaluations(folder: Path) -> dict[int, float]:
    """Evaluation losses of a trial by step, so far."""
    try:
        entries, _ = read_metrics(folder / METRICS_FILE)
    except OSError:
        return {}
    losses = {entry["step"]: number(entry.get("loss")) for entry in entries if entry["split"] == "eval"}
    return {step: loss for step, loss in losses.items() if loss is not None}
