"""A comparison as people read it, in the terminal and as Markdown. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from podtune.report.draw.tables import Column, Table, Value, duration, markdown_text, shown
from podtune.run.record import Json

AT = {"step": "at equal steps", "tokens": "at equal tokens", "time": "at equal time since the start"}
NAMED = 3  # runs whose names make a title; more are counted
SIDE_BY_SIDE = 6  # runs that stand as columns; more are rows


def heading(names: Sequence[str]) -> str:
    """Title of the comparison: up to three names, else their number."""
    return " against ".join(names) if len(names) <= NAMED else f"{len(names)} runs"


def tables(comparison: Json) -> dict[str, list[Table]]:
    """The tables of a comparison by section: differences, then metrics at equal places, then the ends."""
    names = [run["name"] for run in comparison["runs"]]
    return {
        "differences": [
            _difference_table(group, rows, names) for group, rows in comparison["differences"].items() if rows
        ],
        "equal": [_equal_table(axis, rows, names) for axis, rows in comparison["at_equal"].items() if rows],
        "final": [_final_table(comparison["final"], names)],
    }


def _difference_table(group: str, rows: Sequence[Json], names: Sequence[str]) -> Table:
    columns = {row["key"]: [_plain(value) for value in row["values"]] for row in rows}
    return _by_run(group, columns, names, "left")


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


def _plain(value: Any) -> Value:
    """A setting as it was written: 0.0003, not rounded to a table's digits; None where a run has none."""
    return None if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _equal_table(axis: str, rows: Sequence[Json], names: Sequence[str]) -> Table:
    body: list[list[Value]] = []
    for row in rows:
        values = [
            f"{'~' if between else ''}{shown(value)}"
            for value, between in zip(row["values"], row["interpolated"], strict=True)
        ]
        place = row["at"] if axis == "time" else int(row["at"])
        body.append([row["metric"], place, *values])
    columns = [
        Column("metric"),
        Column({"step": "step", "tokens": "tokens", "time": "seconds"}[axis], "right"),
    ]
    notes = (
        [("~ interpolated linearly between two recorded points")]
        if any(any(row["interpolated"]) for row in rows)
        else []
    )
    return Table(
        [*columns, *(Column(name, "right") for name in names)],
        body,
        caption=AT[axis].capitalize(),
        notes=notes,
    )


def _final_table(final: Sequence[Json], names: Sequence[str]) -> Table:
    keys = dict.fromkeys(key for end in final for key, value in end.items() if value is not None)
    figures: dict[str, list[Value]] = {
        "wall time" if key == "seconds" else key: [
            duration(end.get(key)) if key == "seconds" else end.get(key) for end in final
        ]
        for key in keys
    }
    return _by_run("at the end", figures, names, "right")


def text(comparison: Json, *, width: int | None = None) -> str:
    """For a terminal of ``width`` characters."""
    parts = [f"{run['name']}: {_about(run)}" for run in comparison["runs"]]
    shown_tables = tables(comparison)
    parts += ["", "WHAT DIFFERS"] + (
        [f"{table.text(width=width)}\n" for table in shown_tables["differences"]]
        or ["nothing that was recorded\n"]
    )
    for title, key in (("NOT COMPARABLE", "not_comparable"), ("IN THE FILES", "problems")):
        if comparison[key]:
            parts += [title, *(f"- {line}" for line in comparison[key]), ""]
    parts += ["METRICS"] + [
        f"{table.text(width=width)}\n" for table in (*shown_tables["equal"], *shown_tables["final"])
    ]
    return "\n".join([*parts, "WHICH IS BETTER", *conclusions(comparison)])


def markdown(comparison: Json) -> str:
    """For a pull request or a note."""
    shown_tables = tables(comparison)
    parts = [
        f"# {markdown_text(heading([run['name'] for run in comparison['runs']]))}",
        *(markdown_text(f"- **{run['name']}**: {_about(run)}") for run in comparison["runs"]),
        "",
        *map(markdown_text, conclusions(comparison)),
    ]
    parts += ["", "## What differs", ""] + (
        [f"{table.markdown()}\n" for table in shown_tables["differences"]] or ["Nothing that was recorded."]
    )
    for title, key in (("Not comparable", "not_comparable"), ("In the files", "problems")):
        if comparison[key]:
            parts += ["", f"## {title}", "", *(markdown_text(f"- {line}") for line in comparison[key])]
    parts += ["", "## Metrics", ""] + [
        f"{table.markdown()}\n" for table in (*shown_tables["equal"], *shown_tables["final"])
    ]
    return "\n".join(parts)


def _about(run: Json) -> str:
    parts = [
        run.get("mode"),
        run.get("strategy"),
        _ranks(run.get("world_size")),
        run["status"],
        run["path"],
    ]
    return " · ".join(str(part) for part in parts if part)


def _ranks(count: object) -> str | None:
    return None if count is None else f"{count} rank{'s' if count != 1 else ''}"


def day(started_at: Any) -> str:
    return str(started_at)[:16].replace("T", " ") + " UTC"


def conclusions(comparison: Json) -> list[str]:
    return [comparison["verdict"]["text"], *([comparison["speed"]["text"]] if comparison["speed"] else [])]
