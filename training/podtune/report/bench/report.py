"""The benchmark's report: CSV, Markdown, and one self-contained HTML page with charts. No torch."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from podtune.report.bench.charts import charts
from podtune.report.bench.groups import Group, MeasuredCell, differences, grouped
from podtune.report.bench.records import FolderRecords, read_folder
from podtune.report.bench.verdict import advice, cautions, failures
from podtune.report.draw.page import Section, bullets, page, paragraph
from podtune.report.draw.tables import Column, Table, Value, markdown_text
from podtune.run.errors import CannotCreate, printable
from podtune.run.files import write_atomically
from podtune.run.record import Json, finite

PAGE, MARKDOWN, CSV = "report.html", "report.md", "report.csv"
Planner = Callable[[Iterable[Json]], Sequence[Json | None]]
_LINK = re.compile("\ue000([^\ue001]*)\ue001([^\ue002]*)\ue002")  # characters without a meaning of their own


def report(folder: Path, planner: Planner) -> Json:
    """Read the records below ``folder``, write the report into it, and return what it says.

    Args:
        planner: gives a plan for each record (the formulas live with the benchmark).

    Raises:
        UserError: nothing to report on, or the folder cannot be written.
    """
    records = read_folder(folder)
    groups = grouped(records.sources, planner([source.record for source in records.sources]))
    try:
        write_atomically(folder / CSV, _csv(groups))
        write_atomically(folder / MARKDOWN, printable(_markdown(records, groups)))
        write_atomically(folder / PAGE, _page(folder, records, groups))
    except OSError as error:
        raise CannotCreate(
            f"cannot be written: {error.strerror}", where=str(error.filename or folder)
        ) from None
    return {
        "comparisons": [
            {
                "title": group.title,
                "shared": group.identity,
                "advice": advice(group),
                "cautions": cautions(group),
                "cells": [_row(cell) for cell in group.cells],
            }
            for group in groups
        ],
        "not_compared": differences(groups),
        "failed": {
            cell.label + f" ({cell.path})": why for group in groups for cell, why in failures(group.cells)
        },
        "impossible": records.impossible,
        "damaged": records.damaged,
        "files": [str(folder / name) for name in (PAGE, MARKDOWN, CSV)],
    }


def _row(cell: MeasuredCell) -> dict[str, Any]:
    """A cell's figures by name: the CSV's columns and the JSON's keys."""
    sent, formula, step = cell.sent_bytes, cell.formula_bytes, cell.step_time
    loss = cell.measurements.loss if cell.fast else None
    training = cell.measurements.training if cell.fast else None
    return {
        "model": cell.record["model"],
        "strategy": cell.strategy,
        "world_size": cell.world_size,
        "status": cell.record["status"],
        "parity": cell.parity,
        "throughput": cell.throughput,
        "unit": cell.unit if cell.throughput is not None else None,
        "step_time_mean_s": step.mean if step else None,
        "step_time_std_s": step.std if step else None,
        "step_time_p50_s": step.p50 if step else None,
        "step_time_p95_s": step.p95 if step else None,
        "step_time_plan_s": cell.planned("step_time_s"),
        "mfu": cell.measurements.mfu if cell.fast else None,
        "efficiency": cell.efficiency,
        "peak_memory_gib": cell.memory_gib,
        "peak_memory_plan_gib": cell.planned("total_gib"),
        "bytes_per_step": sent,
        "bytes_per_step_formula": formula,
        "bubble_formula": cell.bubble,
        "loss_last": loss.last if loss else None,
        "epochs": len(training.loss_by_epoch) if training else None,
        "epoch_loss": training.loss if training else None,
        "accuracy": training.accuracy if training else None,
        "precision": cell.record["config"].get("precision"),
        "global_batch_size": cell.record.get("global_batch_size"),
        "per_device_batch_size": cell.record["config"].get("per_device_batch_size") or None,
        "commit": (cell.record.get("provenance") or {}).get("git_sha"),
        "record": cell.path,
    }


