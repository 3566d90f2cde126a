"""The list of runs: one row a run, filtered by comparisons and sorted by any field. No torch."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from podtune.report.draw.tables import Column, Table, duration
from podtune.report.runs.progress import progress
from podtune.report.runs.runs import Run, load_run, unique_names
from podtune.run.errors import UsageError, UserError, near
from podtune.run.garbage import gc_paused
from podtune.run.record import Json, Losses, number

FIELDS = (
    "name", "mode", "model", "strategy", "world", "status", "steps", "tokens", "tokens_per_s",
    "loss", "best_loss", "exact_match", "seconds", "device_hours", "age_s", "path",
)  # fmt: skip


@dataclass
class ListedRun:
    """One run in the list: ``values`` by the names in FIELDS, its record, its files' problems."""

    values: dict[str, Any]
    record: Json
    problems: list[str]


def list_runs(folders: Sequence[Path], *, records: bool = True) -> tuple[list[ListedRun], list[str]]:
    """A row for every run in ``folders``, and a line for each that could not be read.

    Without ``records`` the rows' own are empty: of many runs they are most of the memory.
    """
    read_part = partial(_read_part, records=records)
    parts = [folders[start : start + _PART] for start in range(0, len(folders), _PART)]
    processes = min(len(parts) // 4, os.cpu_count() or 1, _MOST_PROCESSES)
    if processes < 2:
        read = list(map(read_part, parts))
    else:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
            read = list(pool.map(read_part, parts))
    rows = [row for part, _ in read for row in part]
    return _told_apart(rows), [line for _, lines in read for line in lines]


_PART, _MOST_PROCESSES = 250, 8


def _read_part(folders: Sequence[Path], records: bool) -> tuple[list[ListedRun], list[str]]:
    rows, unreadable = [], []
    with gc_paused():
        for folder in folders:
            try:
                row = _row(load_run(folder, curves=False))
            except UserError as error:
                unreadable.append(f"{error.where}: {error.what}")
                continue
            rows.append(row if records else replace(row, record={}))
    return rows, unreadable


def rows_of(runs: Sequence[Run]) -> list[ListedRun]:
    """A row for each run."""
    return _told_apart(list(map(_row, runs)))


def _told_apart(rows: list[ListedRun]) -> list[ListedRun]:
    names = unique_names([(row.values["name"], row.values["path"]) for row in rows])
    for row, name in zip(rows, names, strict=True):
        row.values["name"] = name
    return rows


def _row(run: Run) -> ListedRun:
    record, seconds = run.record, run.seconds()
    status = run.status
    world = record.get("world_size")
    measured = run.measurements
    loss = measured.loss or Losses()
    values: dict[str, Any] = {
        "name": run.name,
        "mode": record.get("mode"),
        "model": record.get("model"),
        "strategy": record.get("strategy"),
        "world": world,
        "status": status,
        "steps": measured.steps if measured.steps is not None else run.counted("step"),
        "tokens": measured.tokens if measured.tokens is not None else run.counted("tokens"),
        "tokens_per_s": measured.tokens_per_s or run.last("train", "tokens_per_s"),
        "loss": _first(
            loss.eval,
            run.last("eval", "loss"),
            loss.last,
            run.last("train", "loss"),
        ),
        "best_loss": min(filter(None, (run.best("eval", "loss"), loss.eval)), default=None),
        "exact_match": exact[0] if (exact := run.exact_share()) else None,
        "seconds": seconds,
        "device_hours": seconds / 3600 * world if seconds is not None and isinstance(world, int) else None,
        "age_s": time.time() - run.started_at,
        "path": str(run.path),
    }
    if status == "running":
        going = progress(run)
        values |= {
            "steps": going.step,
            "total_steps": going.total_steps,
            "progress": going.share,
            "eta_s": going.eta_s,
            "stalled": going.stalled,
        }
    return ListedRun(values, record, run.problems)


def _first(*values: object) -> float | None:
    return next((first for value in values if (first := number(value)) is not None), None)


def sort_rows(rows: list[ListedRun], key: str) -> list[ListedRun]:
    """Sort ``rows`` by a field or a path into the record, ``-field`` in reverse; rows without it come last.

    Raises:
        UserError: no run has such a field.
    """
    name = key.lstrip("-")
    _known(name, rows)
    with_value = [row for row in rows if value_of(row, name) is not None]
    without = [row for row in rows if value_of(row, name) is None]
    ordered = sorted(with_value, key=lambda row: _sortable(value_of(row, name)), reverse=key.startswith("-"))
    return ordered + without


def _sortable(value: Any) -> tuple[int, float, str]:
    as_number = _comparable(value)
    return (0, as_number, "") if isinstance(as_number, float) else (1, 0.0, str(value))


def table(rows: Sequence[ListedRun]) -> Table:
    """The rows as people read them. The time's cost is the wall clock, and devices times hours."""
    columns = [
        Column("name"),
        Column("mode", drop=8),
        Column("strategy", drop=4),
        Column("world", "right", drop=5),
        Column("status"),
        Column("steps", "right", drop=3),
        Column("tokens", "right", drop=7),
        Column("tokens/s", "right", drop=6),
        Column("loss", "right"),
        Column("best", "right", drop=1),
        Column("exact", "right", 3, drop=2),
        Column("time", "right", drop=9),
        Column("device h", "right", 3, drop=10),
        Column("age", "right", drop=11),
    ]
    body = []
    for row in rows:
        values = row.values
        body.append(
            [
                values["name"],
                values["mode"],
                values["strategy"],
                values["world"],
                _status(values),
                values["steps"],
                values["tokens"],
                values["tokens_per_s"],
                values["loss"],
                values["best_loss"],
                values["exact_match"],
                duration(values["seconds"]),
                values["device_hours"],
                duration(values["age_s"]),
            ]
        )
    if not any(row.values["exact_match"] is not None for row in rows):
        place = [column.title for column in columns].index("exact")
        columns.pop(place)
        body = [[*cells[:place], *cells[place + 1 :]] for cells in body]
    return Table(columns, body)


def csv_text(rows: Sequence[ListedRun]) -> str:
    """The rows as CSV, every field in full precision."""
    columns = [Column(name) for name in FIELDS]
    return Table(columns, [[row.values.get(name) for name in FIELDS] for row in rows]).csv()


def _status(values: dict[str, Any]) -> str:
    if values["status"] != "running":
        return str(values["status"])
    share = f" {values['progress']:.0%}" if values.get("progress") is not None else ""
    left = f", {duration(values['eta_s'])} left" if values.get("eta_s") is not None else ""
    return f"{'stalled' if values.get('stalled') else 'running'}{share}{left}"


COMPARISON = re.compile(r"\s*([^\s<>=!~]+)\s*(<=|>=|!=|==|=|<|>|~)\s*(.+?)\s*")


def where(comparison: str, rows: Sequence[ListedRun]) -> list[ListedRun]:
    """The rows of which ``learning_rate>1e-5`` is true.

    ``= == != < <= > >=`` and ``~`` (contains) compare a field with a number or a text. A field is one of
    FIELDS, or a path into the record (``data.fingerprint``), its config or its measurements. A run without
    the field never matches.

    Raises:
        UserError: this is no comparison, or no run has a field of that name.
    """
    parts = COMPARISON.fullmatch(comparison)
    if parts is None or re.search(r"\s(and|or)\s", parts[3]):
        raise UsageError(
            "is not one comparison",
            where=f"--where {comparison!r}",
            fix='write --where "learning_rate>1e-5" --where status=ok, or filter podtune runs --json',
        )
    name, operator, wanted = parts.groups()
    _known(name, rows)
    return [row for row in rows if _compare(value_of(row, name), operator, wanted.strip("\"'"))]


def _compare(value: Any, operator: str, wanted: str) -> bool:
    if value is None:
        return False
    if operator == "~":
        return wanted.lower() in str(value).lower()
    left, right = _comparable(value), _comparable(wanted)
    if not (isinstance(left, float) and isinstance(right, float)):
        left, right = str(value).lower(), wanted.lower()
    if operator in ("=", "=="):
        return bool(left == right)
    if operator == "!=":
        return bool(left != right)
    less, more = left < right, left > right  # type: ignore[operator]
    return bool({"<": less, "<=": less or left == right, ">": more, ">=": more or left == right}[operator])


def _comparable(value: Any) -> float | str:
    try:
        return str(value) if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return str(value)


def value_of(row: ListedRun, name: str) -> Any:
    """A field of the list, else a path into the record, its config, measurements or data; None if absent."""
    if name in row.values:
        return row.values[name]
    parts = name.split(".")
    record = row.record
    for start in (record, record.get("config"), record.get("measurements"), record.get("data")):
        value: Any = start
        for part in parts:
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None and not isinstance(value, dict):
            return value
    return None


def _known(name: str, rows: Sequence[ListedRun]) -> None:
    if not rows or name in FIELDS or any(value_of(row, name) is not None for row in rows):
        return
    names = set(FIELDS)
    for row in rows:
        for part in (
            row.record,
            row.record.get("config"),
            row.record.get("measurements"),
            row.record.get("data"),
        ):
            names |= set(part) if isinstance(part, dict) else set()
    raise UsageError(
        f"no run has a field {name!r}{near(name, names)}",
        where="--where or --sort",
        fix=f"fields: {', '.join(FIELDS)}",
    )
