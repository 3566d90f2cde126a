"""podtune from Python, for notebooks and scripts. Everything here is also in ``podtune`` itself.

    import podtune

    run = podtune.fine_tune("sft.yaml", output_dir="runs/first", learning_rate=1e-4)
    print(run.status, run.last("eval", "loss"))
    print(podtune.compare("runs/first", "runs/second")["verdict"]["text"])

Errors that the caller can mend are :class:`podtune.UserError`: what is wrong, where, how to mend it.
Libraries are imported when a function needs them; ``import podtune`` loads none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podtune.run.errors import UsageError, UserError
from podtune.run.yaml_text import read_mapping

if TYPE_CHECKING:
    from podtune.cluster.lint.check import Verdict
    from podtune.plan.plan import Plan
    from podtune.report.runs.runs import Run

StrPath = str | os.PathLike[str]

__all__ = ["UserError", "compare", "fine_tune", "lint", "load", "plan_memory", "render"]


def fine_tune(
    config: Mapping[str, Any] | StrPath, *, processes: int | str = 1, quiet: bool = False, **overrides: Any
) -> Run:
    """Fine-tune on this machine and return the run.

    Args:
        config: the keys of docs/configuration.md, or a YAML file of them.
        processes: how many; ``"gpu"`` for one on each GPU.
        quiet: do not print what the run prints.
        overrides: keys that win over ``config``: ``learning_rate=1e-4``.

    Raises:
        UserError: the run failed; the message is its last words, the code its exit code.
    """
    import yaml

    if isinstance(config, Mapping):
        settings = {**config, **overrides}
    else:
        settings = {**read_mapping(Path(config), fix="name an existing YAML file"), **overrides}
    if not settings.get("output_dir"):
        raise UsageError("there is no output_dir", where="fine_tune", fix="name the folder of the run")
    with tempfile.TemporaryDirectory(prefix="podtune-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        # a process of its own: its memory and its process group end with it
        # -P: the working directory, which may be anybody's, is not imported from
        command = [sys.executable, "-P", "-m", "podtune.cli", "train"]
        command += ["-n", str(processes), "--config", str(file)]
        last_words: deque[str] = deque(maxlen=20)
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                for line in process.stdout or ():
                    last_words.append(line)
                    if not quiet:
                        print(line, end="", flush=True)
            except BaseException:  # an interrupted notebook cell ends the run, which saves first
                process.terminate()
                raise
    if process.returncode:
        what = "the run failed:\n" + "".join(last_words)
        raise UserError(what, where=str(settings["output_dir"]), code=process.returncode)
    return load(settings["output_dir"])


def load(run: StrPath) -> Run:
    """A run by its folder: ``record``, ``status``, ``measurements``, ``curve("eval", "loss")``."""
    from podtune.report.runs.runs import load_run

    return load_run(Path(run))


def compare(*runs: StrPath | Run) -> dict[str, Any]:
    """Two or more runs side by side: ``differences``, ``at_equal``, ``final``, ``verdict`` and more."""
    from podtune.report.compare.comparison import compare as compare_runs
    from podtune.report.runs.runs import Run

    if len(runs) < 2:
        raise UsageError("a comparison needs two runs", where="compare", fix="name a second one")
    return compare_runs([run if isinstance(run, Run) else load(run) for run in runs]).as_json()


def lint(*manifests: StrPath) -> Verdict:
    """Check manifests: files, or text of several lines. ``verdict.findings`` is what was found."""
    from podtune.cluster.lint.check import lint as check

    sources = []
    for manifest in manifests:
        if isinstance(manifest, str) and "\n" in manifest:
            sources.append(("manifest", manifest))
        else:
            sources.append((str(manifest), Path(manifest).read_text(encoding="utf-8")))
    return check(sources)


def render(*values: StrPath, sets: Sequence[str] = (), name: str = "run", namespace: str = "default") -> str:
    """The manifests of a job: values files or names of shipped profiles, and ``"a.b=c"`` as helm's --set."""
    from podtune.commands.manifests import chart_manifests

    return chart_manifests([Path(file) for file in values], list(sets), name, namespace)


def plan_memory(model: str, *, strategy: str, world_size: int, **settings: Any) -> Plan:
    """Memory, traffic and step time of a strategy, before anything is started: ``podtune bench plan``.

    ``settings`` are the fields of :class:`podtune.plan.setup.TrainingSetup` (``precision``, ``batch_size``,
    ``nodes`` and more) and the arguments of :func:`podtune.plan.plan.estimate`; ``hardware`` is a name such
    as ``"H100"`` and ``sequence_length`` a number of tokens.
    """
    from podtune.plan.hardware import hardware_row
    from podtune.plan.models import shape_of
    from podtune.plan.plan import estimate
    from podtune.plan.setup import TrainingSetup

    on = {name: settings.pop(name) for name in ("interconnect", "utilisation") if name in settings}
    row = settings.pop("hardware", None)
    shape = shape_of(model, settings.pop("sequence_length", None))
    setup = TrainingSetup(shape, strategy, world_size, **settings)
    return estimate(setup, hardware_row(row) if isinstance(row, str) else row, **on)
