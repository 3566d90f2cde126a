"""A comparison as people read it, in the terminal and as Markdown. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from podtune.report.compare.comparison import Comparison, Difference, Identity
from podtune.report.compare.figures import EqualPlace, Figures
from podtune.report.draw.tables import Column, Table, Value, duration, shown

AT = {"step": "at equal steps", "tokens": "at equal tokens", "time": "at equal time since the start"}
NAMED = 2  # runs whose names make a title; more are counted
SIDE_BY_SIDE = 6  # runs that stand as columns; more are rows


def heading(names: Sequence[str]) -> str:
    """Title of the comparison: the names of two, else their number."""
    return " against ".join(names) if len(names) <= NAMED else f"{len(names)} runs"


@dataclass(frozen=True)
class Tables:
    """The tables of a comparison: differences, metrics at equal places, and the ends."""

    differences: list[Table]
    equal: list[Table]
    final: Table


def tables(comparison: Comparison) -> Tables:
    """Make all tables."""
    names = comparison.names
    return Tables(
        [_difference_table(group, rows, names) for group, rows in comparison.differences.items() if rows],
        [_equal_table(axis, rows, names) for axis, rows in comparison.at_equal.items() if rows],
        _final_table(comparison.final, names),
    )


def _difference_table(group: str, rows: Sequence[Difference], names: Sequence[str]) -> Table:
    return _by_run(group, {row.key: [plain(value) for value in row.values] for row in rows}, names, "left")


def _by_run(
    caption: str, figures: dict[str, list[Value]], names: Sequence[str], align: Literal["left", "right"]
) -> Table:
    """A figure a row and a run a column; many runs the other way round, where names have room."""
    if len(names) <= SIDE_BY_SIDE:
        rows: list[list[Value]] = [[key, *values] for key, values in figures.items()]
        return Table([Column(caption), *(Column(name, align) for name in names)], rows)
    rows = [[name, *(values[index] for values in figures.values())] for index, name in enumerate(names)]
    ranks = range(len(figures))
    return Table(
        [Column(caption), *(Column(key, align, drop=rank) for key, rank in zip(figures, ranks, strict=True))],
        rows,
    )


def plain(value: Any) -> Value:
    """A setting as it was written: 0.0003, not rounded to a table's digits; None where a run has none."""
    return None if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _equal_table(axis: str, rows: Sequence[EqualPlace], names: Sequence[str]) -> Table:
    body: list[list[Value]] = []
    for row in rows:
        values = [
            f"{'~' if between else ''}{shown(value)}"
            for value, between in zip(row.values, row.interpolated, strict=True)
        ]
        body.append([row.metric, row.at if axis == "time" else int(row.at), *values])
    columns = [
        Column("metric"),
        Column({"step": "step", "tokens": "tokens", "time": "seconds"}[axis], "right"),
    ]
    between = any(any(row.interpolated) for row in rows)
    notes = ["~ interpolated linearly between two recorded points"] if between else []
    return Table(
        [*columns, *(Column(name, "right") for name in names)],
        body,
        caption=AT[axis].capitalize(),
        notes=notes,
    )


def _final_table(final: Sequence[Figures], names: Sequence[str]) -> Table:
    keys = dict.fromkeys(key for end in final for key, value in end.items() if value is not None)
    figures: dict[str, list[Value]] = {
        "wall time" if key == "seconds" else key: [
            duration(end.get(key)) if key == "seconds" else end.get(key) for end in final
        ]
        for key in keys
    }
    return _by_run("at the end", figures, names, "right")


def text(comparison: Comparison, *, width: int | None = None) -> str:
    """For a terminal of ``width`` characters."""
    parts = [f"{run.name}: {_about(run)}" for run in comparison.runs]
    found = tables(comparison)
    differences = [f"{table.text(width=width)}\n" for table in found.differences]
    parts += ["", "WHAT DIFFERS", *(differences or ["nothing that was recorded\n"])]
    for title, lines in (
        ("NOT COMPARABLE", comparison.not_comparable),
        ("IN THE FILES", comparison.problems),
    ):
        if lines:
            parts += [title, *(f"- {line}" for line in lines), ""]
    parts += ["METRICS", *(f"{table.text(width=width)}\n" for table in (*found.equal, found.final))]
    return "\n".join([*parts, "WHICH IS BETTER", *comparison.conclusions])


def _about(run: Identity) -> str:
    count = run.record.get("world_size")
    ranks = None if count is None else f"{count} rank{'s' if count != 1 else ''}"
    parts = [run.record.get("mode"), run.record.get("strategy"), ranks, run.status, run.path]
    return " · ".join(str(part) for part in parts if part)


def day(started_at: str | None) -> str:
    """The minute, UTC."""
    return f"{str(started_at)[:16].replace('T', ' ')} UTC"
