"""A comparison as one HTML page: verdict, runs to sort and switch, curves to look into, answers. No torch."""

from __future__ import annotations

import html
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace

from podtune.report.compare.answers import readable
from podtune.report.compare.comparison import Comparison
from podtune.report.compare.view import NAMED, day, heading, plain, tables
from podtune.report.draw.page import Section, bullets, folded, page, paragraph
from podtune.report.draw.plots import Bar, Bars, Lines, Series, legend
from podtune.report.draw.tables import Column, Table, Value
from podtune.report.runs.runs import Run, timestamp
from podtune.run.errors import printable
from podtune.run.record import Json, finite, number

EXACT = "answers tuned.exact_match"
LABELS = {"step": "step", "tokens": "tokens (real, all ranks)", "time": "time since start (s)"}
CHARTS = (
    ("Evaluation loss", "eval", "loss", "nats per token"),
    ("Training loss", "train", "loss", "nats per token"),
    ("Learning rate", "train", "learning_rate", "of the optimizer"),
    ("Gradient norm", "train", "grad_norm", "before clipping"),
    ("Throughput", "train", "tokens_per_s", "tokens/s, real, all ranks"),
    ("GPU memory", "system", "gpu_memory_gib", "GiB, of the largest rank"),
    ("Memory of the process", "system", "rss_gib", "GiB, of the largest rank"),
    ("GPU use", "system", "gpu_utilisation_percent", "%, mean of the ranks"),
    ("Wait for data", "system", "data_wait_share", "share of a step"),
)
FOLDED = 6  # remarks that are shown; more wait behind a line
ANSWER = 400  # characters of an answer
ANSWERING = 4  # runs whose answers stand side by side
VARIED = 4  # keys that differ between runs and are columns of the first table
SWEPT = 3  # values of a key from which on there is a curve of the loss over it


def html_page(comparison: Comparison, runs: Sequence[Run], title: str = "") -> str:
    """One self-contained page; the comparison itself is embedded as JSON (id podtune-data)."""
    names, found = comparison.names, tables(comparison)
    first = [*(paragraph(text, kind="verdict") for text in comparison.conclusions), _run_table(comparison)]
    if charts := swept(comparison):
        first += ['<div class="charts">', *(chart.html() for chart in charts), "</div>"]
    differences = [table.html() for table in found.differences]
    sections = [
        Section("verdict", "Which is better", [*first, *_settings(runs, names)]),
        Section("differences", "What differs", differences or [paragraph("Nothing that was recorded.")]),
    ]
    remarks = [_remarks(lines) for lines in (comparison.not_comparable, comparison.problems) if lines]
    if remarks:
        sections.append(Section("limits", "Not comparable, and why", remarks))
    curves = [CONTROLS, legend(names), paragraph(SMOOTHED, kind="note"), *_charts(comparison, runs)]
    sections.append(Section("curves", "Curves", curves))
    if answers := _answers(comparison, runs):
        sections.append(Section("answers", "Answers", answers))
    sections += [
        Section("equal", "At equal steps, tokens and time", _side_by_side(found.equal)),
        Section("final", "At the end", [found.final.html()]),
    ]
    return page(
        title or heading(names),
        subtitle=f"{len(names)} runs compared from their own files{_in_all(comparison)}",
        sections=sections,
        data=comparison.as_json(),
        footer="podtune compare; losses in nats per token, memory in GiB (2^30 bytes). The page needs no "
        "network.",
    )


CONTROLS = """<form class="controls" hidden>
<label>by <select name="axis"><option>step</option><option>tokens</option><option>time</option></select>
</label>
<label><input type="checkbox" name="log">logarithmic</label></form>"""
SMOOTHED = "Curves of 40 points and more are means over a fortieth of the run, the raw ones faint behind."
FACTS = {"strategy": "strategy", "world_size": "ranks", "global_batch_size": "batch"}


def _in_all(comparison: Comparison) -> str:
    """The facts that all runs share: they need no column."""
    shared = [
        f"{name} {values.pop()}"
        for key, name in FACTS.items()
        if len(values := {run.record.get(key) for run in comparison.runs}) == 1 and None not in values
    ]
    return f"; {', '.join(shared)}" if shared else ""


def best_first(comparison: Comparison) -> list[int]:
    """Indices of the runs, by the loss that ranks them, else by the last evaluation; those without last."""
    ranked, final = comparison.verdict.values, comparison.final

    def loss(index: int) -> float:
        value = (ranked[index] if ranked else None) or final[index]["eval loss"]
        if value is None or comparison.names[index] in comparison.verdict.excluded:
            return math.inf
        return value if math.isfinite(value) else math.inf

    return sorted(range(len(comparison.runs)), key=loss)