def _csv(groups: Sequence[Group]) -> str:
    rows = [_row(cell) for group in groups for cell in group.cells]
    return (
        Table([Column(name) for name in rows[0]], [list(row.values()) for row in rows]).csv() if rows else ""
    )


def _speed_table(group: Group, name: Callable[[MeasuredCell], str]) -> Table:
    planned = any(cell.planned("step_time_s") is not None for cell in group.measured)
    trained = any(cell.measurements.training for cell in group.measured)
    columns = [
        Column("cell"),
        Column(group.measured[0].unit, "right"),
        Column("step mean (ms)", "right"),
        Column("std", "right", 3),
        *(Column(title, "right") for title in ("p50", "p95", *["plan (ms)"] * planned)),
        *(Column(title, "right", 3) for title in ("efficiency (%)", "MFU (%)")),
        Column("losses equal"),
        *[Column("accuracy by epoch (%)", "right")] * trained,
    ]
    rows: list[list[Value]] = []
    for cell in group.measured:
        step = cell.step_time
        seconds = [step.mean, step.std, step.p50, step.p95] if step else [None] * 4
        if planned:
            seconds.append(cell.planned("step_time_s"))
        times = [_times(value, 1000) for value in seconds]
        shares = [_times(value, 100) for value in (cell.efficiency, cell.measurements.mfu)]
        rows.append(
            [name(cell), cell.throughput, *times, *shares, cell.parity, *[_accuracies(cell)] * trained]
        )
    notes = [f"Best of each world size stands out{'; plan: formulas, see docs' if planned else ''}."]
    # one process has nothing to distribute: where a strategy beats single, that is the machine's noise
    single = group.at("single", 1)
    best = _best(group, lambda cell: cell.throughput if cell.world_size > 1 or cell is single else None)
    return Table(columns, rows, caption="Speed", best=best, notes=notes)


def _accuracies(cell: MeasuredCell) -> str:
    training = cell.measurements.training
    return " ".join(f"{share:.1%}"[:-1] for share in (training and training.accuracy_by_epoch) or ())


def _best(group: Group, merit: Callable[[MeasuredCell], float | None]) -> frozenset[tuple[int, int]]:
    """The second column's cells of highest ``merit`` at each world size."""
    rows = [(index, cell.world_size, merit(cell)) for index, cell in enumerate(group.measured)]
    known = [(index, size, value) for index, size, value in rows if value is not None]
    highest = {size: max(value for _, other, value in known if other == size) for _, size, _ in known}
    return frozenset((index, 1) for index, size, value in known if value == highest[size])


def _cost_table(group: Group, name: Callable[[MeasuredCell], str]) -> Table:
    columns = [
        Column("cell"),
        *(Column(title, "right", 3) for title in ("peak memory (GiB)", "plan (GiB)")),
        *(Column(title, "right") for title in ("sent a step (MB)", "formula (MB)", "counted / formula")),
        Column("bubble by formula (%)", "right", 3),
    ]
    rows: list[list[Value]] = []
    for cell in group.measured:
        sent, formula = cell.sent_bytes, cell.formula_bytes
        ratio = sent / formula if sent is not None and formula else None
        memory = [cell.memory_gib, cell.planned("total_gib")]
        rows.append(
            [name(cell), *memory, _times(sent, 1e-6), _times(formula, 1e-6), ratio, _times(cell.bubble, 100)]
        )
    best = _best(group, lambda cell: None if cell.memory_gib is None else -cell.memory_gib)
    return Table(columns, rows, caption="Memory and communication, measured and planned", best=best)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _summary(records: FolderRecords, groups: Sequence[Group]) -> str:
    cells = [cell for group in groups for cell in group.cells]
    measured = sum(cell.throughput is not None for cell in cells)
    failed = len(cells) - measured
    text = (
        f"{measured} cells measured in {len(groups)} comparison{'s' if len(groups) != 1 else ''}, "
        f"{failed} failed"
    )
    return (
        text
        + f", {len(records.damaged)} records damaged" * bool(records.damaged)
        + f", {len(records.impossible)} not possible" * bool(records.impossible)
    )


