"""Charts of a page, drawn by Plotly: curves of runs, and bars. No torch.

    curve = Series("lr-1e-3", {"step": steps, "tokens": tokens}, losses)
    figure = Lines("Training loss", "nats per token", {"step": "step"}, [curve]).html()
    bars = Bars("Throughput", "tokens/s", ["measured"], [Bar("ddp ×2", [5120.0])]).html()

``html()`` gives a ``<figure>`` for podtune.report.draw.page, with its values in a table below.
"""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from podtune.report.draw.tables import Column, Table, Value, shown
from podtune.run.record import Json

if TYPE_CHECKING:
    import plotly.graph_objects as go

POINTS = 300  # a longer curve is drawn by the means of so many stretches, its extremes faint behind them
MARKED = 25  # points up to which each has a marker
SMOOTHED_FROM = 40  # points from which a running mean stands before the raw curve
TABLE_ROWS = 12
UNIFIED = 12  # curves that one hover label can name
BAR_PX = 16
# of 3:1 contrast against both papers of the page (WCAG 1.4.11), so that light and dark share them
COLOURS = ("#2f7de1", "#d9730d", "#2b9a5b", "#c04fd0", "#0f93a8", "#e0455e", "#8a6cf0", "#7a931f")
DASHES = ("solid", "dash", "dot", "dashdot")  # tell curve 0 from curve 8
PATTERNS = ("", "/", ".")


