"""Charts as inline SVG with a legend, units and their data in a table below; and the loss curve as PNG. No
torch.

    figure = line_chart("Loss", x="step", y="loss (nats per token)", series=[Series("lr-1e-3", steps,
    losses)]) figure = bar_chart("Throughput", y="tokens/s", bars=[("ddp", 5120.0), ("fsdp", 4300.0)])

Both return HTML to put into a page of podtune.report.draw.page, whose script switches series on and off and
whose style colours
them: colours are CSS variables, so a chart follows the reader's light or dark scheme. Without script every
chart shows all.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from podtune.report.draw.tables import Column, Table, shown

WIDTH, HEIGHT = 600, 330
LEFT, RIGHT, TOP, BOTTOM = 72, 14, 40, 58
MAX_POINTS = 400  # a curve of more points is thinned: no screen shows more, and the page stays small
SMOOTH_FROM, SMOOTH_SHARE = 80, 40  # a running mean from so many points on, over so small a share of them
MARKED_POINTS = 25  # a curve of so few points shows each of them
TABLE_ROWS = 12
COLOURS = 8
DASHES = ("", "12 3", "3 3", "12 3 3 3", "6 4", "18 4", "2 4", "6 2 2 2")  # told apart without colour, too


@dataclass(frozen=True)
class Series:
    """One curve. ``x`` and ``y`` have equal length; a point that is not finite is left out. ``colour``: 0 to
    7, else in order.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int | None = None
    points_only: bool = False

    def points(self) -> list[tuple[float, float]]:
        """The finite points."""
        return [(a, b) for a, b in zip(self.x, self.y, strict=True) if math.isfinite(a) and math.isfinite(b)]


