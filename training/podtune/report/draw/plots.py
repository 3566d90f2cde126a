"""Charts of a page, drawn by Plotly: curves, and bars. No torch.

    curve = Series("lr-1e-3", {"step": steps, "tokens": tokens}, losses)
    figure = Lines("Training loss", "nats per token", {"step": "step"}, [curve]).html()
    bars = Bars("Throughput", "tokens/s", ["measured"], [Bar("ddp ×2", [5120.0])]).html()

``html()`` gives a ``<figure>`` for podtune.report.draw.page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from podtune.report.draw.tables import shown
from podtune.run.record import Json

if TYPE_CHECKING:
    import plotly.graph_objects as go

POINTS = 300  # a longer curve is drawn by the means of so many stretches, its extremes faint behind them
MARKED = 25  # points up to which each has a marker
UNIFIED = 12  # curves that one hover label can name
BAR_PX = 16
# of 3:1 contrast against both papers of the page (WCAG 1.4.11), so that light and dark share them
COLOURS = ("#2f7de1", "#d9730d", "#2b9a5b", "#c04fd0", "#0f93a8", "#e0455e", "#8a6cf0", "#7a931f")
DASHES = {"solid": "", "dash": "8 4", "dot": "2 3", "dashdot": "8 3 2 3"}  # tell curve 0 from curve 8
PLANNED = ("plan", "formula")  # bars of these series are hollow


def look_of(index: int) -> tuple[str, str]:
    """Colour and dash of a page's curve; colours repeat after eight, with another dash."""
    return COLOURS[index % len(COLOURS)], list(DASHES)[index // len(COLOURS) % len(DASHES)]


@dataclass(frozen=True)
class Series:
    """One curve of finite ``values``, with as many ``places`` on each axis.

    ``index`` decides its look. ``end``: why the run ended early; its last point is marked.
    """

    name: str
    places: Mapping[str, Sequence[float]]
    values: Sequence[float]
    index: int = 0
    end: str = ""

    def traces(self) -> list[go.Scatter]:
        """Plotly's traces: the extremes of a long curve faint, the curve, and a cross at an early end.

        ``meta`` holds the places by axis, of which the page's script makes ``x``.
        """
        import plotly.graph_objects as go

        count, value_at = len(self.values), self.values.__getitem__
        colour, dash = look_of(self.index)

        def trace(name: str, indices: Sequence[int], values: Sequence[float], **look: object) -> go.Scatter:
            places = {axis: [_digits(each[index]) for index in indices] for axis, each in self.places.items()}
            # the same group for all traces of a run: the legend switches them together
            return go.Scatter(
                name=_text(name), legendgroup=str(self.index), meta=places, y=[*map(_digits, values)], **look
            )

        size = max(1, -(-count // POINTS))
        stretches = [range(start, min(start + size, count)) for start in range(0, count, size)]
        drawn = [math.fsum(map(value_at, each)) / len(each) for each in stretches]
        traces = []
        if size > 1:
            pairs = [sorted({min(each, key=value_at), max(each, key=value_at)}) for each in stretches]
            extremes = [index for pair in pairs for index in pair]
            faint = {"mode": "lines", "opacity": 0.3, "hoverinfo": "skip", "showlegend": False}
            line = {"color": colour, "width": 1}
            traces.append(trace(self.name, extremes, [*map(value_at, extremes)], line=line, **faint))
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
    unit: str
    axes: Mapping[str, str]
    series: Sequence[Series]
    note: str = ""
    runs: bool = False
    log: bool = False
    log_x: bool = False
    ticks: Sequence[float] = ()
    from_zero: bool = False

    @property
    def empty(self) -> bool:
        return not any(curve.values for curve in self.series)

    def html(self) -> str:
        curves = [curve for curve in self.series if curve.values]
        known = {axis for curve in curves for axis, places in curve.places.items() if places}
        layout: Json = {
            "height": 310,
            "hovermode": "x unified" if len(curves) <= UNIFIED else "closest",
            "showlegend": not self.runs and len(curves) > 1,
            "xaxis": {"type": "log"} if self.log_x else {"rangemode": "tozero"},
            "yaxis": {
                "type": "log" if self.log else "linear",
                "rangemode": "tozero" if self.from_zero else "normal",
            },
            "meta": {axis: _text(label) for axis, label in self.axes.items() if axis in known},
        }
        if self.ticks:
            layout["xaxis"] |= {"tickvals": [*self.ticks], "ticktext": [f"{tick:g}" for tick in self.ticks]}
        note, longest = self.note, max((len(curve.values) for curve in curves), default=0)
        if longest > POINTS:
            note += (
                f" {longest:,} points, drawn as the means of {POINTS} stretches; their extremes are faint."
            )
        return _figure(self, [trace for curve in curves for trace in curve.traces()], layout, note)


@dataclass(frozen=True)
class Bar:
    """One row of bars: a value for each series; None is not measured."""

    label: str
    values: Sequence[float | None]


@dataclass(frozen=True)
class Bars:
    """Horizontal bars from zero, one row a label. ``runs``: each row is a run of the page, in its colour."""

    title: str
    unit: str
    series: Sequence[str]
    rows: Sequence[Bar]
    note: str = ""
    runs: bool = False

    @property
    def empty(self) -> bool:
        return not any(value is not None for row in self.rows for value in row.values)

    def html(self) -> str:
        places, each = list(range(len(self.rows))), len(self.series)
        layout: Json = {
            "height": 72 + 6 * (each > 1) + len(places) * (BAR_PX * each + 8),
            "margin": {"r": 48},  # for the values at the bars' ends
            "barmode": "group",
            "bargap": 0.25,
            "showlegend": each > 1,
            "hovermode": "closest",
            "xaxis": {"title": {"text": _text(self.unit)}, "rangemode": "tozero"},
            "yaxis": {
                "autorange": "reversed",
                "tickvals": places,
                "ticktext": [_text(_short(row.label)) for row in self.rows],
                "showgrid": False,
            },
        }
        return _figure(self, [self._trace(index) for index in range(each)], layout, self.note)

    def _trace(self, index: int) -> go.Bar:
        import plotly.graph_objects as go

        colour = [look_of(run if self.runs else index)[0] for run in range(len(self.rows))]
        hollow = self.series[index] in PLANNED
        values = [row.values[index] for row in self.rows]
        return go.Bar(
            orientation="h",
            name=_text(self.series[index]),
            x=values,
            y=list(range(len(values))),
            hovertext=[_text(row.label) for row in self.rows],
            marker={
                "color": "rgba(0,0,0,0)" if hollow else colour if self.runs else colour[0],
                "line": {"color": colour, "width": 1.5},
            },
            text=["" if value is None else shown(value, 3) for value in values],
            textposition="outside",
            cliponaxis=False,
        )


Chart = Bars | Lines


def _short(label: str) -> str:
    """``label`` for the side of a narrow chart: names of sweeps differ at their ends."""
    return label if len(label) <= 24 else f"{label[:11]}…{label[-12:]}"


def _figure(chart: Chart, traces: Sequence[go.Scatter | go.Bar], layout: Json, note: str) -> str:
    import plotly.graph_objects as go

    # to_json writes < > and / as escapes, so that no name ends the script element; orjson, where somebody has
    # installed it, refuses names with lone surrogates
    drawing = go.Figure(data=traces, layout=layout | {"template": {}}).to_json(engine="json")
    noted = f'<p class="note">{html.escape(note)}</p>' if note else ""
    title, unit = html.escape(chart.title), html.escape(chart.unit)
    return (
        f'<figure class="chart" aria-label="{title}: {unit}"><figcaption>{title} <span class="unit">{unit}'
        '</span></figcaption><div class="plot"><script type="application/json">'
        f"{drawing}</script></div>{noted}</figure>"
    )


def figures(charts: Sequence[Chart]) -> str:
    """The charts that have something to show, beside each other."""
    drawn = "".join(chart.html() for chart in charts if not chart.empty)
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def legend(names: Sequence[str]) -> str:
    """Buttons that show and hide a run in every chart of runs; each shows its curve's colour and dash."""
    buttons = []
    for index, name in enumerate(names):
        colour, dash = look_of(index)
        line = f'<line x2="28" y1="4" y2="4" stroke="{colour}" stroke-dasharray="{DASHES[dash]}"/>'
        buttons.append(
            f'<button type="button" data-run="{index}" aria-pressed="true"><svg width="28" height="8" '
            f'aria-hidden="true">{line}</svg>{html.escape(name)}</button>'
        )
    return f'<div class="legend" role="group" aria-label="Show or hide a run">{"".join(buttons)}</div>'
