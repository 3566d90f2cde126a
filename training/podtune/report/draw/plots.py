"""Charts, each once as data: the page's script draws them (page.js), matplotlib the same as PNG. No torch.

    curve = Series("lr-1e-3", {"step": steps, "tokens": tokens}, losses)
    figure = Lines("loss", "Training loss", "loss (nats per token)", {"step": "step"}, [curve]).html()
    bars = Bars("throughput", "Throughput", "tokens/s", ["measured"], [Bar("ddp ×2", [5120.0])]).html()

``html()`` gives a ``<figure>`` for a page of podtune.report.draw.page, with its figures in a table below.
"""

from __future__ import annotations

import html
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podtune.report.draw.tables import Column, Table, Value, shown

POINTS = 400  # a longer curve is drawn by the means of so many stretches, with their lowest and highest
TABLE_ROWS = 12
COLOURS = ("#1d4ed8", "#c2410c", "#047857", "#a21caf", "#0e7490", "#b91c1c", "#6d28d9", "#4d7c0f")


@dataclass(frozen=True)
class Series:
    """One curve. ``places`` by axis, each as long as ``values``; all finite. ``colour`` counts on over 8, and
    the dashes tell 0 from 8. ``end``: why it ended before its time; its last point is marked.
    """

    name: str
    places: Mapping[str, Sequence[float]]
    values: Sequence[float]
    colour: int = 0
    end: str = ""

    def drawn(self) -> dict[str, Any]:
        """What the page's script needs."""
        count = len(self.values)
        size = -(-count // POINTS)
        starts = range(0, count, size) if size > 2 else range(0)
        drawn: dict[str, Any] = {"name": self.name, "colour": self.colour, "end": self.end}
        if not starts:
            places = {axis: [_digits(place) for place in each] for axis, each in self.places.items()}
            return drawn | {"x": places, "y": [_digits(value) for value in self.values]}
        stretches = [self.values[start : start + size] for start in starts]
        ends = [min(start + size, count) - 1 for start in starts]
        return drawn | {
            "x": {axis: [_digits(each[end]) for end in ends] for axis, each in self.places.items()},
            "y": [_digits(math.fsum(stretch) / len(stretch)) for stretch in stretches],
            "low": [_digits(min(stretch)) for stretch in stretches],
            "high": [_digits(max(stretch)) for stretch in stretches],
        }


def _digits(value: float) -> float:
    """Six significant digits: more than a screen shows, and half the page."""
    return int(value) if value == int(value) else float(f"{value:.6g}")


@dataclass(frozen=True)
class Lines:
    """Curves over one of ``axes`` (name -> label with unit). ``runs``: each is a run of the page, switched by
    its table. ``log``: the y axis is logarithmic from the start; the reader can make every one so.
    """

    name: str
    title: str
    y: str
    axes: Mapping[str, str]
    series: Sequence[Series]
    note: str = ""
    runs: bool = False
    log: bool = False
    smooth: bool = False

    @property
    def empty(self) -> bool:
        """True if there is nothing to draw."""
        return not any(curve.values for curve in self.series)

    def html(self) -> str:
        """An HTML figure."""
        axes = {
            axis: label
            for axis, label in self.axes.items()
            if any(curve.places.get(axis) for curve in self.series)
        }
        data: dict[str, Any] = {
            "kind": "lines",
            "title": self.title,
            "y": self.y,
            "axes": axes,
            "runs": self.runs,
        }
        data |= {"log": self.log, "smooth": self.smooth, "series": [curve.drawn() for curve in self.series]}
        notes = [self.note] if self.note else []
        longest = max((len(curve.values) for curve in self.series), default=0)
        if longest > 2 * POINTS:
            notes.append(
                f"{longest:,} points, drawn as the means of {POINTS} stretches; the band spans each."
            )
        if same := self._equal():
            notes.append(f"Equal, one upon the other: {'; '.join(same)}.")
        return _figure(f"{self.title}: {self.y}", data, " ".join(notes), self.table(axes), self.empty)

    def _equal(self) -> list[str]:
        """Names of curves that hide each other."""
        by_values: dict[tuple[float, ...], list[str]] = {}
        for curve in self.series:
            if curve.values:
                by_values.setdefault(tuple(curve.values), []).append(curve.name)
        return [", ".join(names) for names in by_values.values() if len(names) > 1]

    def table(self, axes: Mapping[str, str]) -> Table:
        """Each curve at a dozen of its own points, evenly spread, with the last one."""
        axis = next(iter(axes), "")
        rows: list[list[Value]] = []
        for curve in self.series:
            places, last = curve.places.get(axis, ()), len(curve.values) - 1
            picked = {round(index * last / (TABLE_ROWS - 1)) for index in range(TABLE_ROWS)} if places else ()
            rows += [[curve.name, places[index], curve.values[index]] for index in sorted(picked)]
        return Table(
            [Column("run"), Column(axes.get(axis, ""), "right", 6), Column(self.y, "right", 5)], rows
        )

    def png(self, path: Path, subtitle: str = "") -> None:
        """The same with matplotlib, on white, each curve named at its end."""
        figure, axes = _canvas(3.6)
        axis, label = next(iter(self.axes.items()))
        for curve in self.series:
            ideal = curve.name == "ideal"
            colour = "#57606a" if ideal else COLOURS[curve.colour % len(COLOURS)]
            style = "--" if ideal else ("-", "--", ":", "-.")[curve.colour // len(COLOURS) % 4]
            axes.plot(
                curve.places[axis], curve.values, color=colour, linestyle=style, linewidth=1.5, marker="o"
            )
            end = (curve.places[axis][-1], curve.values[-1])
            axes.annotate(
                curve.name, end, (6, 0), textcoords="offset points", color=colour, va="center", fontsize=7
            )
        axes.set_xticks(sorted({int(place) for curve in self.series for place in curve.places[axis]}))
        axes.set_ylim(bottom=0)
        axes.margins(x=0.12)
        _finish(figure, axes, path, title=self.title, subtitle=subtitle, x=label, y=self.y)


@dataclass(frozen=True)
class Bar:
    """One row of bars: a value and a possible error for each series; None is not measured. ``href``: where
    its label leads.
    """

    label: str
    values: Sequence[float | None]
    errors: Sequence[float | None] = ()
    href: str = ""


@dataclass(frozen=True)
class Bars:
    """Horizontal bars from zero, one row a label: side by side, or ``stacked``. Series named ``planned`` are
    drawn hollow.
    """

    name: str
    title: str
    unit: str
    series: Sequence[str]
    rows: Sequence[Bar]
    note: str = ""
    stacked: bool = False
    planned: Sequence[str] = ("plan", "formula")

    @property
    def empty(self) -> bool:
        """True if there is nothing to draw."""
        return not any(value is not None for row in self.rows for value in row.values)

    def table(self) -> Table:
        """The same figures."""
        columns = (Column(f"{name} ({self.unit})", "right") for name in self.series)
        return Table([Column("name"), *columns], [[row.label, *row.values] for row in self.rows])

    def html(self) -> str:
        """An HTML figure; its labels lead to where the rows say."""
        rows = [
            {"label": row.label, "href": row.href, "values": list(row.values), "errors": list(row.errors)}
            for row in self.rows
        ]
        data: dict[str, Any] = {
            "kind": "bars",
            "title": self.title,
            "unit": self.unit,
            "series": list(self.series),
        }
        data |= {"rows": rows, "stacked": self.stacked, "planned": list(self.planned)}
        return _figure(self.title, data, self.note, self.table(), self.empty)

    def png(self, path: Path, subtitle: str = "") -> None:
        """The same with matplotlib, on white."""
        thick = 0.7 if self.stacked else 0.8 / len(self.series)
        pitch = 0.30 if self.stacked else 0.16 + 0.19 * len(self.series)
        figure, axes = _canvas(1.1 + len(self.rows) * pitch)
        for index, name in enumerate(self.series):
            label: str | None = name
            for number, row in enumerate(self.rows):
                value, error = row.values[index], row.errors[index] if row.errors else None
                if value is None:
                    continue
                y = number if self.stacked else number - 0.4 + thick * (index + 0.5)
                before = sum(earlier or 0.0 for earlier in row.values[:index]) if self.stacked else 0.0
                colour = COLOURS[index % len(COLOURS)]
                axes.barh(
                    y,
                    value,
                    thick * 0.9,
                    left=before,
                    color="none" if name in self.planned else colour,
                    edgecolor=colour,
                    xerr=error,
                    error_kw={"elinewidth": 1, "capsize": 2},
                    label=label,
                )
                label = None  # one entry of the legend a series
                if not self.stacked:
                    end = (value + (error or 0.0), y)
                    axes.annotate(
                        shown(value, 3), end, (4, 0), textcoords="offset points", va="center", fontsize=7
                    )
        axes.set_yticks(range(len(self.rows)), [row.label for row in self.rows], fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.12, y=0.01)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter("{x:,g}")
        if len(self.series) > 1:
            axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        _finish(figure, axes, path, title=self.title, subtitle=subtitle, x=self.unit, y="")


Chart = Bars | Lines


def _figure(label: str, data: dict[str, Any], note: str, table: Table, empty: bool) -> str:
    title = html.escape(str(data["title"]))
    if empty:
        return (
            f'<figure class="chart"><figcaption>{title}</figcaption><p class="note">No run recorded '
            "this.</p></figure>"
        )
    content = html.escape(json.dumps(data, ensure_ascii=False, separators=(",", ":")), quote=True)
    unit = f' <span class="unit">{html.escape(data["y"])}</span>' if "y" in data else ""
    noted = f'<p class="note">{html.escape(note)}</p>' if note else ""
    return (
        f'<figure class="chart" aria-label="{html.escape(label, quote=True)}" data-chart="{content}">'
        f'<figcaption>{title}{unit}</figcaption><div class="plot-here"><p class="note">Drawn by this page\'s '
        f"own script; the figures are below.</p></div>{noted}"
        f"<details><summary>Figures</summary>{table.html()}</details></figure>"
    )


def _canvas(height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _finish(figure: Any, axes: Any, path: Path, *, title: str, subtitle: str, x: str, y: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    axes.set_title(subtitle, loc="left", fontsize=7, color="#57606a")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="#d8dee4", linewidth=0.6, axis="both" if y else "x")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def loss_curve_png(run_dir: Path, path: Path) -> bool:
    """Draw training and evaluation loss of one run with matplotlib; false without a file if it has none.

    Raises:
        UserError: there is no readable run in ``run_dir``.
    """
    from podtune.report.runs.runs import load_run

    run = load_run(Path(run_dir))
    train, evaluation = run.curve("train", "loss"), run.curve("eval", "loss")
    if not train[0] and not evaluation[0]:
        return False
    figure, axes = _canvas(4.0)
    width = max(1, len(train[0]) // 50)
    if width > 1:
        axes.plot(*train, color="#93c5fd", linewidth=0.8, alpha=0.8)
    if train[0]:
        label = f"training, mean of {width} points" if width > 1 else "training"
        axes.plot(train[0], running_mean(train[1], width), color="#1d4ed8", linewidth=1.8, label=label)
    if evaluation[0]:
        axes.plot(*evaluation, color="#c2410c", linewidth=1.6, marker="o", markersize=4, label="evaluation")
        end = (evaluation[0][-1], evaluation[1][-1])
        axes.annotate(
            shown(end[1]), end, (-4, 9), textcoords="offset points", ha="right", color="#c2410c", fontsize=9
        )
    axes.margins(x=0.01)
    axes.legend(frameon=False)
    _finish(figure, axes, path, title=run.name, subtitle=run.one_line(), x="step", y="loss (nats per token)")
    return True


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Each value's mean with its neighbours within ``width // 2`` on either side (fewer at the ends)."""
    half = width // 2
    return [statistics.fmean(values[max(0, index - half) : index + half + 1]) for index in range(len(values))]
