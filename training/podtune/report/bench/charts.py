"""The benchmark's charts: each once as data, drawn as SVG for the page and as PNG for Markdown. No torch."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podtune.report.bench.groups import Cell, Group
from podtune.report.draw.plots import WIDTH, Axis, Series, line_chart, tick_label
from podtune.report.draw.tables import Cell as TableCell
from podtune.report.draw.tables import Column, Table, shown

LEFT, RIGHT, TOP, FOOT, THICK, GAP = 176, 84, 34, 46, 17, 12
COLOURS = ("#1d4ed8", "#c2410c", "#047857", "#a21caf", "#0e7490", "#b91c1c", "#6d28d9", "#4d7c0f")


@dataclass(frozen=True)
class Row:
    """One cell's bars: a value and a possible error for each series; None is not measured."""

    label: str
    key: str
    values: Sequence[float | None]
    errors: Sequence[float | None] = ()


@dataclass(frozen=True)
class Bars:
    """Horizontal bars from zero, one group a cell: side by side, or ``stacked``. Series named ``planned`` are
    drawn hollow.
    """

    name: str
    title: str
    unit: str
    series: Sequence[str]
    rows: Sequence[Row]
    note: str = ""
    stacked: bool = False
    planned: frozenset[str] = frozenset({"plan", "formula"})

    @property
    def empty(self) -> bool:
        """True if there is nothing to draw."""
        return not any(value is not None for row in self.rows for value in row.values)

    def table(self) -> Table:
        """The same figures."""
        rows: list[list[TableCell]] = [[row.label, *row.values] for row in self.rows]
        return Table(
            [Column("cell"), *(Column(f"{one} ({self.unit})", "right") for one in self.series)], rows
        )

    def html(self) -> str:
        """An HTML figure; its colours follow the page's scheme, its labels lead to the records."""
        per_row = 1 if self.stacked else len(self.series)
        pitch = THICK * per_row + GAP
        height = TOP + pitch * len(self.rows) + FOOT
        axis = Axis.fit([0.0, *self._extents()], LEFT, WIDTH - RIGHT)
        parts = [
            f'<line class="grid" x1="{axis.at(tick):.1f}" x2="{axis.at(tick):.1f}" y1="{TOP}" '
            f'y2="{height - FOOT}"/>'
            f'<text class="tick{" minor" if index % 2 else ""}" text-anchor="middle" x="{axis.at(tick):.1f}" '
            f'y="{height - FOOT + 20}">'
            f"{tick_label(tick)}</text>"
            for index, tick in enumerate(axis.ticks)
        ]
        parts.append(
            f'<text class="axis" text-anchor="end" x="{WIDTH - 6}" '
            f'y="{height - 4}">{html.escape(self.unit)}</text>'
        )
        for number, row in enumerate(self.rows):
            middle = TOP + pitch * number + THICK * per_row / 2
            label = (
                f'<text class="name" text-anchor="end" x="{LEFT - 8}" '
                f'y="{middle + 5:.1f}">{html.escape(row.label)}</text>'
            )
            parts.append(f'<a href="#record-{html.escape(row.key, quote=True)}">{label}</a>')
        for index in range(len(self.series)):
            parts.append(self._series(index, axis, pitch))
        alt = html.escape(
            (f"{self.title}, {self.unit}: {', '.join(self.series)} for {len(self.rows)} cells"), quote=True
        )
        note = f'<p class="note">{html.escape(self.note)}</p>' if self.note else ""
        return (
            f'<figure class="chart"><figcaption>{html.escape(self.title)}</figcaption>'
            f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'aria-label="{alt}">{"".join(parts)}</svg>'
            f"{self._legend()}{note}<details><summary>Figures</summary>{self.table().html()}</details></figure>"
        )

    def _extents(self) -> list[float]:
        if self.stacked:
            return [sum(value or 0.0 for value in row.values) for row in self.rows]
        found = []
        for row in self.rows:
            for value, error in zip(row.values, row.errors or [None] * len(row.values), strict=True):
                found.append((value or 0.0) + (error or 0.0))
        return found

    def _series(self, index: int, axis: Axis, pitch: int) -> str:
        hollow = self.series[index] in self.planned
        marks = []
        for number, row in enumerate(self.rows):
            top = TOP + pitch * number + (0 if self.stacked else THICK * index)
            value, error = row.values[index], (row.errors[index] if row.errors else None)
            before = sum(one or 0.0 for one in row.values[:index]) if self.stacked else 0.0
            start, end = axis.at(before), axis.at(before + (value or 0.0))
            if value is None:
                if not self.stacked:
                    marks.append(f'<text class="tick" x="{start + 5:.1f}" y="{top + 13}">not measured</text>')
                continue
            style = (
                'fill="none" stroke="currentColor" stroke-width="1.5"'
                if hollow
                else 'fill="currentColor" stroke="none"'
            )
            shape = (
                f'<rect x="{start:.1f}" y="{top + 1.5}" width="{max(0.8, end - start):.1f}" '
                f'height="{THICK - 3}" {style}>'
            )
            marks.append(
                f"{shape}<title>{html.escape(row.label)}, {html.escape(self.series[index])}: {shown(value)} "
                f"{self.unit}</title></rect>"
            )
            if error:
                low, high, y = axis.at(max(0.0, value - error)), axis.at(value + error), top + THICK / 2
                marks.append(
                    f'<path d="M{low:.1f} {y}H{high:.1f}M{low:.1f} {y - 4}V{y + 4}M{high:.1f} '
                    f'{y - 4}V{y + 4}" '
                    'style="stroke: var(--ink)" stroke-width="1.3"/>'
                )
                end = max(end, high)
            if not self.stacked:
                marks.append(
                    f'<text class="value" stroke="none" x="{end + 5:.1f}" '
                    f'y="{top + 13}">{shown(value, 3)}</text>'
                )
        return f'<g class="series colour-{index}" data-series="{index}">{"".join(marks)}</g>'

    def _legend(self) -> str:
        if len(self.series) < 2:
            return ""
        items = []
        for index, name in enumerate(self.series):
            fill = "none" if name in self.planned else "currentColor"
            swatch = f'<rect x="1" y="1" width="26" height="6" fill="{fill}" stroke="currentColor"/>'
            items.append(
                f'<button type="button" class="colour-{index}" data-series="{index}" aria-pressed="true">'
                f'<svg viewBox="0 0 28 8" aria-hidden="true">{swatch}</svg>{html.escape(name)}</button>'
            )
        return f'<div class="legend" role="group" aria-label="Show or hide a series">{"".join(items)}</div>'

    def png(self, path: Path) -> None:
        """The same with matplotlib, on white."""
        figure, axes = _canvas(
            0.9 + len(self.rows) * (0.30 if self.stacked else 0.16 + 0.19 * len(self.series))
        )
        for index, name in enumerate(self.series):
            hollow = name in self.planned
            for number, row in enumerate(self.rows):
                value = row.values[index]
                if value is None:
                    continue
                thick = 0.7 if self.stacked else 0.8 / len(self.series)
                y = number if self.stacked else number - 0.4 + thick * (index + 0.5)
                before = sum(one or 0.0 for one in row.values[:index]) if self.stacked else 0.0
                error = row.errors[index] if row.errors else None
                axes.barh(
                    *(y, value, thick * 0.9),
                    left=before,
                    color="none" if hollow else COLOURS[index],
                    edgecolor=COLOURS[index],
                    xerr=error,
                    error_kw={"elinewidth": 1, "capsize": 2},
                    label=name
                    if number == next(i for i, one in enumerate(self.rows) if one.values[index] is not None)
                    else None,
                )
                if not self.stacked:
                    axes.annotate(
                        shown(value, 3),
                        (value + (error or 0.0), y),
                        xytext=(4, 0),
                        textcoords="offset points",
                        va="center",
                        fontsize=7,
                    )
        axes.set_yticks(range(len(self.rows)), [row.label for row in self.rows], fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.12, y=0.01)
        axes.set_xlim(left=0)
        _finish(figure, axes, path, title=self.title, x=self.unit, y="", legend=len(self.series) > 1)


