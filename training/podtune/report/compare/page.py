"""A comparison as one HTML page: verdict, runs the best first, curves to look into, answers. No torch."""

from __future__ import annotations

import html
import json
import math
import shlex
from collections.abc import Sequence

from podtune.report.compare.answers import readable
from podtune.report.compare.comparison import Comparison
from podtune.report.compare.view import difference_tables, equal_table, final_table, plain
from podtune.report.draw.page import Part, Section, Text, Warnings, folded, page
from podtune.report.draw.plots import Bar, Bars, Chart, Lines, Series, figures, legend
from podtune.report.draw.tables import Column, Table, Value
from podtune.report.runs.runs import Run
from podtune.run.errors import printable
from podtune.run.record import Json, finite, mapping, number

EXACT = "answers tuned.exact_match"
AXES = {"step": "step", "tokens": "tokens (real, all ranks)", "time": "time since start (s)"}
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
NAMED = 2  # runs whose names make a title; more are counted
ANSWER = 400  # characters of an answer
ANSWERING = 4  # runs whose answers stand side by side
VARIED = 4  # keys that differ between runs and are columns of the first table
SWEPT = 3  # values of a key from which on there is a curve of the loss over it
CONTROLS = """<form class="controls" hidden>
<label>by <select name="axis"><option>step</option><option>tokens</option><option>time</option></select>
</label>
<label><input type="checkbox" name="log">logarithmic</label></form>"""
# columns of the first table, their titles and digits
FIGURES = {
    "eval loss": ("eval loss", 5),
    "best eval loss": ("best eval loss", 5),
    EXACT: ("exact answers", 3),
    "train loss": ("train loss", 5),
    "tokens_per_s": ("tokens_per_s", 4),
    "seconds": ("wall time (s)", 4),
}


def html_page(comparison: Comparison, title: str = "") -> str:
    """One self-contained page; the comparison itself is embedded as JSON (id podtune-data)."""
    names = comparison.names
    verdict: list[Part | str] = [Text(text, "verdict") for text in comparison.conclusions]
    verdict += [_run_table(comparison), figures(swept(comparison)), _settings(comparison)]
    nothing = Text("Nothing that was recorded.")
    sections = [
        Section("verdict", "Which is better", verdict),
        Section("differences", "What differs", difference_tables(comparison) or [nothing]),
    ]
    if remarks := [*comparison.not_comparable, *comparison.problems]:
        sections.append(Section("limits", "Not comparable, and why", [Warnings(remarks)]))
    curves = figures(_charts(comparison)) or Text("No run recorded a curve.")
    sections.append(Section("curves", "Curves", [CONTROLS, legend(names), curves]))
    if answers := _answers(comparison):
        sections.append(Section("answers", "Answers", answers))
    if any(comparison.at_equal.values()):
        sections.append(Section("equal", "At equal steps, tokens and time", [equal_table(comparison)]))
    sections.append(Section("final", "At the end", [final_table(comparison)]))
    return page(
        title or (" against ".join(names) if len(names) <= NAMED else f"{len(names)} runs"),
        sections,
        subtitle=f"{len(names)} runs compared from their own files",
        data=comparison.as_json(),
        footer="podtune compare; losses in nats per token, memory in GiB (2^30 bytes). The page needs no "
        "network.",
    )


def best_first(comparison: Comparison) -> list[int]:
    """Indices of the runs, by the loss that ranks them, else by the last evaluation; those without last."""
    ranked, final = comparison.verdict.values, comparison.final

    def loss(index: int) -> float:
        value = (ranked[index] if ranked else None) or final[index]["eval loss"]
        if value is None or comparison.names[index] in comparison.verdict.left_out:
            return math.inf
        return value if math.isfinite(value) else math.inf

    return sorted(range(len(comparison.runs)), key=loss)


def _run_table(comparison: Comparison) -> Table:
    """A row a run, the best first; the keys that differ are columns, and the best figures stand out."""
    final, order = comparison.final, best_first(comparison)
    varied = {row.key: row.values for row in comparison.differences["config"][:VARIED]}
    keys = [key for key in FIGURES if any(end.get(key) is not None for end in final)]
    rows: list[list[Value]] = []
    for index in order:
        run = comparison.runs[index]
        settings = [plain(values[index]) for values in varied.values()]
        started = f"{str(run.record.get('started_at'))[:16].replace('T', ' ')} UTC"
        figures = [final[index].get(key) for key in keys]
        rows.append([comparison.names[index], run.status, *settings, *figures, started])
    best = set()
    for x, key in enumerate(keys, 2 + len(varied)):
        if key == EXACT or key.endswith("eval loss"):
            column = [(y, number(row[x])) for y, row in enumerate(rows)]
            known = {y: value for y, value in column if value is not None and math.isfinite(value)}
            wanted = (max if key == EXACT else min)(known.values(), default=None)
            best |= {(y, x) for y, value in known.items() if value == wanted}
    columns = [Column(FIGURES[key][0], "right", FIGURES[key][1]) for key in keys]
    heads = [*map(Column, ("run", "status", *varied)), *columns, Column("started")]
    return Table(heads, rows, best=frozenset(best))