def _markdown(records: FolderRecords, groups: Sequence[Group]) -> str:
    def name(cell: MeasuredCell) -> str:
        # becomes a link once its label is escaped
        return f"\ue000{_href(cell.path)}\ue001{cell.label}\ue002"

    lines = ["# Benchmark report", "", f"{_summary(records, groups)}. Each cell links to its record.", ""]
    lines += _bullets(differences(groups))
    for group in groups:
        lines += [
            "",
            f"## {markdown_text(group.title)}",
            "",
            *(f"{markdown_text(text)}\n" for text in advice(group)),
        ]
        lines += _bullets(cautions(group))
        if group.measured:
            lines += ["", _speed_table(group, name).markdown(), "", _cost_table(group, name).markdown(), ""]
        if failed := failures(group.cells):
            lines += ["", "Failed:", "", *_bullets(f"{name(cell)}: {why}" for cell, why in failed)]
    if records.damaged:
        lines += ["", "## Damaged records, not used", "", *_bullets(records.damaged)]
    if records.impossible:
        impossible = (f"{cell}: {why}" for cell, why in records.impossible.items())
        lines += ["", "## Not possible", "", *_bullets(impossible)]
    return _LINK.sub(r"[\2](\1)", "\n".join(lines) + "\n")


def _bullets(texts: Iterable[str]) -> list[str]:
    return [f"- {markdown_text(text)}" for text in texts]


def _page(folder: Path, records: FolderRecords, groups: Sequence[Group]) -> str:
    def name(cell: MeasuredCell) -> str:
        # becomes a link once the table has escaped its cells
        return f"\ue000record-{cell.key}\ue001{cell.label}\ue002"

    sections = []
    apart = differences(groups)
    if apart or records.damaged:
        parts = [bullets(apart, kind="warning"), bullets(records.damaged, kind="warning")]
        sections.append(Section("apart", "What is not compared", parts))
    for number, group in enumerate(groups):
        texts = advice(group)
        parts = [
            paragraph(texts[0], kind="verdict"),
            *(paragraph(text) for text in texts[1:]),
            bullets(cautions(group), kind="warning"),
        ]
        if group.measured:
            parts += [_linked(_speed_table(group, name).html()), _linked(_cost_table(group, name).html())]
            parts.append(f'<div class="charts">{"".join(chart.html() for chart in charts(group))}</div>')
        failed = [f"{name(cell)}: {why}" for cell, why in failures(group.cells)]
        if failed:
            parts += [paragraph("Failed cells:"), _linked(bullets(failed, kind="warning"))]
        sections.append(Section(f"comparison-{number + 1}", group.title, parts))
    if records.impossible:
        listed = [f"{cell}: {why}" for cell, why in records.impossible.items()]
        sections.append(Section("impossible", "Not possible, by the strategy's nature", [bullets(listed)]))
    sections.append(
        Section("records", "Records", [_record(cell) for group in groups for cell in group.cells])
    )
    data = {"cells": [_row(cell) for group in groups for cell in group.cells]}
    return page(
        "Benchmark report",
        sections=sections,
        subtitle=f"{_summary(records, groups)}.",
        data=data,
        footer=f"podtune bench report {folder}",
    )


def _linked(fragment: str) -> str:
    return _LINK.sub(lambda match: f'<a href="#{match[1]}">{match[2]}</a>', fragment)


def _href(path: str) -> str:
    """A link to a file beside the report: ``javascript:x`` may be a folder's name."""
    return f"./{quote(path)}"


def _record(cell: MeasuredCell) -> str:
    """The whole record, folded, where every figure's link leads; and the file that it came from."""
    text = html.escape(json.dumps(finite(cell.record), indent=1, ensure_ascii=False))
    path, title = html.escape(cell.path), html.escape(f"{cell.record['model']} {cell.label}")
    return (
        f'<details id="record-{html.escape(cell.key, quote=True)}"><summary>{title}</summary>'
        f'<p class="note"><a href="{_href(cell.path)}">{path}</a></p>'
        f'<pre class="scroll">{text}</pre></details>'
    )
