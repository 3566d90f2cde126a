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
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podtune.run.errors import ConfigError
from podtune.run.files import write_atomically
from podtune.run.follow import read_record
from podtune.run.record import Json, Losses, Measurements
from podtune.run.yaml_text import read_mapping
from podtune.sft.config import settings as config
from podtune.sft.config.keys import known_keys
from podtune.sweep.processes import Process
from podtune.sweep.runner import LOG_FILE, Begin, Outcome, Running, Say, State, Sweep, to_stderr
from podtune.sweep.sweep_file import check_keys, check_values

NAMED = ("output_dir", "run_name")  # the sweep says where
#: the sweep's own keys; any other is a key of training
KINDS = {"config": str, "options": dict, "runs": list, "processes": object}
SAVE_S = 300.0  # to save, after SIGTERM
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


def read_sweep(path: Path, *, place: str = "", below: Mapping[str, Any] | None = None) -> list[Trial]:
    """The trials of a sweep file; check each trial's configuration as training would. Starts nothing.

    Args:
        place: where the trials are started, if not in processes of this machine.
        below: training keys that the file's own ones overrule.

    Raises:
        UserError: unreadable, a key that neither sweeps nor training know, or a value that training refuses.
    """
    content = read_mapping(path, fix="give a sweep file: see podtune sweep --help")
    check_values(content, KINDS, path)
    axes = _axes(content, path)
    processes = str(content.get("processes", 1))
    if processes != "gpu" and not (processes.isdigit() and int(processes)):
        raise ConfigError(f"{processes} is not a number of processes, or gpu", where=f"{path}: processes")
    if place and "processes" in content:
        raise ConfigError(
            "the number of processes of a run in a cluster is said by the values",
            where=f"{path}: processes",
            fix="remove the key, and set distributed.nodes and nprocPerNode",
        )
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
        config.merged([(f"{path}: {trial.name}", trial.content | {"output_dir": "out"})])
    return trials


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
        trials: Sequence[Trial],
        output: Path,
        begin: Begin[Trial] = start_here,
        *,
        at_once: int = 1,
        say: Say = to_stderr,
    ) -> None:
        super().__init__(trials, output, at_once=at_once, say=say)
        self.begin = begin

    def before(self, trial: Trial) -> State | None:
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

    def summary(self, trial: Trial, state: State) -> str:
        """Its last evaluation, or how it ended."""
        folder = self.output / trial.name
        record = read_record(folder) or {}
        loss = (Measurements.read(record).loss or Losses()).eval
        evaluated = f"eval loss {loss:.4f}" if loss is not None else ""
        end = evaluated or record.get("reason") or record.get("status") or f"see {folder / LOG_FILE}"
        return f"{state}, {end}"

    def content(self, states: dict[str, str]) -> dict[str, object]:
        return {"runs": states, "varies": {trial.name: trial.varies for trial in self.configurations}}