def _settings(comparison: Comparison) -> str:
    """Each run's command and whole configuration, behind a line."""
    parts = []
    for run, name in zip(comparison.runs, comparison.names, strict=True):
        words = mapping(run.record.get("provenance")).get("command")
        command = f"{shlex.join(map(str, words))}\n\n" if isinstance(words, list) else ""
        config = json.dumps(finite(run.record.get("config")), indent=1, ensure_ascii=False)
        content = f'<pre class="scroll">{html.escape(printable(command + config))}</pre>'
        parts.append(folded(f"{name}: command and configuration; {run.path}", content))
    return folded("commands and configurations", "".join(parts))


def _answers(comparison: Comparison) -> list[Part | str]:
    """Held-out questions with the answers of the best runs; those equal to the reference stand out."""
    asked = [index for index in best_first(comparison) if _samples(comparison.runs[index])]
    parts: list[Part | str] = [Text(comparison.answers.text)] if comparison.answers else []
    if len(asked) > ANSWERING:
        parts.append(Text(f"Answers of the {ANSWERING} best of {len(asked)} runs.", "note"))
    questions: dict[str, dict[str, str]] = {}
    columns = {"question": 0, "reference": 0}  # in their order
    for index in asked[:ANSWERING]:
        name = comparison.names[index]
        for sample in _samples(comparison.runs[index]):
            question, reference, base, tuned = (
                str(sample.get(key, ""))[:ANSWER] for key in ("prompt", "reference", "base", "tuned")
            )
            row = questions.setdefault(question, {"question": question, "reference": reference})
            # runs of one model have one base
            of_base = "base" if row.get("base", readable(base)) == readable(base) else f"base of {name}"
            row |= {of_base: readable(base), name: tuned}
            columns |= {of_base: 0, name: 0}
    rows = [[row.get(column) for column in columns] for row in questions.values()]
    right = {
        (y, x)
        for y, row in enumerate(rows)
        for x, answer in enumerate(row)
        if x > 1 and answer is not None and answer.strip() == str(row[1]).strip()
    }
    if rows:
        parts.append(Table([*map(Column, columns)], rows, best=frozenset(right), kind="answers"))
    return parts


def _samples(run: Run) -> list[Json]:
    samples = (run.measurements.answers or {}).get("samples")
    return [sample for sample in samples if isinstance(sample, dict)] if isinstance(samples, list) else []


def _charts(comparison: Comparison) -> list[Chart]:
    runs, names = comparison.runs, comparison.names
    charts: list[Chart] = []
    sets = sorted({split for run in runs for split in run.entries if split.startswith("eval_")})
    named = [(f"Evaluation loss: {split[5:]}", split, *CHARTS[0][2:]) for split in sets]
    for title, split, metric, unit in (*named, *CHARTS):
        series = [
            _series(run, split, metric, name, index, comparison.verdict.left_out.get(name, ""))
            for index, (run, name) in enumerate(zip(runs, names, strict=True))
        ]
        log = metric == "grad_norm" and _wide(series)
        charts.append(Lines(title, unit, AXES, series, runs=True, log=log, from_zero=split == "system"))
    peaks = [run.measurements.peak_memory_gib for run in runs]
    rows = [Bar(name, [peak.max if peak else None]) for name, peak in zip(names, peaks, strict=True)]
    return [*charts, Bars("Peak memory", "GiB, of the largest rank", ["measured"], rows, runs=True)]


def _series(run: Run, split: str, metric: str, name: str, index: int, why: str) -> Series:
    """A run's curve, on the axes on which each of its points has a place."""
    values = run.curve(split, metric)[1]
    curves = {axis: run.curve(split, metric, axis) for axis in AXES}
    places = {axis: each for axis, (each, of_axis) in curves.items() if len(of_axis) == len(values)}
    reason = f": {run.record['reason']}" if why and run.record.get("reason") else ""
    return Series(name, places, values, index, f"{why}{reason}")


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
        places = sorted({place for points in curves.values() for place, _ in points})
        if len(places) < SWEPT:
            continue
        series = []
        for index, (name, points) in enumerate(curves.items(), len(losses)):  # apart from the runs' legend
            x, y = zip(*sorted(points), strict=True)
            series.append(Series(name, {key: x}, y, index))
        title = f"{(comparison.verdict.metric or 'eval loss').capitalize()} over {key}"
        wide = places[0] > 0 and places[-1] >= 10 * places[0]
        charts.append(Lines(title, "nats per token", {key: key}, series, ticks=places, log_x=wide))
    return charts


def _wide(series: Sequence[Series]) -> bool:
    """True if values span more than two powers of ten: one spike would flatten the rest of a linear chart."""
    values = [value for curve in series for value in curve.values if value > 0]
    return bool(values) and math.log10(max(values) / min(values)) > 2
