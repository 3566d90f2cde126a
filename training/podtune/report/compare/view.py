"""A comparison's tables, and a comparison as it is read in a terminal. No torch."""

from __future__ import annotations

from typing import Any, Literal

from podtune.report.compare.comparison import Comparison
from podtune.report.draw.tables import Column, Table, Value, duration

AXES = {"step": "{:,.0f} steps", "tokens": "{:,.0f} tokens", "time": "{:,.0f} s"}
SIDE_BY_SIDE = 6  # runs that stand as columns; more are rows


def plain(value: Any) -> Value:
    """A setting as it was written: 0.0003, not rounded to a table's digits; None where a run has none."""
    return None if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def difference_tables(comparison: Comparison) -> list[Table]:
    """A table for each group of keys in which the runs differ."""
    return [
        _by_run(comparison, group, {row.key: [plain(value) for value in row.values] for row in rows}, "left")
        for group, rows in comparison.differences.items()
        if rows
    ]


def equal_table(comparison: Comparison) -> Table:
    """The metrics at equal steps, tokens and time since the start."""
    figures: dict[str, list[Value]] = {
        f"{row.metric} at {AXES[axis].format(row.at)}": [*row.values]
        for axis, rows in comparison.at_equal.items()
        for row in rows
    }
    return _by_run(comparison, "where the shortest ends, interpolated", figures, "right")


def final_table(comparison: Comparison) -> Table:
    """The figures at the runs' ends; one that no run has is left out."""
    figures: dict[str, list[Value]] = {}
    for key in dict.fromkeys(key for end in comparison.final for key in end):
        values = [end.get(key) for end in comparison.final]
        if key == "seconds":
            figures["wall time"] = [duration(value) for value in values]
        elif any(value is not None for value in values):
            figures[key] = [*values]
    return _by_run(comparison, "at the end", figures, "right")


def _by_run(
    comparison: Comparison, caption: str, figures: dict[str, list[Value]], align: Literal["left", "right"]
) -> Table:
    """A figure a row and a run a column; many runs the other way round, where names have room."""
    names = comparison.names
    if len(names) <= SIDE_BY_SIDE:
        rows: list[list[Value]] = [[key, *values] for key, values in figures.items()]
        return Table([Column(caption), *(Column(name, align) for name in names)], rows)
    rows = [[name, *(values[index] for values in figures.values())] for index, name in enumerate(names)]
    return Table(
        [Column(caption), *(Column(key, align, drop=rank) for rank, key in enumerate(figures))], rows
    )


def text(comparison: Comparison, *, width: int | None = None) -> str:
    """For a terminal of ``width`` characters."""
    runs = zip(comparison.names, comparison.runs, strict=True)
    parts = [f"{name}: {run.one_line()} · {run.path}" for name, run in runs]
    differences = [f"{table.text(width=width)}\n" for table in difference_tables(comparison)]
    parts += ["", "WHAT DIFFERS", *(differences or ["nothing that was recorded\n"])]
    for title, lines in (
        ("NOT COMPARABLE", comparison.not_comparable),
        ("IN THE FILES", comparison.problems),
    ):
        if lines:
            parts += [title, *(f"- {line}" for line in lines), ""]
    tables = [equal_table(comparison), final_table(comparison)]
    parts += ["METRICS", *(f"{table.text(width=width)}\n" for table in tables)]
    return "\n".join([*parts, "WHICH IS BETTER", *comparison.conclusions])
