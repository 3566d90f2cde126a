"""The benchmark's report: CSV, Markdown, and one self-contained HTML page with charts. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from podtune.report.bench.charts import charts, scaled
from podtune.report.bench.groups import COLUMNS, Group, MeasuredCell, differences, grouped
from podtune.report.bench.records import FolderRecords, read_folder
from podtune.report.bench.verdict import advice, cautions
from podtune.report.draw.page import Part, Section, Text, Warnings, markdown, page
from podtune.report.draw.plots import figures
from podtune.report.draw.tables import Column, Table, Value
from podtune.run.errors import creating, printable
from podtune.run.files import write_atomically
from podtune.run.record import Json

PAGE, MARKDOWN, CSV = "report.html", "report.md", "report.csv"
Planner = Callable[[Iterable[Json]], Sequence[Json | None]]


@dataclass(frozen=True)
class Report:
    """What the records below ``folder`` say."""

    folder: Path
    records: FolderRecords
    groups: Sequence[Group]

    @property
    def files(self) -> list[str]:
        """What :func:`report` has written."""
        return [str(self.folder / name) for name in (PAGE, MARKDOWN, CSV)]

    @property
    def failed(self) -> dict[str, str]:
        return {
            f"{cell.label} ({cell.record})": cell.reason for group in self.groups for cell in group.failed
        }

    def as_json(self) -> dict[str, object]:
        return {
            "comparisons": [
                {
                    "title": group.title,
                    "shared": group.identity,
                    "advice": advice(group),
                    "cautions": cautions(group),
                    "cells": [cell.row() for cell in group.cells],
                }
                for group in self.groups
            ],
            "not_compared": differences(self.groups),
            "failed": self.failed,
            "impossible": self.records.impossible,
            "damaged": self.records.damaged,
            "files": self.files,
        }

    def text(self, width: int | None) -> str:
        """The comparisons for a terminal of ``width`` characters."""
        parts = []
        for group in self.groups:
            sentences = [f"  {text}" for text in advice(group) + cautions(group)]
            tables = [table.text(width=width) for table in tables_of(group) if table.rows]
            parts.append("\n".join([group.title, *sentences, "", *tables, ""]))
        failed = [f"{name}: {why}" for name, why in self.failed.items()]
        lines = [*parts, *differences(self.groups), *self.records.damaged, *failed, *self.files]
        return "\n".join(lines)


def report(folder: Path, planner: Planner) -> Report:
    """Read the records below ``folder``, and write the report into it.

    Args:
        planner: gives a plan for each record (the formulas live with the benchmark).

    Raises:
        UserError: nothing to report on, or the folder cannot be written.
    """
    records = read_folder(folder)
    groups = grouped(records.sources, planner([source.record for source in records.sources]))
    title, subtitle, sections = "Benchmark report", _summary(records, groups), _sections(records, groups)
    rows = [list(cell.row().values()) for group in groups for cell in group.cells]
    footer = f"podtune bench report {folder}"
    with creating(folder):
        write_atomically(folder / CSV, Table([Column(name) for name in COLUMNS], rows).csv())
        write_atomically(folder / MARKDOWN, printable(markdown(title, sections, subtitle=subtitle)))
        write_atomically(folder / PAGE, page(title, sections, subtitle=subtitle, footer=footer))
    return Report(folder, records, groups)


def _summary(records: FolderRecords, groups: Sequence[Group]) -> str:
    counts = {
        "cells measured": sum(len(group.measured) for group in groups),
        "comparisons": len(groups),
        "failed": sum(len(group.failed) for group in groups),
        "records damaged": len(records.damaged),
        "not possible": len(records.impossible),
    }
    return (
        ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        + ". Cells link to their records."
    )


def _sections(records: FolderRecords, groups: Sequence[Group]) -> list[Section]:
    sections = []
    if apart := [*differences(groups), *records.damaged]:
        sections.append(Section("apart", "What is not compared", [Warnings(apart)]))
    for number, group in enumerate(groups, 1):
        first, *others = advice(group)
        parts: list[Part | str] = [Text(first, "verdict"), *map(Text, others), Warnings(cautions(group))]
        if group.measured:
            parts += [*tables_of(group), figures(charts(group))]
        if failed := group.failed:
            rows = [[cell.label, cell.reason] for cell in failed]
            parts.append(Table([Column("failed"), Column("how")], rows, links=_links(failed)))
        sections.append(Section(f"comparison-{number}", group.title, parts))
    if records.impossible:
        table = Table([Column("cell"), Column("why")], list(records.impossible.items()))
        sections.append(Section("impossible", "Not possible, by the strategy's nature", [table]))
    return sections


def _links(cells: Sequence[MeasuredCell]) -> list[str]:
    """Links to files beside the report: ``javascript:x`` may be a folder's name."""
    return [f"./{quote(cell.record)}" for cell in cells]


