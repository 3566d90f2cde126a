"""A run while it goes on, in a terminal: progress, time left, loss, speed, evaluation, warnings. No torch.

It only reads, so it can be started and stopped at will: a folder's files on any machine that sees them
(:class:`FolderView`), or what a job's pods say (:class:`podtune.report.runs.job.JobView`).
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podtune.report.draw.tables import duration, shown
from podtune.report.runs.progress import progress
from podtune.report.runs.runs import Run, load_run
from podtune.run.errors import printable
from podtune.run.follow import MetricsTail, read_record
from podtune.run.log_lines import is_slow, per_pod, waits_for_data
from podtune.run.record import Json, number, sound

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESH_S = 1.0
BARS = "▁▂▃▄▅▆▇█"


def watch(view: View, *, once: bool, refresh_s: float = REFRESH_S) -> None:
    """Show the run until it ends or Ctrl-C; ``once``, or where stdout is no terminal: print it as it stands.

    Raises:
        UserError: the run is gone.
    """
    from rich.console import Console

    console = Console(highlight=False)
    if once or not console.is_terminal:
        console.print(view.render(width=console.width))
        return
    from rich.live import Live

    first = view.render(width=console.width)
    with Live(
        first, console=console, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False
    ) as live:
        while not view.over:
            time.sleep(refresh_s)
            view.update()
            live.update(view.render(width=console.width))


class View(ABC):
    """The last state of a run, and how it is shown."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @abstractmethod
    def update(self) -> None:
        """Read what is new."""

    @property
    def over(self) -> bool:
        """True if nothing more will come."""
        return self.run.status not in ("running", "silent")

    def render(self, *, width: int) -> RenderableType:
        """A panel of at most ``width`` characters."""
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        run = self.run
        going = progress(run)
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(overflow="fold")
        if going.share is not None:
            rows.add_row("done", ProgressBar(total=1.0, completed=going.share, width=max(10, width - 20)))
        for label, value in self.facts(spark_width=max(10, min(60, width - 40))):
            rows.add_row(label, Text(printable(value)))
        parts: list[Any] = [rows]
        parts += [Text(printable(f"! {warning}"), style="yellow") for warning in self.warnings()]
        return Panel(
            Group(*parts),
            title=Text(printable(f"{run.name} · {run.one_line()}")),
            title_align="left",
            width=width,
        )

    def facts(self, *, spark_width: int) -> list[tuple[str, str]]:
        """Label and value of each line; what is not recorded has no line."""
        run, going = self.run, progress(self.run)
        total = f" of {going.total_steps:,}" if going.total_steps else ""
        left = (
            f", {duration(going.eta_s)} left" if going.eta_s is not None and run.status == "running" else ""
        )
        if run.status == "running":
            facts = [("step", f"{going.step:,}{total}, running for {duration(run.seconds())}{left}")]
        else:
            after = f" after {duration(run.seconds())}" if run.seconds() is not None else ""
            reason = f": {run.record['reason']}" if run.record.get("reason") else ""
            facts = [("step", f"{going.step:,}{total}, {run.status}{after}{reason}")]
        losses = run.curve("train", "loss")[1]
        if losses:
            facts.append(
                ("loss", f"{shown(losses[-1])}  {sparkline(losses, spark_width)}  from {shown(losses[0])}")
            )
        rate, step_time = run.last("train", "tokens_per_s"), run.last("train", "step_time_s")
        if rate is not None:
            facts.append(
                ("speed", f"{shown(rate)} tokens/s" + (f", {shown(step_time)} s a step" if step_time else ""))
            )
        if run.entries.get("eval"):
            facts.append(("evaluation", self._evaluation(run.entries["eval"][-1])))
        facts += [(name, _use(machine)) for name, machine in self.machines() if machine]
        if answer := self._sample():
            facts.append(("last answer", answer))
        return facts

    def _evaluation(self, entry: dict[str, Any]) -> str:
        keys = [
            key for key in ("loss", "perplexity", "mean_token_accuracy") if number(entry.get(key)) is not None
        ]
        return f"at step {int(entry['step']):,}: " + ", ".join(
            f"{key.replace('_', ' ')} {shown(number(entry[key]))}" for key in keys
        )

    def machines(self) -> list[tuple[str, Json]]:
        """Each pod's name and its last figures: memory and GPU use, as they were recorded."""
        system = machine_figures(self.run)
        pods = per_pod(system, int(self.run.record.get("nproc_per_node") or 1)) if system else []
        return [("machine" if len(pods) == 1 else f"pod {index}", pod) for index, pod in enumerate(pods)]

    def _sample(self) -> str | None:
        for entry in reversed(self.run.entries.get("eval", [])):
            if isinstance(entry.get("sample"), str):
                return str(entry["sample"])
        samples = (self.run.measurements.answers or {}).get("samples")
        if isinstance(samples, list) and samples and isinstance(samples[-1], dict):
            return f"{samples[-1].get('prompt', '')} → {samples[-1].get('tuned', '')}"
        return None

    def warnings(self) -> list[str]:
        """Warnings for a person: dead or silent process, loss not finite or rising, slow rank, slow data."""
        run, going = self.run, progress(self.run)
        warnings = []
        if run.status == "died":
            warnings.append(
                "the process is gone and left no result: see its log; the same command resumes from the last "
                "checkpoint"
            )
        if run.status == "silent":
            warnings.append(
                "no sign of life from its host for a minute: it died, its volume hangs, or the clocks differ"
            )
        if going.stalled and going.silent_s is not None:
            warnings.append(
                f"no step for {duration(going.silent_s)}: a rank hangs, or the data does not come"
            )
        last = run.last("train", "loss")
        if last is not None and not math.isfinite(last):
            warnings.append(f"the loss is {last}")
        losses = run.curve("train", "loss")[1]
        if len(losses) >= 20 and min(losses[-5:]) > 2 * min(losses):
            warnings.append(
                f"the loss rose from {shown(min(losses))} to {shown(losses[-1])}: a lower learning rate may "
                "help"
            )
        return warnings + self._system_warnings(machine_figures(run))

    def _system_warnings(self, system: Json) -> list[str]:
        warnings = []
        if is_slow(system):
            rank, per_rank = int(system["slowest_rank"]), system.get("per_rank") or {}
            parts = [
                f"{per_rank[name][rank]:.2g} s {what}" for name, what in OWN_TIMES.items() if name in per_rank
            ]
            each = f" ({', '.join(parts)} a step)" if parts else ""
            warnings.append(
                f"rank {rank} is slow: the others wait for it, it takes {system['slowest_ratio']:.1f} times "
                f"as long as they do{each}"
            )
        if waits_for_data(system):
            warnings.append(
                f"{system['data_wait_share']:.0%} of a step waits for data: more dataloader_num_workers may "
                "help"
            )
        return warnings


