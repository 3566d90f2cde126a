"""A run while it goes on, in a terminal: progress, time left, loss, speed, evaluation, warnings. No torch.

It only reads, so it can be started and stopped at will, on any machine that sees the run's folder.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from podtune.report.draw.tables import duration, shown
from podtune.report.runs.runs import Run
from podtune.run.errors import printable
from podtune.run.log_lines import is_slow, per_pod, waits_for_data
from podtune.run.record import Json, number
from podtune.run.start_phases import first_step_line

if TYPE_CHECKING:
    from rich.console import RenderableType

REFRESH_S = 2.0
NO_LIFE = {
    "died": "the process is gone and left no result: see its log; the same command resumes from the last "
    "checkpoint",
    "silent": "no sign of life from its host for a minute: it died, its volume hangs, or the clocks differ",
}
OWN_TIMES = {"data_wait_s": "for its data", "forward_s": "for its forward pass"}


def watch(look: Callable[[], Run], *, once: bool) -> None:
    """Show the run until it ends or Ctrl-C; ``once``, or where stdout is no terminal: print it as it stands.

    Raises:
        UserError: the run is gone.
    """
    from rich.console import Console

    console = Console(highlight=False)
    run = look()
    if once or not console.is_terminal:
        console.print(panel(run, console.width))
        return
    from rich.live import Live

    first = panel(run, console.width)
    with Live(first, console=console, redirect_stdout=False, redirect_stderr=False) as live:
        while not run.over:
            time.sleep(REFRESH_S)
            run = look()
            live.update(panel(run, console.width))


def panel(run: Run, width: int) -> RenderableType:
    """The run as it stands, at most ``width`` characters wide."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    if (share := run.progress().share) is not None:
        rows.add_row("done", ProgressBar(total=1.0, completed=share, width=max(10, width - 20)))
    for label, value in facts(run):
        rows.add_row(label, Text(printable(value)))
    said = [Text(printable(f"! {warning}"), style="yellow") for warning in warnings(run)]
    title = Text(printable(f"{run.name} · {run.one_line()}"))
    return Panel(Group(rows, *said), title=title, title_align="left", width=width)


def facts(run: Run) -> list[tuple[str, str]]:
    """Label and value of each line; what is not recorded has no line."""
    going, seconds = run.progress(), run.seconds()
    step = f"{going.step:,}" + (f" of {going.total_steps:,}" if going.total_steps else "")
    if run.status == "running":
        left = "" if going.eta_s is None else f", {duration(going.eta_s)} left"
        found = [("step", f"{step}, running for {duration(seconds)}{left}")]
    else:
        after = "" if seconds is None else f" after {duration(seconds)}"
        reason = f": {run.record['reason']}" if run.record.get("reason") else ""
        found = [("step", f"{step}, {run.status}{after}{reason}")]
    if (loss := run.last("train", "loss")) is not None:
        found.append(("loss", shown(loss)))
    rate, step_time = run.last("train", "tokens_per_s"), run.last("train", "step_time_s")
    if rate is not None:
        each = f", {shown(step_time)} s a step" if step_time else ""
        found.append(("speed", f"{shown(rate)} tokens/s{each}"))
    for split in filter(lambda split: split.startswith("eval"), run.entries):
        last = run.entries[split][-1]
        keys = ("loss", "perplexity", "mean_token_accuracy")
        texts = [f"{key.replace('_', ' ')} {shown(number(last[key]))}" for key in keys if key in last]
        found.append(
            (
                split.replace("eval", "evaluation", 1).replace("_", " "),
                f"at step {last['step']:,}: {', '.join(texts)}",
            )
        )
    if phases := run.measurements.start_s:
        found.append(("start", first_step_line(phases)))
    system = machine_figures(run)
    pods = per_pod(system, int(run.record.get("nproc_per_node") or 1)) if system else []
    names = ["machine"] if len(pods) == 1 else [f"pod {index}" for index in range(len(pods))]
    return found + [(name, _use(pod)) for name, pod in zip(names, pods, strict=True) if pod]


def _use(machine: Json) -> str:
    """Memory and GPU use of a pod, as they were recorded."""
    parts = []
    if "gpu_utilisation_percent" in machine:
        parts.append(f"GPU {machine['gpu_utilisation_percent']:.0f}% busy")
    if "gpu_memory_gib" in machine:
        parts.append(f"{shown(machine['gpu_memory_gib'], 3)} GiB of GPU memory")
    if "rss_gib" in machine:
        parts.append(f"{shown(machine['rss_gib'], 3)} GiB of memory")
    return ", ".join(parts)


def warnings(run: Run) -> list[str]:
    """Warnings for a person: dead or silent process, loss not finite, slow rank, slow data."""
    found, going = list[str](), run.progress()
    if run.status in NO_LIFE:
        found.append(NO_LIFE[run.status])
    if going.stalled:
        found.append(f"no step for {duration(going.silent_s)}: a rank hangs, or the data does not come")
    loss = run.last("train", "loss")
    if loss is not None and not math.isfinite(loss):
        found.append(f"the loss is {loss}")
    system = machine_figures(run)
    if is_slow(system):
        rank, per_rank = int(system["slowest_rank"]), system.get("per_rank") or {}
        times = {what: per_rank[name][rank] for name, what in OWN_TIMES.items() if name in per_rank}
        parts = [f"{seconds:.2g} s {what}" for what, seconds in times.items()]
        each = f" ({', '.join(parts)} a step)" if parts else ""
        found.append(
            f"rank {rank} is slow: the others wait for it, it takes {system['slowest_ratio']:.1f} times "
            f"as long as they do{each}"
        )
    if waits_for_data(system):
        share = f"{system['data_wait_share']:.0%} of a step waits for data"
        found.append(f"{share}: more dataloader_num_workers may help")
    return found


def machine_figures(run: Run) -> Json:
    """The last system line of a run, without what is no number of a rank; empty while there is none."""
    line = (run.entries.get("system") or [{}])[-1]
    figures: Json = {name: value for name, value in line.items() if number(value) is not None}
    per_rank = line.get("per_rank")
    if isinstance(per_rank, dict) and all(map(_is_column, per_rank.values())):
        figures["per_rank"] = per_rank
    return figures


def _is_column(values: object) -> bool:
    return isinstance(values, list) and all(value is None or number(value) is not None for value in values)