@dataclass(frozen=True)
class Lines:
    """Curves over the world size."""

    name: str
    title: str
    y: str
    series: Sequence[Series]
    note: str = ""
    empty = False

    def html(self) -> str:
        """An HTML figure."""
        return line_chart(self.title, x="processes", y=self.y, series=self.series, note=self.note)

    def png(self, path: Path) -> None:
        """The same with matplotlib, on white."""
        figure, axes = _canvas(3.6)
        for index, one in enumerate(self.series):
            ideal = one.name == "ideal"
            style = (
                {"color": "#57606a", "linestyle": "--"}
                if ideal
                else {"color": COLOURS[index % len(COLOURS)], "marker": "os"[index // len(COLOURS) % 2]}
            )
            axes.plot(one.x, one.y, label=one.name, linewidth=1.5, markersize=4, **style)
        axes.set_xticks(sorted({int(x) for one in self.series for x in one.x}))
        axes.set_ylim(bottom=0)
        _finish(figure, axes, path, title=self.title, x="processes", y=self.y, legend=True)


Chart = Bars | Lines


def _canvas(height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _finish(figure: Any, axes: Any, path: Path, *, title: str, x: str, y: str, legend: bool) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="#d8dee4", linewidth=0.6, axis="both" if y else "x")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path)


def charts(group: Group) -> list[Chart]:
    """Every chart of a comparison that has something to show."""
    cells = group.measured
    found: list[Chart] = [
        _throughput(cells),
        _step_time(cells),
        _memory(cells),
        _communication(cells),
        *_efficiency(group),
        _bubble(group),
        _breakdown(group),
    ]
    return [one for one in found if not one.empty]


def _throughput(cells: Sequence[Cell]) -> Bars:
    unit = cells[0].unit if cells else ""
    return Bars(
        "throughput",
        "Throughput",
        unit,
        ["measured"],
        [Row(cell.label, cell.key, [cell.throughput]) for cell in cells],
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _step_time(cells: Sequence[Cell]) -> Bars:
    rows = [
        Row(
            cell.label,
            cell.key,
            [_milliseconds(step.mean), _milliseconds(cell.planned("step_time_s"))],
            [_milliseconds(step.std), None],
        )
        for cell in cells
        if (step := cell.step_time)
    ]
    return Bars(
        "step-time",
        "Step time",
        "ms",
        ["measured", "plan"],
        rows,
        note="Whiskers: one standard deviation of single steps.",
    )


def _memory(cells: Sequence[Cell]) -> Bars:
    rows = [Row(cell.label, cell.key, [cell.memory_gib, cell.planned("total_gib")]) for cell in cells]
    kinds = {str(peaks.kind) for cell in cells if (peaks := cell.measurements.peak_memory_gib)}
    note = (
        f"Measured: {', '.join(sorted(kinds))}, of the fullest process. Plan: weights, gradients, optimizer, "
        "activations."
        if kinds
        else ""
    )
    return Bars("memory", "Peak memory a process", "GiB", ["measured", "plan"], rows, note=note)


def _communication(cells: Sequence[Cell]) -> Bars:
    rows = []
    for cell in (one for one in cells if one.world_size > 1):
        sent, formula = cell.sent_bytes, cell.formula_bytes
        rows.append(
            Row(
                cell.label,
                cell.key,
                [None if sent is None else sent / 1e6, None if formula is None else formula / 1e6],
            )
        )
    note = "Of the process that sends most; a ring all-reduce of S bytes over N sends 2 (N-1)/N S."
    return Bars("communication", "Sent in a step", "MB", ["counted", "formula"], rows, note=note)


def _efficiency(group: Group) -> list[Lines]:
    series = []
    for strategy in dict.fromkeys(cell.strategy for cell in group.measured):
        points = [
            (cell.world_size, cell.efficiency)
            for cell in group.measured
            if cell.strategy == strategy and cell.efficiency is not None
        ]
        if points:
            first = [(1, 1.0)] if group.at(strategy, 1) or group.at("single", 1) else []
            x, y = zip(*[*first, *((float(n), value) for n, value in points)], strict=True)
            series.append(Series(strategy, x, y))
    if not series:
        return []
    sizes = sorted({x for one in series for x in one.x})
    ideal = Series("ideal", sizes, [1.0] * len(sizes), colour=7)
    note = (
        "Throughput of n processes over n times that of one, of the same strategy where it was measured, "
        "else of single."
    )
    return [Lines("efficiency", "Scaling efficiency", "efficiency", [*series, ideal], note)]


def _bubble(group: Group) -> Bars:
    """What the processes lose against doing all of one process's work together: for pipelines it should be
    the bubble.
    """
    rows = []
    for cell in group.measured:
        formula = cell.bubble
        if cell.world_size > 1 and formula and cell.efficiency is not None:
            rows.append(Row(cell.label, cell.key, [100 * max(0.0, 1 - cell.efficiency), 100 * formula]))
    note = "Lost: 1 - efficiency. Formula: (P-1)/(M+P-1); naive model parallelism is M = 1."
    return Bars("bubble", "Pipelines: share of the step lost", "%", ["measured", "formula"], rows, note=note)


def breakdown(cell: Cell, group: Group) -> tuple[float, float, float] | None:
    """Seconds of a step: an equal share of one process's step, waiting by the bubble's formula, and the rest.

    The rest is communication that shows and the strategy's own overhead; None without a single process to
    compare with.
    """
    one_process, step = group.at("single", 1) or group.at(cell.strategy, 1), cell.step_time
    alone = one_process.step_time if one_process else None
    if alone is None or step is None or cell.plan is None:
        return None
    bubble = cell.bubble or 0.0
    compute = min(step.mean, alone.mean / cell.world_size)
    idle = min(step.mean - compute, compute * bubble / (1 - bubble))
    return compute, idle, step.mean - compute - idle


def _breakdown(group: Group) -> Bars:
    rows = []
    for cell in group.measured:
        parts = breakdown(cell, group)
        if parts is not None and cell.world_size > 1:
            rows.append(Row(cell.label, cell.key, [1000 * part for part in parts]))
    note = (
        "Compute: the single process's step over the processes. Waiting: the bubble's formula. The rest: "
        "communication and overhead."
    )
    return Bars(
        "breakdown",
        "Where a step's time goes",
        "ms",
        ["compute", "waiting", "communication and overhead"],
        rows,
        note,
        stacked=True,
    )
