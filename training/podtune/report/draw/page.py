"""One self-contained HTML page: no network, light and dark, readable on a phone, usable by keyboard. No
torch.

    html = page("Two learning rates", sections=[Section("verdict", "Which is better", [table.html(),
    figure])], data={...})

The benchmark's report and ``podtune compare`` share it. ``data`` is embedded as JSON (id ``podtune-data``),
so that a page can be read by a script as well as by a person.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podtune.run.record import finite

TEMPLATE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.html.jinja", "page.js"))


@dataclass(frozen=True)
class Section:
    """A part of a page: ``key`` is its anchor, ``parts`` are HTML fragments (Table.html(), Lines.html(),
    paragraph()).
    """

    key: str
    title: str
    parts: Sequence[str]


def page(
    title: str,
    *,
    sections: Sequence[Section],
    subtitle: str = "",
    data: dict[str, Any] | None = None,
    footer: str = "",
) -> str:
    """The whole page as a string. Text in ``title``, ``subtitle``, ``footer`` and section titles is
    escaped.
    """
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    embedded = json.dumps(finite(data or {}), ensure_ascii=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    return template.render(
        title=title,
        subtitle=subtitle,
        sections=sections,
        data=embedded,
        script=SCRIPT.read_text(encoding="utf-8"),
        footer=footer,
    )


def paragraph(text: str, *, kind: str = "") -> str:
    """A paragraph of escaped text; ``kind`` is "note", "warning" or "verdict"."""
    return (
        f'<p class="{html.escape(kind, quote=True)}">{html.escape(text)}</p>'
        if kind
        else f"<p>{html.escape(text)}</p>"
    )


def bullets(items: Sequence[str], *, kind: str = "") -> str:
    """A list of escaped lines, empty for no items."""
    attribute = f' class="{html.escape(kind, quote=True)}"' if kind else ""
    return (
        f"<ul{attribute}>{''.join(f'<li>{html.escape(item)}</li>' for item in items)}</ul>" if items else ""
    )


def folded(summary: str, content: str) -> str:
    """``content`` (an HTML fragment) behind a line that opens it."""
    return f"<details><summary>{html.escape(summary)}</summary>{content}</details>"