@dataclass(frozen=True)
class Series:
    """One curve of finite ``values``, with as many ``places`` on each axis.

    ``colour`` continues over 8 with other dashes. ``end``: why the run ended early; its last point is marked.
    """

    name: str
    places: Mapping[str, Sequence[float]]
    values: Sequence[float]
    colour: int = 0
    end: str = ""

    def _at(self, indices: Sequence[int]) -> dict[str, list[float]]:
        return {axis: [_digits(places[index]) for index in indices] for axis, places in self.places.items()}

    def traces(self, *, smooth: bool) -> list[go.Scatter]:
        """Plotly's traces: the raw curve or its extremes faint, the curve, and a cross at an early end.

        ``meta`` holds the places by axis, of which the page's script makes ``x``.
        """
        import plotly.graph_objects as go

        count, value_at = len(self.values), self.values.__getitem__
        size = max(1, -(-count // POINTS))
        stretches = [range(start, min(start + size, count)) for start in range(0, count, size)]
        drawn = [math.fsum(map(value_at, each)) / len(each) for each in stretches]
        smooth = smooth and len(drawn) >= SMOOTHED_FROM
        if smooth:
            drawn = running_mean(drawn, round(len(drawn) / SMOOTHED_FROM))
        colour = COLOURS[self.colour % len(COLOURS)]
        dash = DASHES[self.colour // len(COLOURS) % len(DASHES)]

        def trace(name: str, indices: Sequence[int], values: Sequence[float], **look: object) -> go.Scatter:
            # the same group for all traces of a run: the legend switches them together
            places = self._at(indices)
            return go.Scatter(
                name=_text(name), legendgroup=str(self.colour), meta=places, y=[*map(_digits, values)], **look
            )

        traces = []
        if smooth or size > 1:
            faint = {"mode": "lines", "opacity": 0.3, "hoverinfo": "skip", "showlegend": False}
            extremes = [sorted({min(each, key=value_at), max(each, key=value_at)}) for each in stretches]
            raw = [index for each in extremes for index in each]
            line = {"color": colour, "width": 1}
            traces.append(trace(self.name, raw, [*map(value_at, raw)], line=line, **faint))
        mode = "lines+markers" if count <= MARKED else "lines"
        line = {"color": colour, "dash": dash, "width": 2}
        traces.append(trace(self.name, [each[-1] for each in stretches], drawn, mode=mode, line=line))
        if self.end:
            cross = {"symbol": "x", "size": 11, "color": colour}
            end = trace(f"{self.name}: {self.end}", [count - 1], drawn[-1:], mode="markers", marker=cross)
            traces.append(end.update(showlegend=False))
        return traces


def _digits(value: float) -> float:
    """Six significant digits: more than a screen shows, and half the page."""
    return int(value) if value == int(value) else float(f"{value:.6g}")


def _text(value: str) -> str:
    """``value`` as Plotly shows it literally: it reads some of HTML in names and labels."""
    return html.escape(value, quote=False)


@dataclass(frozen=True)
class Lines:
    """Curves over one of ``axes`` (name -> label with unit).

    ``runs``: each is a run of the page, named and switched by the page's legend. ``log``: the y axis is
    logarithmic from the start, ``from_zero`` begins at 0: a change of 2 % is no cliff.
    """

    title: str
    y: str
    axes: Mapping[str, str]
    series: Sequence[Series]
    note: str = ""
    runs: bool = False
    log: bool = False
    log_x: bool = False
    ticks: Sequence[float] = ()
    from_zero: bool = False
    smooth: bool = False

    @property
    def empty(self) -> bool:
        return not any(curve.values for curve in self.series)

    def html(self) -> str:
        """An HTML figure."""
        curves = [curve for curve in self.series if curve.values]
        axes = {
            axis: label
            for axis, label in self.axes.items()
            if any(curve.places.get(axis) for curve in curves)
        }
        layout: Json = {
            "height": 310,
            "hovermode": "x unified" if len(curves) <= UNIFIED else "closest",
            "showlegend": not self.runs and len(curves) > 1,
            "xaxis": {"type": "log"} if self.log_x else {"rangemode": "tozero"},
            "yaxis": {
                "type": "log" if self.log else "linear",
                "rangemode": "tozero" if self.from_zero else "normal",
            },
            "meta": {axis: _text(label) for axis, label in axes.items()},
        }
        if self.ticks:
            layout["xaxis"] |= {"tickvals": [*self.ticks], "ticktext": [f"{tick:g}" for tick in self.ticks]}
        notes = [self.note] if self.note else []
        longest = max((len(curve.values) for curve in curves), default=0)
        if longest > POINTS:
            notes.append(
                f"{longest:,} points, drawn as the means of {POINTS} stretches; their extremes are faint."
            )
        if same := self._equal():
            notes.append(f"Equal, one upon the other: {'; '.join(same)}.")
        traces = [trace for curve in curves for trace in curve.traces(smooth=self.smooth)]
        return _figure(self.title, self.y, traces, layout, " ".join(notes), self.table(axes))

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


@dataclass(frozen=True)
class Bar:
    """One row of bars: a value and a possible error for each series; None is not measured."""

    label: str
    values: Sequence[float | None]
    errors: Sequence[float | None] = ()


@dataclass(frozen=True)
class Bars:
    """Horizontal bars from zero, one row a label, side by side or ``stacked``, hollow if ``planned``.

    ``runs``: each row is a run of the page and has its colour.
    """

    title: str
    unit: str
    series: Sequence[str]
    rows: Sequence[Bar]
    note: str = ""
    stacked: bool = False
    planned: Sequence[str] = ("plan", "formula")
    runs: bool = False

    @property
    def empty(self) -> bool:
        return not any(value is not None for row in self.rows for value in row.values)

    def html(self) -> str:
        """An HTML figure."""
        columns = (Column(f"{name} ({self.unit})", "right") for name in self.series)
        table = Table([Column("name"), *columns], [[row.label, *row.values] for row in self.rows])
        places = list(range(len(self.rows)))
        each = 1 if self.stacked else len(self.series)
        layout: Json = {
            "height": 72 + 6 * (each > 1 or self.stacked) + len(places) * (BAR_PX * each + 8),
            "margin": {"r": 48},  # for the values at the bars' ends
            "barmode": "stack" if self.stacked else "group",
            "bargap": 0.25,
            "showlegend": len(self.series) > 1,
            "hovermode": "closest",
            "xaxis": {"title": {"text": _text(self.unit)}, "rangemode": "tozero"},
            "yaxis": {
                "autorange": "reversed",
                "tickvals": places,
                "ticktext": [_text(_short(row.label)) for row in self.rows],
                "showgrid": False,
            },
        }
        traces = [] if self.empty else [self._trace(index) for index in range(len(self.series))]
        return _figure(self.title, self.unit, traces, layout, self.note, table)

    def _trace(self, index: int) -> go.Bar:
        import plotly.graph_objects as go

        hollow = self.series[index] in self.planned
        each = range(len(self.rows)) if self.runs else [index]
        colours = [COLOURS[one % len(COLOURS)] for one in each]
        colour = colours if self.runs else colours[0]
        values = [row.values[index] for row in self.rows]
        bar = go.Bar(
            orientation="h",
            name=_text(self.series[index]),
            x=values,
            y=list(range(len(values))),
            hovertext=[_text(row.label) for row in self.rows],
            marker={
                "color": "rgba(0,0,0,0)" if hollow else colour,
                "line": {"color": colour, "width": 1.5},
                "pattern": {"shape": PATTERNS[index % len(PATTERNS)] if self.stacked else ""},
            },
        )
        errors = [row.errors[index] if row.errors else None for row in self.rows]
        if not self.stacked:
            text = ["" if value is None else shown(value, 3) for value in values]
            # beside a whisker Plotly would write upon it
            place = "inside" if any(errors) else "outside"
            bar.update(text=text, textposition=place, insidetextanchor="start", textangle=0, cliponaxis=False)
            # else Plotly shrinks the text of a bar shorter than it, to be illegible
            bar.update(constraintext="none")
        if any(errors):
            bar.update(error_x={"array": errors, "thickness": 1, "width": 3})
        return bar


Chart = Bars | Lines


def _short(label: str) -> str:
    """``label`` for the side of a narrow chart: names of sweeps differ at their ends."""
    return label if len(label) <= 24 else f"{label[:11]}…{label[-12:]}"


def _figure(
    title: str, unit: str, traces: Sequence[go.Scatter | go.Bar], layout: Json, note: str, table: Table
) -> str:
    import plotly.graph_objects as go

    caption = f'{html.escape(title)} <span class="unit">{html.escape(unit)}</span>'
    if not traces:
        return (
            f'<figure class="chart"><figcaption>{caption}</figcaption><p class="note">No run recorded '
            "this.</p></figure>"
        )
    # to_json writes < > and / as escapes, so that no name ends the script element
    drawing = go.Figure(data=traces, layout=layout | {"template": {}}).to_json()
    noted = f'<p class="note">{html.escape(note)}</p>' if note else ""
    label = html.escape(f"{title}: {unit}", quote=True)
    return (
        f'<figure class="chart" aria-label="{label}"><figcaption>{caption}</figcaption>'
        f'<div class="plot"><script type="application/json">{drawing}</script></div>{noted}'
        f"<details><summary>Values</summary>{table.html()}</details></figure>"
    )


def legend(names: Sequence[str]) -> str:
    """Buttons that show and hide a run in every chart of runs; each shows its curve's colour and dash."""
    dashes = dict(zip(DASHES, ("", "8 4", "2 3", "8 3 2 3"), strict=True))
    buttons = []
    for index, name in enumerate(names):
        dash = dashes[DASHES[index // len(COLOURS) % len(DASHES)]]
        colour = COLOURS[index % len(COLOURS)]
        line = f'<line x2="28" y1="4" y2="4" stroke="{colour}" stroke-dasharray="{dash}"/>'
        buttons.append(
            f'<button type="button" data-run="{index}" aria-pressed="true"><svg width="28" height="8" '
            f'aria-hidden="true">{line}</svg>{html.escape(name)}</button>'
        )
    return f'<div class="legend" role="group" aria-label="Show or hide a run">{"".join(buttons)}</div>'


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value with its neighbours within ``width // 2`` on either side (fewer at the ends)."""
    half = width // 2
    return [statistics.fmean(values[max(0, index - half) : index + half + 1]) for index in range(len(values))]