def line_chart(
    title: str,
    *,
    x: str,
    y: str,
    series: Sequence[Series],
    note: str = "",
    log_y: bool = False,
    smooth: bool = False,
) -> str:
    """An HTML ``<figure>``: curves over a common axis. ``x`` and ``y`` are axis labels with their units.

    ``smooth``: a curve of many points is drawn faintly, with its running mean over it; the note says so.
    """
    drawn = [[point for point in one.points() if not log_y or point[1] > 0] for one in series]
    everything = [point for points in drawn for point in points]
    if not everything:
        return (
            f'<figure class="chart"><figcaption>{html.escape(title)}</figcaption><p class="note">No run '
            "recorded this.</p></figure>"
        )
    x_axis = Axis.fit([point[0] for point in everything], LEFT, WIDTH - RIGHT)
    y_axis = Axis.fit([point[1] for point in everything], HEIGHT - BOTTOM, TOP, log=log_y)
    frame = _grid(x_axis, y_axis) + _axis_titles(x, y)
    curves = []
    for index, (one, points) in enumerate(zip(series, drawn, strict=True)):
        layers = [points]
        if smooth and len(points) >= SMOOTH_FROM:
            layers.append(running_mean(points, len(points) // SMOOTH_SHARE))
        spots = [[(x_axis.at(a), y_axis.at(b)) for a, b in thin(layer, MAX_POINTS)] for layer in layers]
        curves.append(_curve(index, index % COLOURS if one.colour is None else one.colour, one, spots))
    if smooth and any(len(points) >= SMOOTH_FROM for points in drawn):
        note = " ".join(
            filter(
                None, [note, (f"Faint: as recorded. Bold: running mean over 1/{SMOOTH_SHARE} of the run.")]
            )
        )
    label = f"{title}: {y} by {x} for {', '.join(one.name for one in series)}"
    return _figure(title, label, frame + "".join(curves), _legend(series), note, _data_table(series, x, y))


def running_mean(points: Sequence[tuple[float, float]], width: int) -> list[tuple[float, float]]:
    """Each point's mean with its neighbours within ``width // 2`` on either side (fewer at the ends)."""
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    means = []
    for index, (place, _) in enumerate(points):
        start, end = max(0, index - width // 2), min(len(points), index + width // 2 + 1)
        means.append((place, (sums[end] - sums[start]) / (end - start)))
    return means


def bar_chart(title: str, *, y: str, bars: Sequence[tuple[str, float | None]], note: str = "") -> str:
    """An HTML ``<figure>``: one horizontal bar a name, from zero, with its figure at the end. None: said to
    be absent.
    """
    known = [value for _, value in bars if value is not None and math.isfinite(value)]
    if not known:
        return (
            f'<figure class="chart"><figcaption>{html.escape(title)}</figcaption><p class="note">Nothing '
            "was measured.</p></figure>"
        )
    row, left = 34, 190
    height = TOP + row * len(bars) + BOTTOM
    axis = Axis.fit([0.0, *known], left, WIDTH - 84, intervals=3)
    parts = [
        f'<line class="grid" x1="{axis.at(tick):.1f}" x2="{axis.at(tick):.1f}" y1="{TOP}" '
        f'y2="{height - BOTTOM}"/>'
        f'<text class="tick" text-anchor="middle" x="{axis.at(tick):.1f}" '
        f'y="{height - BOTTOM + 22}">{tick_label(tick)}</text>'
        for tick in axis.ticks
    ]
    for index, (name, value) in enumerate(bars):
        middle = TOP + row * index + row / 2
        parts.append(
            f'<text class="name" text-anchor="end" x="{left - 10}" '
            f'y="{middle + 5:.1f}">{html.escape(_short(name, 20))}</text>'
        )
        if value is None or not math.isfinite(value):
            parts.append(f'<text class="tick" x="{left + 6}" y="{middle + 5:.1f}">not measured</text>')
            continue
        start, end = sorted((axis.at(0.0), axis.at(value)))
        parts.append(
            f'<rect class="bar" data-series="{index}" x="{start:.1f}" y="{middle - 9:.1f}" '
            f'width="{max(1.0, end - start):.1f}" height="18" '
            f'rx="2"><title>{html.escape(name)}: {shown(value)}</title></rect>'
            f'<text class="value" x="{end + 6:.1f}" y="{middle + 5:.1f}">{shown(value)}</text>'
        )
    parts.append(
        f'<text class="axis" text-anchor="end" x="{WIDTH - 84}" y="{height - 8}">{html.escape(y)}</text>'
    )
    table = Table(
        [Column("name"), Column(y, "right")], [[name, value] for name, value in bars], caption=title
    )
    return _figure(title, f"{title}: {y}", "".join(parts), "", note, table, height=height)


def thin(points: list[tuple[float, float]], limit: int) -> list[tuple[float, float]]:
    """At most ``limit`` of the points, none invented: the ends, and the lowest and highest of each equal
    stretch.
    """
    if len(points) <= limit:
        return points
    buckets = max(1, (limit - 2) // 2)
    size = (len(points) - 2) / buckets
    kept = [points[0]]
    for index in range(buckets):
        stretch = points[1 + int(index * size) : 1 + int((index + 1) * size)]
        if stretch:
            low, high = min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])
            kept += sorted({low, high})
    return [*kept, points[-1]]


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic scale from values to SVG units, with round ticks."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    log: bool = False

    @classmethod
    def fit(
        cls, values: Sequence[float], start: float, end: float, *, log: bool = False, intervals: int = 6
    ) -> Axis:
        """An axis over ``values`` with ticks at 1, 2, 2.5 or 5 times a power of ten (decades when ``log``),
        about ``intervals`` apart.
        """
        low, high = min(values), max(values)
        if log:
            low, high = math.floor(math.log10(low)), math.ceil(math.log10(high))
            high += high == low
            return cls(
                low, high, start, end, tuple(10.0**power for power in range(int(low), int(high) + 1)), True
            )
        if low == high:
            low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (0.0, 1.0)
        step = _round_step((high - low) / intervals)
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        return cls(
            low,
            high,
            start,
            end,
            tuple(low + step * index for index in range(round((high - low) / step) + 1)),
        )

    def at(self, value: float) -> float:
        """The SVG coordinate of ``value``."""
        position = math.log10(value) if self.log else value
        return self.start + (position - self.low) / (self.high - self.low) * (self.end - self.start)


def _round_step(size: float) -> float:
    power = 10.0 ** math.floor(math.log10(size))
    return next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= size * 0.999), 10 * power)


def tick_label(value: float) -> str:
    """A short label: 12,000 as 12k, 3,500,000 as 3.5M, small numbers in powers of ten."""
    size = abs(value)
    if size < 1e-12:
        return "0"
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            return f"{value / min(unit, 1e3 if letter == 'k' else unit):.4g}{letter}"
    if size >= 0.01:
        return f"{value:.4g}"
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(power)}"


def _curve(index: int, colour: int, one: Series, layers: list[list[tuple[float, float]]]) -> str:
    """A group for one series: its recorded values, and over them the running mean if there is one."""
    parts = []
    for depth, spots in enumerate(layers):
        faint = ' class="raw"' if depth < len(layers) - 1 else ""
        dash = (
            f' stroke-dasharray="{DASHES[index % len(DASHES)]}"'
            if DASHES[index % len(DASHES)] and not faint
            else ""
        )
        if not one.points_only:
            parts.append(
                f'<polyline{faint}{dash} points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in spots)}"/>'
            )
        if one.points_only or len(spots) <= MARKED_POINTS:
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5"/>' for a, b in spots]
    return (
        f'<g class="series colour-{colour}" '
        f'data-series="{index}"><title>{html.escape(one.name)}</title>{"".join(parts)}</g>'
    )