def _run_table(comparison: Comparison) -> str:
    """A row a run, the best first; the keys that differ are columns, and the best figures stand out."""
    final, order = comparison.final, best_first(comparison)
    varied = {row.key: row.values for row in comparison.differences["config"][:VARIED]}
    varied |= {
        name: values
        for key, name in FACTS.items()
        if key not in varied and len(set(values := [run.record.get(key) for run in comparison.runs])) > 1
    }
    figures = {
        "eval loss": 5,
        "best eval loss": 5,
        EXACT: 3,
        "train loss": 5,
        "tokens_per_s": 4,
        "seconds": 4,
    }
    keys = [key for key in figures if any(end.get(key) is not None for end in final)]
    rows: list[list[Value]] = []
    for index in order:
        run, end = comparison.runs[index], final[index]
        settings = [plain(values[index]) for values in varied.values()]
        measured = [end.get(key) for key in keys]
        rows.append([run.name, run.status, *settings, *measured, day(run.started_at)])
    best = set()
    for place, key in enumerate(keys, 2 + len(varied)):
        if key == EXACT or key.endswith("eval loss"):
            column = [(number(row[place]), y) for y, row in enumerate(rows)]
            known = [(value, y) for value, y in column if value is not None and math.isfinite(value)]
            choose = max if key == EXACT else min
            wanted = choose((value for value, _ in known), default=None)
            best |= {(y, place) for value, y in known if value == wanted}
    titles = {EXACT: "exact answers", "seconds": "wall time (s)"}
    heads = [Column(titles.get(key, key), "right", figures[key]) for key in keys]
    columns = [*map(Column, ("run", "status", *varied)), *heads, Column("started")]
    return Table(columns, rows, best=frozenset(best)).html()