def machine_figures(run: Run) -> Json:
    """The last system line of a run, without what is no number of a rank; empty while there is none."""
    line = (run.entries.get("system") or [{}])[-1]
    figures: Json = {name: value for name, value in line.items() if number(value) is not None}
    per_rank = line.get("per_rank")
    if isinstance(per_rank, dict) and all(map(_is_column, per_rank.values())):
        figures["per_rank"] = per_rank
    if "per_pod" in line:  # as a log told it
        figures["per_pod"] = line["per_pod"]
    return figures


def _is_column(values: object) -> bool:
    return isinstance(values, list) and all(value is None or number(value) is not None for value in values)


OWN_TIMES = {"data_wait_s": "for its data", "forward_s": "for its forward pass"}


def _use(machine: Json) -> str:
    parts = (
        [f"GPU {machine['gpu_utilisation_percent']:.0f}% busy"]
        if "gpu_utilisation_percent" in machine
        else []
    )
    if "gpu_memory_gib" in machine:
        parts.append(f"{shown(machine['gpu_memory_gib'], 3)} GiB of GPU memory")
    if "rss_gib" in machine:
        parts.append(f"{shown(machine['rss_gib'], 3)} GiB of memory")
    return ", ".join(parts)


class FolderView(View):
    """A run's folder, kept up to date from its files; only new metrics lines are parsed."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(load_run(Path(run_dir), curves=False))
        self.run.entries = {}
        self._tail = MetricsTail(self.run.path)
        self.update()

    def update(self) -> None:
        """Read what is new."""
        entries, rewritten = self._tail.read()
        if rewritten:
            self.run.entries = {}
        for entry in entries:
            self.run.entries.setdefault(str(entry["split"]), []).append(entry)
        if record := read_record(self.run.path):  # it may be gone: then as it was
            self.run.record, _ = sound(record)
        # computed once a look: a heartbeat can stop without any file changing
        self.run.__dict__.pop("status", None)


def sparkline(values: list[float], width: int) -> str:
    """``values`` as at most ``width`` bars, each the mean of an equal stretch."""
    if not values:
        return ""
    count = min(width, len(values))
    means = []
    for index in range(count):
        stretch = values[index * len(values) // count : (index + 1) * len(values) // count]
        means.append(sum(stretch) / len(stretch))
    low, high = min(means), max(means)
    return "".join(
        BARS[round((mean - low) / (high - low) * (len(BARS) - 1)) if high > low else 0] for mean in means
    )
