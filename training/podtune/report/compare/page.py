"""A comparison as one HTML page: verdict, runs to sort and switch, curves to look into, answers. No torch."""

from __future__ import annotations

import html
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace

from podtune.report.compare.view import NAMED, conclusions, day, heading, tables
from podtune.report.draw.page import Section, bullets, folded, page, paragraph
from podtune.report.draw.plots import Bar, Bars, Lines, Series, legend
from podtune.report.draw.tables import Column, Table, Value
from podtune.report.runs.runs import Run, timestamp
from podtune.run.errors import printable
from podtune.run.record import Json, finite, number

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


def html_page(comparison: Json, runs: Sequence[Run]) -> str:
    """One self-contained page; the comparison itself is embedded as JSON (id podtune-data)."""
    names = [run["name"] for run in comparison["runs"]]
    shown_tables = tables(comparison)
    verdict, *more = conclusions(comparison)
    sections = [
        Section(
            "verdict",
            "Which is better",
            [
                paragraph(verdict, kind="verdict"),
                *map(paragraph, more),
                _run_table(comparison),
                *_settings(runs, names),
            ],
        ),
        Section(
            "differences",
            "What differs",
            [table.html() for table in shown_tables["differences"]]
            or [paragraph("Nothing that was recorded.")],
        ),
    ]
    remarks = [part for key in ("not_comparable", "problems") if (part := _remarks(comparison[key]))]
    if remarks:
        sections.append(Section("limits", "Not comparable, and why", remarks))
    sections.append(
        Section(
            "curves",
            "Curves",
            [CONTROLS, legend(names), paragraph(SMOOTHED, kind="note"), *_charts(comparison, runs, names)],
        )
    )
    if answers := _answers(runs, names):
        sections.append(Section("answers", "Answers", [answers]))
    sections += [
        Section("equal", "At equal steps, tokens and time", _side_by_side(shown_tables["equal"])),
        Section("final", "At the end", [table.html() for table in shown_tables["final"]]),
    ]
    return page(
        heading(names),
        subtitle=f"{len(names)} runs compared from their own files",
        sections=sections,
        data=comparison,
        footer="podtune compare; losses in nats per token, memory in GiB (2^30 bytes). The page needs no "
        "network.",
    )


CONTROLS = """<form class="controls" hidden>
<label>by <select name="axis"><option>step</option><option>tokens</option><option>time</option></select>
</label>
<label><input type="checkbox" name="log">logarithmic</label></form>"""
SMOOTHED = "Curves of 40 points and more are means over a fortieth of the run, the raw ones faint behind."


def _run_table(comparison: Json) -> str:
    """A row a run."""
    columns = {"eval loss": 5, "best eval loss": 5, "train loss": 5, "tokens_per_s": 4, "seconds": 4}
    keys = [key for key in columns if any(end[key] is not None for end in comparison["final"])]
    facts = {"strategy": "strategy", "ranks": "world_size", "batch": "global_batch_size"}
    rows: list[list[Value]] = []
    for run, end in zip(comparison["runs"], comparison["final"], strict=True):
        rows.append(
            [
                run["name"],
                run["status"],
                *(end[key] for key in keys),
                *(run.get(key) for key in facts.values()),
                day(run["started_at"]),
                run["path"],
            ]
        )
    heads = [Column("wall time (s)" if key == "seconds" else key, "right", columns[key]) for key in keys]
    heads += [Column(name) for name in (*facts, "started", "folder")]
    return Table([Column("run"), Column("status"), *heads], rows).html()


def _settings(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """Each run's command and whole configuration, behind a line."""
    parts = []
    for run, name in zip(runs, names, strict=True):
        provenance = run.record.get("provenance")
        words = provenance.get("command") if isinstance(provenance, dict) else None
        command = f"{shlex.join(map(str, words))}\n\n" if isinstance(words, list) else ""
        config = json.dumps(finite(run.record.get("config")), indent=1, ensure_ascii=False)
        content = f'<pre class="scroll">{html.escape(printable(command + config))}</pre>'
        parts.append(folded(f"{name}: command and configuration", content))
    if len(parts) > NAMED:
        return [folded("commands and configurations", "".join(parts))]
    return parts


def _remarks(lines: Sequence[str]) -> str:
    listed = bullets(lines, kind="warning")
    return folded(f"{len(lines)} remarks", listed) if len(lines) > FOLDED else listed


def _answers(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Table of held-out questions with each model's answers; those equal to the reference stand out."""
    questions: dict[str, dict[str, Value]] = {}
    columns = {"question": "question", "reference": "reference"}
    for run, name in zip(runs, names, strict=True):
        samples = (run.measurements.answers or {}).get("samples")
        for sample in samples if isinstance(samples, list) else []:
            if not isinstance(sample, dict):
                continue
            texts = {
                key: str(sample.get(key, ""))[:ANSWER] for key in ("prompt", "reference", "base", "tuned")
            }
            row = questions.setdefault(
                texts["prompt"], {"question": texts["prompt"], "reference": texts["reference"]}
            )
            base = "base" if row.get("base", texts["base"]) == texts["base"] else f"base of {name}"
            row |= {base: texts["base"], name: texts["tuned"]}
            columns |= {base: base, name: name}
    rows = [[row.get(column) for column in columns] for row in questions.values()]
    right = {
        (y, x)
        for y, row in enumerate(rows)
        for x, answer in enumerate(row)
        if x > 1 and answer is not None and str(answer).strip() == str(row[1]).strip()
    }
    return Table([Column(name) for name in columns], rows, best=frozenset(right)).html() if rows else ""


def _side_by_side(several: Sequence[Table]) -> list[str]:
    if not several:
        return [paragraph("The runs have no stretch in common.")]
    return ['<div class="tables">', *(f"<div>{table.html()}</div>" for table in several), "</div>"]


def _charts(comparison: Json, runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    ends = [
        _end(run, comparison["verdict"].get("left_out", {}).get(name))
        for run, name in zip(runs, names, strict=True)
    ]
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
        )
        if not lines.empty:
            figures.append(lines.html())
    peaks = [run.measurements.peak_memory_gib for run in runs]
    if any(peaks):
        rows = [Bar(name, [peak.max if peak else None]) for name, peak in zip(names, peaks, strict=True)]
        figures.append(Bars("Peak memory", "GiB, of the largest rank", ["measured"], rows).html())
    return (
        ['<div class="charts">', *figures, "</div>"] if figures else [paragraph("No run recorded a curve.")]
    )


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
