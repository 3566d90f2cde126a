"""A comparison as people read it: in the terminal, as Markdown, and as one HTML page with overlaid curves. No
torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from podtune.report.draw.page import Section, bullets, page, paragraph
from podtune.report.draw.plots import Series, bar_chart, line_chart
from podtune.report.draw.tables import Cell, Column, Table, duration, shown
from podtune.report.runs.runs import Run
from podtune.run.record import Json

AT = {"step": "at equal steps", "tokens": "at equal tokens", "time": "at equal time since the start"}
LABELS = {"step": "step", "tokens": "tokens (real, all ranks)", "time": "time since start (s)"}
CHARTS = (
    ("Evaluation loss by step", "eval", "loss", "step", "loss (nats per token)"),
    ("Training loss by step", "train", "loss", "step", "loss (nats per token)"),
    ("Training loss by tokens", "train", "loss", "tokens", "loss (nats per token)"),
    ("Training loss by time", "train", "loss", "time", "loss (nats per token)"),
    ("Learning rate", "train", "learning_rate", "step", "learning rate"),
    ("Gradient norm", "train", "grad_norm", "step", "gradient norm (before clipping)"),
    ("Throughput", "train", "tokens_per_s", "step", "tokens/s (real, all ranks)"),
)
MEMORY = (("train", "peak_memory_gib"), ("system", "gpu_memory_gib"), ("system", "rss_gib"))


def tables(found: Json) -> dict[str, list[Table]]:
    """The tables of a comparison by section: differences, then metrics at equal places, then the ends."""
    names = [run["name"] for run in found["runs"]]
    return {
        "differences": [
            _difference_table(group, rows, names) for group, rows in found["differences"].items() if rows
        ],
        "equal": [_equal_table(axis, rows, names) for axis, rows in found["at_equal"].items() if rows],
        "final": [_final_table(found["final"], names)],
    }


def _difference_table(group: str, rows: Sequence[Json], names: Sequence[str]) -> Table:
    body = [[row["key"], *(_plain(value) for value in row["values"])] for row in rows]
    return Table([Column(group), *(Column(name) for name in names)], body)


def _plain(value: Any) -> Cell:
    """A setting as it was written: 0.0003, not rounded to a table's digits; what a run does not have shows as
    a dash.
    """
    return None if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _equal_table(axis: str, rows: Sequence[Json], names: Sequence[str]) -> Table:
    body: list[list[Cell]] = []
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
    keys = list(dict.fromkeys(key for one in final for key, value in one.items() if value is not None))
    body: list[list[Cell]] = []
    for key in keys:
        values = [one.get(key) for one in final]
        body.append(
            ["wall time", *(duration(value) for value in values)] if key == "seconds" else [key, *values]
        )
    return Table([Column("at the end"), *(Column(name, "right") for name in names)], body)


def text(found: Json, *, width: int | None = None) -> str:
    """For a terminal of ``width`` characters."""
    parts = [f"{run['name']}: {_about(run)}" for run in found["runs"]]
    shown_tables = tables(found)
    parts += ["", "WHAT DIFFERS"] + (
        [f"{table.text(width=width)}\n" for table in shown_tables["differences"]]
        or ["nothing that was recorded\n"]
    )
    for title, key in (("NOT COMPARABLE", "not_comparable"), ("IN THE FILES", "problems")):
        if found[key]:
            parts += [title, *(f"- {line}" for line in found[key]), ""]
    parts += ["METRICS"] + [
        f"{table.text(width=width)}\n" for table in (*shown_tables["equal"], *shown_tables["final"])
    ]
    return "\n".join([*parts, "WHICH IS BETTER", *_conclusions(found)])


def markdown(found: Json) -> str:
    """For a pull request or a note."""
    shown_tables = tables(found)
    names = " against ".join(run["name"] for run in found["runs"])
    parts = [
        f"# {names}",
        *((f"- **{run['name']}**: {_about(run)}") for run in found["runs"]),
        "",
        *_conclusions(found),
    ]
    parts += ["", "## What differs", ""] + (
        [f"{table.markdown()}\n" for table in shown_tables["differences"]] or ["Nothing that was recorded."]
    )
    for title, key in (("Not comparable", "not_comparable"), ("In the files", "problems")):
        if found[key]:
            parts += ["", f"## {title}", "", *(f"- {line}" for line in found[key])]
    parts += ["", "## Metrics", ""] + [
        f"{table.markdown()}\n" for table in (*shown_tables["equal"], *shown_tables["final"])
    ]
    return "\n".join(parts)


def html_page(found: Json, runs: Sequence[Run]) -> str:
    """One self-contained page; the comparison itself is embedded as JSON (id podtune-data)."""
    names = [run["name"] for run in found["runs"]]
    shown_tables = tables(found)
    summary = [
        paragraph(line, kind="verdict" if index == 0 else "")
        for index, line in enumerate(_conclusions(found))
    ]
    overview = Table(
        [
            Column("run"),
            Column("status"),
            Column("strategy"),
            Column("ranks", "right"),
            Column("batch", "right"),
            Column("started"),
            Column("folder"),
        ],
        [
            [
                run["name"],
                run["status"],
                run.get("strategy"),
                run.get("world_size"),
                run.get("global_batch_size"),
                _day(run["started_at"]),
                run["path"],
            ]
            for run in found["runs"]
        ],
    )
    sections = [
        Section("verdict", "Which is better", [*summary, overview.html()]),
        Section(
            "differences",
            "What differs",
            [table.html() for table in shown_tables["differences"]]
            or [paragraph("Nothing that was recorded.")],
        ),
    ]
    if found["not_comparable"] or found["problems"]:
        warnings = [
            bullets(found["not_comparable"], kind="warning"),
            bullets(found["problems"], kind="warning"),
        ]
        sections.append(Section("limits", "Not comparable, and why", [part for part in warnings if part]))
    sections += [
        Section("curves", "Curves", ['<div class="charts">', *_charts(runs, names), "</div>"]),
        Section("equal", "At equal steps, tokens and time", _side_by_side(shown_tables["equal"])),
        Section("final", "At the end", [table.html() for table in shown_tables["final"]]),
    ]
    return page(
        " against ".join(names),
        subtitle=f"{len(names)} runs compared from their own files",
        sections=sections,
        data=found,
        footer=(
            "podtune compare; losses in nats per token, memory in GiB (2^30 bytes). The page needs no "
            "network."
        ),
    )


def _side_by_side(several: Sequence[Table]) -> list[str]:
    if not several:
        return [paragraph("The runs have no stretch in common.")]
    return ['<div class="tables">', *(f"<div>{table.html()}</div>" for table in several), "</div>"]


def _charts(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    charts = []
    for title, split, metric, axis, label in CHARTS:
        series = [
            Series(name, *run.curve(split, metric, axis), colour=index % 8)
            for index, (run, name) in enumerate(zip(runs, names, strict=True))
        ]
        charts.append(
            line_chart(
                title,
                x=LABELS[axis],
                y=label,
                series=series,
                log_y=metric == "grad_norm" and _wide(series),
                smooth=metric != "learning_rate",
            )
        )
    return [*charts, _memory_chart(runs, names)]


def _memory_chart(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Memory over the steps where a run recorded it, else the peaks at the end."""
    for split, metric in MEMORY:
        if any(run.curve(split, metric)[0] for run in runs):
            label = f"{metric.removesuffix('_gib').replace('_', ' ')} (GiB)"
            series = [
                Series(name, *run.curve(split, metric), colour=index % 8)
                for index, (run, name) in enumerate(zip(runs, names, strict=True))
            ]
            return line_chart("Memory", x="step", y=label, series=series)
    peaks = [run.measurements.peak_memory_gib for run in runs]
    bars = [(name, peak.max if peak else None) for name, peak in zip(names, peaks, strict=True)]
    return bar_chart("Peak memory", y="GiB, of the largest rank", bars=bars)


def _wide(series: Sequence[Series]) -> bool:
    """True if values span more than two powers of ten: one spike would flatten the rest of a linear chart."""
    values = [value for one in series for _, value in one.points() if value > 0]
    return bool(values) and math.log10(max(values) / min(values)) > 2


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


def _day(started_at: Any) -> str:
    return str(started_at)[:16].replace("T", " ") + " UTC"


def _conclusions(found: Json) -> list[str]:
    return [found["verdict"]["text"], *([found["speed"]["text"]] if found["speed"] else [])]
