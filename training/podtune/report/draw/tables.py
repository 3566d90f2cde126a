"""One table, shown in a terminal, as Markdown, as HTML or as CSV. No torch.

    table = Table([Column("strategy"), Column("tokens/s", "right")], [["ddp", 5120.4], ["fsdp", None]])
    print(table.text()); table.markdown(); table.html(); table.csv()

A cell is a string, a number or None (not measured, shown as a dash and empty in CSV). Numbers are formatted
here, once, so that every view shows the same value.
"""

from __future__ import annotations

import csv
import html
import io
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from podtune.run.errors import printable

Value = str | int | float | None
ABSENT = "–"
_MARKDOWN = re.compile(r"[\\\[\]<|]")
NAME_WIDTH = 30  # of a left-aligned column, before others are left out for it


@dataclass(frozen=True)
class Column:
    """Title (with the unit in it), alignment, and significant ``digits`` of a column.

    Where a terminal is too narrow the column of the highest ``drop`` is left out first; 0 stays.
    """

    title: str
    align: Literal["left", "right"] = "left"
    digits: int = 4
    drop: int = 0


@dataclass
class Table:
    """Rows of cells under columns. ``notes`` are lines below.

    ``best`` marks cells (row, column) that stand out; ``links`` are where the first cells of the rows lead.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    caption: str = ""
    notes: Sequence[str] = ()
    best: frozenset[tuple[int, int]] = frozenset()
    links: Sequence[str] = ()
    kind: str = ""  # its class in HTML

    def cells(self) -> list[list[str]]:
        return [
            [shown(cell, column.digits) for cell, column in zip(row, self.columns, strict=True)]
            for row in self.rows
        ]

    def text(self, *, width: int | None = None) -> str:
        """Aligned plain text in lines of at most ``width`` characters."""
        texts = [[column.title for column in self.columns], *self.cells()]
        for y, x in self.best:
            texts[y + 1][x] += "*"
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        shown_columns = list(range(len(self.columns)))
        if width is not None:
            shown_columns = self._fit(widths, width)
        lines = []
        for row in texts:
            cells = (_pad(row[x], widths[x], self.columns[x].align) for x in shown_columns)
            lines.append("  ".join(cells).rstrip()[:width])
        lines.insert(1, "  ".join("─" * widths[x] for x in shown_columns)[:width])
        caption = [self.caption] if self.caption else []
        return "\n".join([*caption, *lines, *(f"  {note}" for note in self.notes)])

    def _fit(self, widths: list[int], limit: int) -> list[int]:
        """Choose the columns that fit into ``limit``; shorten ``widths`` of left-aligned ones."""

        def excess(narrowest: int) -> int:
            needed = [min(widths[x], narrowest) if x in shrinkable else widths[x] for x in columns]
            return sum(needed) + 2 * (len(needed) - 1) - limit

        shrinkable = {x for x, column in enumerate(self.columns) if column.align == "left"}
        columns = list(range(len(self.columns)))
        while excess(NAME_WIDTH) > 0:
            last = max(columns, key=lambda x: (self.columns[x].drop, x))
            if not self.columns[last].drop:
                break
            columns.remove(last)
        while excess(limit) > 0 and (wide := [x for x in columns if x in shrinkable and widths[x] > 8]):
            widths[max(wide, key=lambda x: widths[x])] -= 1
        return columns

    def markdown(self) -> str:
        """A pipe table; cells that stand out are bold."""
        lines = [f"**{markdown_text(self.caption)}**", ""] if self.caption else []
        lines.append("| " + " | ".join(markdown_text(column.title) for column in self.columns) + " |")
        lines.append(
            "|" + "|".join("---:" if column.align == "right" else "---" for column in self.columns) + "|"
        )
        for y, row in enumerate(self.cells()):
            texts = [markdown_text(cell) for cell in row]
            if self.links:
                texts[0] = f"[{texts[0]}]({self.links[y]})"
            texts = [f"**{text}**" if (y, x) in self.best else text for x, text in enumerate(texts)]
            lines.append("| " + " | ".join(texts) + " |")
        return "\n".join(
            [*lines, *([""] if self.notes else []), *(f"- {markdown_text(note)}" for note in self.notes)]
        )

    def html(self) -> str:
        """A ``<table>`` that scrolls sideways in its own box; the first column is the row's header."""
        head = "".join(
            f'<th scope="col" class="{column.align}">{html.escape(column.title)}</th>'
            for column in self.columns
        )
        rows = []
        for y, row in enumerate(self.cells()):
            cells = []
            for x, (cell, column) in enumerate(zip(row, self.columns, strict=True)):
                tag, scope = ("th", ' scope="row"') if x == 0 else ("td", "")
                best, text = " best" if (y, x) in self.best else "", html.escape(cell)
                if self.links and x == 0:
                    text = f'<a href="{html.escape(self.links[y], quote=True)}">{text}</a>'
                cells.append(f'<{tag}{scope} class="{column.align}{best}">{text}</{tag}>')
            rows.append(f"<tr>{''.join(cells)}</tr>")
        caption = f"<caption>{html.escape(self.caption)}</caption>" if self.caption else ""
        notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in self.notes)
        label = html.escape(self.caption or "table", quote=True)
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table class="{self.kind}">'
            f"{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>{notes}"
        )

    def csv(self) -> str:
        """Comma-separated, numbers in full precision, absent cells empty."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow([column.title for column in self.columns])
        writer.writerows([[_csv_cell(cell) for cell in row] for row in self.rows])
        return buffer.getvalue()


def terminal_width() -> int | None:
    """The terminal's width; no limit where stdout is a file or a pipe."""
    return os.get_terminal_size().columns if sys.stdout.isatty() else None


def _csv_cell(cell: Value) -> Value:
    if not isinstance(cell, str):
        return "" if cell is None else cell
    text = shown(cell)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t")) else text  # no spreadsheet's formula


def shown(value: Value, digits: int = 4) -> str:
    """Format a cell: thousands apart, ``digits`` significant digits, a dash for None."""
    if value is None:
        return ABSENT
    if isinstance(value, str):
        return printable(value.replace("\r", " ").replace("\n", " "))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.{digits - 1}g}"
    decimals = digits - 1 - (math.floor(math.log10(abs(value))) if value else 0)
    return f"{value:.{max(0, min(decimals, digits))}f}"


def duration(seconds: float | None) -> str:
    """``"42 s"``, ``"3 min 05 s"``, ``"2 h 10 min"``, ``"3 d 4 h"``."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def markdown_text(text: str) -> str:
    """Escape what would be a link, a cell or HTML in Markdown."""
    return _MARKDOWN.sub(r"\\\g<0>", text.replace("\n", " "))


def _pad(text: str, width: int, align: str) -> str:
    if len(text) > width:
        half = max(0, width - 1) // 2  # the ends tell names apart: sweep-lr-1e-4-…-seed-2
        text = text[: max(0, width - 1) - half] + "…" + text[len(text) - half :]
    blank = " " * (width - len(text))
    return blank + text if align == "right" else text + blank
