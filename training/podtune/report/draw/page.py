"""One self-contained HTML page: no network, light and dark, readable on a phone, usable by keyboard.

    html = page("Two learning rates", sections=[Section("verdict", "Which is better", [table.html(), chart])])

The benchmark's report and ``podtune compare`` share it. ``data`` is embedded as JSON (id ``podtune-data``),
for scripts that read the page. Plotly's script is embedded once, whatever the number of charts. No torch.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from podtune.run.record import finite

TEMPLATE = Path(__file__).with_name("page.html.jinja")


@dataclass(frozen=True)
class Section:
    """Part of a page: ``key`` is its anchor, ``parts`` are HTML fragments (Table.html(), Lines.html())."""

    key: str
    title: str
    parts: Sequence[str]


def page(
    title: str,
    *,
    sections: Sequence[Section],
    subtitle: str = "",
    data: Mapping[str, object] | None = None,
    footer: str = "",
) -> str:
    """Render the whole page; all text but the sections' parts is escaped here.

    Raises:
        ModuleNotFoundError: plotly is not installed (extras train and bench).
    """
    import jinja2
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    embedded = json.dumps(finite(data or {}), ensure_ascii=False, separators=(",", ":"))
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        subtitle=subtitle,
        sections=sections,
        data=embedded.replace("<", "\\u003c"),  # a name may hold </script>
        plotly=get_plotlyjs(),
        footer=footer,
    )
    return text.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair is no UTF-8


def paragraph(text: str, *, kind: str = "") -> str:
    """A paragraph of escaped text; ``kind`` is its class: note, warning or verdict."""
    return f'<p class="{html.escape(kind)}">{html.escape(text)}</p>'


def bullets(items: Sequence[str], *, kind: str = "") -> str:
    """A list of escaped lines, empty for no items."""
    lines = "".join(f"<li>{html.escape(item)}</li>" for item in items)
    return f'<ul class="{html.escape(kind)}">{lines}</ul>' if items else ""


def folded(summary: str, content: str) -> str:
    """``content`` (an HTML fragment) behind a line that opens it."""
    return f"<details><summary>{html.escape(summary)}</summary>{content}</details>"