def _settings(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """Each run's command and whole configuration, behind a line."""
    parts = []
    for run, name in zip(runs, names, strict=True):
        provenance = run.record.get("provenance")
        words = provenance.get("command") if isinstance(provenance, dict) else None
        command = f"{shlex.join(map(str, words))}\n\n" if isinstance(words, list) else ""
        config = json.dumps(finite(run.record.get("config")), indent=1, ensure_ascii=False)
        content = f'<pre class="scroll">{html.escape(printable(command + config))}</pre>'
        parts.append(folded(f"{name}: command and configuration; {run.path}", content))
    if len(parts) > NAMED:
        return [folded("commands and configurations", "".join(parts))]
    return parts


def _remarks(lines: Sequence[str]) -> str:
    listed = bullets(lines, kind="warning")
    return folded(f"{len(lines)} remarks", listed) if len(lines) > FOLDED else listed


def _answers(comparison: Comparison, runs: Sequence[Run]) -> list[str]:
    """Held-out questions with the answers of the best runs; those equal to the reference stand out."""
    asked = [index for index in best_first(comparison) if runs[index].exact_share() or _samples(runs[index])]
    parts = [paragraph(comparison.answers.text)] if comparison.answers else []
    if len(asked) > ANSWERING:
        parts.append(paragraph(f"Answers of the {ANSWERING} best of {len(asked)} runs.", kind="note"))
    questions: dict[str, dict[str, Value]] = {}
    columns = {"question": "question", "reference": "reference"}
    for index in asked[:ANSWERING]:
        name = comparison.names[index]
        for sample in _samples(runs[index]):
            texts = {
                key: str(sample.get(key, ""))[:ANSWER] for key in ("prompt", "reference", "base", "tuned")
            }
            asking: dict[str, Value] = {"question": texts["prompt"], "reference": texts["reference"]}
            row = questions.setdefault(texts["prompt"], asking)
            said = readable(texts["base"])
            base = "base" if row.get("base", said) == said else f"base of {name}"
            row |= {base: said, name: texts["tuned"]}
            columns |= {base: base, name: name}
    rows = [[row.get(column) for column in columns] for row in questions.values()]
    right = {
        (y, x)
        for y, row in enumerate(rows)
        for x, answer in enumerate(row)
        if x > 1 and answer is not None and str(answer).strip() == str(row[1]).strip()
    }
    if rows:
        parts.append(Table([*map(Column, columns)], rows, best=frozenset(right)).html(kind="answers"))
    return parts


def _samples(run: Run) -> list[Json]:
    samples = (run.measurements.answers or {}).get("samples")
    return [sample for sample in samples if isinstance(sample, dict)] if isinstance(samples, list) else []


def _side_by_side(several: Sequence[Table]) -> list[str]:
    if not several:
        return [paragraph("The runs have no stretch in common.")]
    return ['<div class="tables">', *(f"<div>{table.html()}</div>" for table in several), "</div>"]


def _charts(comparison: Comparison, runs: Sequence[Run]) -> list[str]:
    names = comparison.names
    ends = [_end(run, comparison.verdict.excluded.get(name)) for run, name in zip(runs, names, strict=True)]
    places = [{split: _places(run, split) for split in ("train", "eval", "system")} for run in runs]
    figures: list[str] = []
    for caption, split, metric, unit in CHARTS:
        series = []
        for index, run in enumerate(runs):
            blank = Series(names[index], {}, (), index, ends[index])
            series.append(_series(run, places[index][split], split, metric, blank))
        lines = Lines(
            caption,
            unit,
            LABELS,
            series,
            runs=True,
            log=metric == "grad_norm" and _wide(series),
            smooth=metric != "learning_rate",
            from_zero=split == "system",
        )
        if not lines.empty:
            figures.append(lines.html())
    peaks = [run.measurements.peak_memory_gib for run in runs]
    if any(peaks):
        rows = [Bar(name, [peak.max if peak else None]) for name, peak in zip(names, peaks, strict=True)]
        bars = Bars("Peak memory", "GiB, of the largest rank", ["measured"], rows, runs=True)
        figures.append(bars.html())
    return (
        ['<div class="charts">', *figures, "</div>"] if figures else [paragraph("No run recorded a curve.")]
    )


def swept(comparison: Comparison) -> list[Lines]:
    """Charts of the loss over each key of the configuration that takes three numbers and more.

    Runs that differ in other keys too make a curve each.
    """
    varied = {row.key: row.values for row in comparison.differences["config"]}
    losses = comparison.verdict.values or [end["eval loss"] for end in comparison.final]
    charts = []
    for key, values in varied.items():
        curves: dict[str, list[tuple[float, float]]] = {}
        for index, (place, loss) in enumerate(zip(map(number, values), losses, strict=True)):
            others = [f"{other} {plain(each[index])}" for other, each in varied.items() if other != key]
            if place is not None and loss is not None and math.isfinite(loss):
                curves.setdefault(", ".join(others), []).append((place, loss))
        places = {place for points in curves.values() for place, _ in points}
        if len(places) < SWEPT:
            continue
        series = []
        for colour, (name, points) in enumerate(curves.items(), len(losses)):  # apart from the runs' legend
            x, y = zip(*sorted(points), strict=True)
            series.append(Series(name, {key: x}, y, colour))
        metric = comparison.verdict.metric or "eval loss"
        wide = min(places) > 0 and max(places) >= 10 * min(places)
        title = f"{metric.capitalize()} over {key}"
        charts.append(Lines(title, "nats per token", {key: key}, series, ticks=sorted(places), log_x=wide))
    return charts


def _end(run: Run, why: str | None) -> str:
    reason = str(run.record.get("reason") or "")
    return f"{why}: {reason}" if why and reason else why or ""


def _places(run: Run, split: str) -> Json:
    """Of each line of a split: its step, tokens and seconds since the start."""
    lines = run.entries.get(split, [])
    return {
        "step": [float(line["step"]) for line in lines],
        "tokens": [number(line.get("tokens")) for line in lines],
        "time": [timestamp(line.get("time")) - run.started_at for line in lines],
    }


def _series(run: Run, places: Json, split: str, metric: str, blank: Series) -> Series:
    """``blank`` with the finite values of a metric, and with the axes on which each of them has a place."""
    raw = (line.get(metric) for line in run.entries.get(split, []))
    values = [value if type(value) is float else number(value) for value in raw]  # nearly all are
    good = [index for index, value in enumerate(values) if value is not None and math.isfinite(value)]
    picked = {axis: [each[index] for index in good] for axis, each in places.items()}
    whole = {
        axis: each for axis, each in picked.items() if None not in each and all(map(math.isfinite, each))
    }
    return replace(blank, places=whole, values=[values[index] or 0.0 for index in good])


def _wide(series: Sequence[Series]) -> bool:
    """True if values span more than two powers of ten: one spike would flatten the rest of a linear chart."""
    values = [value for curve in series for value in curve.values if value > 0]
    return bool(values) and math.log10(max(values) / min(values)) > 2