def _grid(x_axis: Axis, y_axis: Axis) -> str:
    parts = []
    for tick in y_axis.ticks:
        level = y_axis.at(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>'
        )
        parts.append(
            f'<text class="tick" text-anchor="end" x="{LEFT - 8}" '
            f'y="{level + 5:.1f}">{tick_label(tick)}</text>'
        )
    for index, tick in enumerate(x_axis.ticks):
        place = x_axis.at(tick)
        minor = " minor" if index % 2 else ""
        parts.append(
            f'<line class="grid" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        )
        parts.append(
            f'<text class="tick{minor}" text-anchor="middle" x="{place:.1f}" '
            f'y="{HEIGHT - BOTTOM + 22}">{tick_label(tick)}</text>'
        )
    return "".join(parts)


def _axis_titles(x: str, y: str) -> str:
    return (
        f'<text class="axis" x="4" y="22">{html.escape(y)}</text>'
        f'<text class="axis" text-anchor="end" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}">{html.escape(x)}</text>'
    )


def _legend(series: Sequence[Series]) -> str:
    items = []
    for index, one in enumerate(series):
        colour = index % COLOURS if one.colour is None else one.colour
        dash = DASHES[index % len(DASHES)]
        sample = (
            '<svg viewBox="0 0 28 8" aria-hidden="true"><line x1="0" x2="28" y1="4" y2="4" '
            f'stroke-dasharray="{dash}"/></svg>'
        )
        attributes = f'type="button" class="colour-{colour}" data-series="{index}" aria-pressed="true"'
        items.append(f"<button {attributes}>{sample}{html.escape(one.name)}</button>")
    return f'<div class="legend" role="group" aria-label="Show or hide a run">{"".join(items)}</div>'


def _data_table(series: Sequence[Series], x: str, y: str) -> Table:
    """Each curve at a dozen places of its own points, evenly spread, with the last one."""
    rows: list[list[str | float]] = []
    for one in series:
        points = one.points()
        picked = (
            sorted({round(index * (len(points) - 1) / (TABLE_ROWS - 1)) for index in range(TABLE_ROWS)})
            if points
            else []
        )
        rows += [[one.name, points[index][0], points[index][1]] for index in picked]
    return Table([Column("run"), Column(x, "right", 6), Column(y, "right", 5)], rows)


def _figure(
    title: str, label: str, drawing: str, legend: str, note: str, table: Table, *, height: int = HEIGHT
) -> str:
    remark = f'<p class="note">{html.escape(note)}</p>' if note else ""
    return (
        f'<figure class="chart"><figcaption>{html.escape(title)}</figcaption>'
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{html.escape(label, quote=True)}">{drawing}</svg>'
        f"{legend}{remark}<details><summary>Figures</summary>{table.html()}</details></figure>"
    )


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def loss_curve_png(run_dir: Path, path: Path) -> bool:
    """Draw training and evaluation loss of the run in ``run_dir`` as PNG at ``path``; False if it has no
    finite loss.

    Takes about a second, matplotlib's import included.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from podtune.report.runs.runs import load_run

    run = load_run(Path(run_dir))
    curves = {split: Series(split, *run.curve(split, "loss")).points() for split in ("train", "eval")}
    if not any(curves.values()):
        return False
    figure = Figure(figsize=(7.2, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_training_loss(axes, curves["train"])
    if curves["eval"]:
        axes.plot(
            *zip(*curves["eval"], strict=True),
            color="#c2410c",
            linewidth=1.6,
            marker="o",
            markersize=4,
            label="evaluation",
        )
        step, loss = curves["eval"][-1]
        axes.annotate(
            shown(loss),
            (step, loss),
            textcoords="offset points",
            xytext=(-4, 9),
            ha="right",
            color="#c2410c",
            fontsize=9,
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(run.name, loc="left", fontsize=11, fontweight="bold")
    axes.set_title(run.one_line(), loc="right", fontsize=8, color="#57606a")
    axes.grid(color="#d8dee4", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    axes.legend(frameon=False)
    figure.savefig(path)
    return True


def _draw_training_loss(axes: object, points: list[tuple[float, float]]) -> None:
    """The recorded points faintly, and their running mean over a fiftieth of the run as the line to read."""
    if not points:
        return
    steps, losses = [point[0] for point in points], [point[1] for point in points]
    width = max(1, len(points) // 50)
    smooth = [value for _, value in running_mean(points, width)]
    if width > 1:
        axes.plot(steps, losses, color="#93c5fd", linewidth=0.8, alpha=0.8)  # type: ignore[attr-defined]
    label = f"training, mean of {width} points" if width > 1 else "training"
    axes.plot(steps, smooth, color="#1d4ed8", linewidth=1.8, label=label)  # type: ignore[attr-defined]