def tables_of(group: Group) -> list[Table]:
    """Speed, and what it costs."""
    return [_speed_table(group), _cost_table(group)]


def _speed_table(group: Group) -> Table:
    planned = any(cell.step_time_plan_s is not None for cell in group.measured)
    trained = any(cell.epochs for cell in group.measured)
    columns = [
        Column("cell"),
        Column(group.unit, "right"),
        Column("step mean (ms)", "right"),
        Column("std", "right", 3, drop=3),
        *(Column(title, "right", drop=4) for title in ("p50", "p95", *["plan (ms)"] * planned)),
        *(Column(title, "right", 3, drop=2) for title in ("efficiency (%)", "MFU (%)")),
        Column("losses equal"),
        *[Column("accuracy by epoch (%)", "right")] * trained,
    ]
    rows: list[list[Value]] = []
    for cell in group.measured:
        seconds = [cell.step_time_mean_s, cell.step_time_std_s, cell.step_time_p50_s, cell.step_time_p95_s]
        seconds += [cell.step_time_plan_s] * planned
        times = [scaled(value, 1000) for value in seconds]
        shares = [scaled(value, 100) for value in (cell.efficiency, cell.mfu)]
        accuracies = " ".join(f"{100 * share:.1f}" for share in cell.accuracy_by_epoch)
        rows.append([cell.label, cell.throughput, *times, *shares, cell.parity, *[accuracies] * trained])
    notes = [f"Best of each world size stands out{'; plan: formulas, see docs' if planned else ''}."]
    # one process has nothing to distribute: where a strategy beats single, that is the machine's noise
    single = group.at("single", 1)
    best = _best(group, lambda cell: cell.throughput if cell.world_size > 1 or cell is single else None)
    return Table(columns, rows, "Speed", notes, best, _links(group.measured))


def _cost_table(group: Group) -> Table:
    columns = [
        Column("cell"),
        *(Column(title, "right", 3) for title in ("peak memory (GiB)", "plan (GiB)")),
        *(
            Column(title, "right", drop=1)
            for title in ("sent a step (MB)", "formula (MB)", "counted / formula")
        ),
        Column("bubble by formula (%)", "right", 3, drop=2),
        Column("in collectives (ms)", drop=3),
    ]
    rows: list[list[Value]] = []
    for cell in group.measured:
        sent, formula = cell.bytes_per_step, cell.bytes_per_step_formula
        ratio = sent / formula if sent is not None and formula else None
        megabytes = [scaled(sent, 1e-6), scaled(formula, 1e-6)]
        memory = [cell.peak_memory_gib, cell.peak_memory_plan_gib]
        rows.append(
            [cell.label, *memory, *megabytes, ratio, scaled(cell.bubble_formula, 100), cell.collectives_ms]
        )
    best = _best(group, lambda cell: None if cell.peak_memory_gib is None else -cell.peak_memory_gib)
    caption = "Memory and communication, measured and planned"
    return Table(columns, rows, caption, best=best, links=_links(group.measured))


def _best(group: Group, merit: Callable[[MeasuredCell], float | None]) -> frozenset[tuple[int, int]]:
    """The second column's cells of highest ``merit`` at each world size."""
    merits = [(index, cell.world_size, merit(cell)) for index, cell in enumerate(group.measured)]
    known = [(index, size, value) for index, size, value in merits if value is not None]
    highest = {size: max(value for _, other, value in known if other == size) for _, size, _ in known}
    return frozenset((index, 1) for index, size, value in known if value == highest[size])
