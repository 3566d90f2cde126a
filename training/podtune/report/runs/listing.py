"""The list of runs: one row a run, sorted by any field. No torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from podtune.report.draw.tables import Column, Table, Value, duration
from podtune.report.runs.runs import Run, load_run, unique_names
from podtune.run.errors import UserError, unknown
from podtune.run.garbage import gc_paused
from podtune.run.record import Losses, number


@dataclass(frozen=True)
class ListedRun:
    """One run in the list; the last four fields are those of a running one."""

    name: str
    mode: str | None
    model: str | None
    strategy: str | None
    world: int | None
    status: str
    steps: int | None
    tokens: int | None
    tokens_per_s: float | None
    loss: float | None
    best_loss: float | None
    exact_match: float | None
    seconds: float | None
    device_hours: float | None
    age_s: float
    path: str
    total_steps: int | None = None
    progress: float | None = None
    eta_s: float | None = None
    stalled: bool | None = None


FIELDS = tuple(field.name for field in fields(ListedRun))
COLUMNS = {
    "name": Column("name"),
    "mode": Column("mode", drop=8),
    "strategy": Column("strategy", drop=4),
    "world": Column("world", "right", drop=5),
    "status": Column("status"),
    "steps": Column("steps", "right", drop=3),
    "tokens": Column("tokens", "right", drop=7),
    "tokens_per_s": Column("tokens/s", "right", drop=6),
    "loss": Column("loss", "right"),
    "best_loss": Column("best", "right", drop=1),
    "exact_match": Column("exact", "right", 3, drop=2),
    "seconds": Column("time", "right", drop=9),
    "device_hours": Column("device h", "right", 3, drop=10),
    "age_s": Column("age", "right", drop=11),
}


def read_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs in ``folders``, enough of each for a list, and a line for each that could not be read."""
    runs, unreadable = [], []
    with gc_paused():
        for folder in folders:
            try:
                # a volume may hold thousands, and parsing each line of them takes long
                runs.append(load_run(folder, curves=False))
            except UserError as error:
                unreadable.append(f"{error.where}: {error.what}")
    return runs, unreadable


def list_runs(runs: Sequence[Run]) -> list[ListedRun]:
    """A row for each run; names that occur twice have the folder beside them."""
    rows = [_row(run) for run in runs]
    names = unique_names([(row.name, row.path) for row in rows])
    return [replace(row, name=name) for row, name in zip(rows, names, strict=True)]


def _row(run: Run) -> ListedRun:
    record, seconds, measured = run.record, run.seconds(), run.measurements
    world = record.get("world_size")
    loss = measured.loss or Losses()
    losses = (loss.eval, run.last("eval", "loss"), loss.last, run.last("train", "loss"))
    row = ListedRun(
        name=run.name,
        mode=record.get("mode"),
        model=record.get("model"),
        strategy=record.get("strategy"),
        world=world,
        status=run.status,
        steps=measured.steps if measured.steps is not None else run.counted("step"),
        tokens=measured.tokens if measured.tokens is not None else run.counted("tokens"),
        tokens_per_s=measured.tokens_per_s or run.last("train", "tokens_per_s"),
        loss=next((number(value) for value in losses if value is not None), None),
        best_loss=min(filter(None, (run.best("eval", "loss"), loss.eval)), default=None),
        exact_match=exact[0] if (exact := run.exact_share()) else None,
        seconds=seconds,
        device_hours=seconds / 3600 * world if seconds is not None and world is not None else None,
        age_s=time.time() - run.started_at,
        path=str(run.path),
    )
    if run.status != "running":
        return row
    going = run.progress()
    return replace(
        row,
        steps=going.step,
        total_steps=going.total_steps,
        progress=going.share,
        eta_s=going.eta_s,
        stalled=going.stalled,
    )


def sort_rows(rows: Sequence[ListedRun], key: str) -> list[ListedRun]:
    """Sort ``rows`` by a field, ``-field`` in reverse; rows without it come last.

    Raises:
        UsageError: there is no such field.
    """
    name = key.removeprefix("-")
    if name not in FIELDS:
        raise unknown("field", name, FIELDS, where="--sort")
    known = [row for row in rows if getattr(row, name) is not None]
    without = [row for row in rows if getattr(row, name) is None]
    return sorted(known, key=lambda row: getattr(row, name), reverse=key.startswith("-")) + without


def table(rows: Sequence[ListedRun]) -> Table:
    """The rows as people read them. The time's cost is the wall clock, and devices times hours."""
    answered = any(row.exact_match is not None for row in rows)
    columns = {name: column for name, column in COLUMNS.items() if answered or name != "exact_match"}
    return Table(list(columns.values()), [[_cell(row, name) for name in columns] for row in rows])


def _cell(row: ListedRun, name: str) -> Value:
    if name == "status" and row.status == "running":
        share = "" if row.progress is None else f" {row.progress:.0%}"
        left = "" if row.eta_s is None else f", {duration(row.eta_s)} left"
        return f"{'stalled' if row.stalled else 'running'}{share}{left}"
    value: Value = getattr(row, name)
    return duration(getattr(row, name)) if name in ("seconds", "age_s") else value
