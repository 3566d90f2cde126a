"""One self-contained HTML page: no network, light and dark, readable on a phone, usable by keyboard.

    html = page("Two learning rates", [Section("verdict", "Which is better", [table, chart.html()])])

The benchmark's report and ``podtune compare`` share it; :func:`markdown` gives the same sections without
charts. Plotly's script is embedded once, whatever the number of charts. No torch.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from podtune.report.draw.tables import markdown_text
from podtune.run.record import finite

TEMPLATE = Path(__file__).with_name("page.html.jinja")


class Part(Protocol):
    """What a section is made of."""

    def html(self) -> str:
        """Its HTML, with all text escaped."""
        ...

    def markdown(self) -> str:
        """Its Markdown."""
        ...


@dataclass(frozen=True)
class Text:
    """A paragraph; ``kind`` is its class: note or verdict."""

    text: str
    kind: str = ""

    def html(self) -> str:
        """An HTML paragraph."""
        return f'<p class="{self.kind}">{html.escape(self.text)}</p>'

    def markdown(self) -> str:
        """The text, escaped."""
        return markdown_text(self.text)


@dataclass(frozen=True)
class Warnings:
    """A list of lines that stands out."""

    lines: Sequence[str]

    def html(self) -> str:
        """An HTML list."""
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in self.lines)
        return f'<ul class="warning">{lines}</ul>' if lines else ""

    def markdown(self) -> str:
        """A list, escaped."""
        return "\n".join(f"- {markdown_text(line)}" for line in self.lines)


@dataclass(frozen=True)
class Section:
    """Part of a page: ``key`` is its anchor; a part that is a string is HTML, and not in the Markdown."""

    key: str
    title: str
    parts: Sequence[Part | str]


def page(
    title: str,
    sections: Sequence[Section],
    *,
    subtitle: str = "",
    data: Mapping[str, object] | None = None,
    footer: str = "",
) -> str:
    """Render the whole page. ``data`` is embedded as JSON (id ``podtune-data``), for scripts that read it.

    Raises:
        ModuleNotFoundError: plotly is not installed (extras train and bench).
    """
    import jinja2
    from plotly.offline import get_plotlyjs

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["source"] = _source
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


def _source(script: str) -> str:
    """Name a script by its hash, for a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def markdown(title: str, sections: Sequence[Section], *, subtitle: str = "") -> str:
    """The same sections for a pull request or a note."""
    parts = [f"# {markdown_text(title)}", markdown_text(subtitle)]
    for section in sections:
        parts += [f"## {markdown_text(section.title)}"]
        parts += [part.markdown() for part in section.parts if not isinstance(part, str)]
    return "\n\n".join(filter(None, parts)) + "\n"


def folded(summary: str, content: str) -> str:
    """``content`` (HTML) behind a line that opens it."""
    return f"<details><summary>{html.escape(summary)}</summary>{content}</details>"
