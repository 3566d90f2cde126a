"""The report of ``podtune data inspect``: its fields, and its text for a terminal."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """A stretch of a row, decoded, that is trained or is not."""

    text: str
    trained: bool


@dataclass(frozen=True)
class Lengths:
    """Lengths of rows in tokens as trained; ``max_before_cut`` is of the longest row before the cut.

    A bar of ``histogram`` has ``from``, ``below`` and ``rows``; its edges are round numbers.
    """

    min: int
    mean: float
    p50: int
    p90: int
    p95: int
    p99: int
    max: int
    max_before_cut: int
    histogram: list[dict[str, int]]


@dataclass(frozen=True)
class Truncated:
    """Rows longer than ``max_length``, and the end that is cut off (``policy``)."""

    rows: int
    share: float
    tokens_cut: int
    policy: str


@dataclass(frozen=True)
class EmptyMask:
    """Rows in which no token is trained: left out because of the cut, or kept."""

    dropped_rows: int
    kept_rows: int


@dataclass(frozen=True)
class StopToken:
    """Tokens that end generation, and the rows at whose end one of them is trained."""

    tokens: list[str]
    rows: int
    share: float


@dataclass(frozen=True)
class Packing:
    """Share of packed rows that would be tokens."""

    max_length: int
    fill: float


@dataclass(frozen=True)
class Padding:
    """Share of padded batches that would be padding."""

    batch_size: int
    waste: float


@dataclass(frozen=True)
class Report:
    """A data set as it would be trained; the fields are the keys of ``podtune data inspect --json``.

    ``examples`` are the first, the middle and the last row.
    """

    source: str
    shape: str
    columns: list[str]
    fingerprint: str
    rows: int
    tokens: int
    trained_tokens: int
    trained_share: float
    length: Lengths
    max_length: int | None
    truncated: Truncated
    empty_mask: EmptyMask
    exact_doubles: int
    blank_answers: int
    stop_token: StopToken
    packing: Packing | None
    padding: Padding
    warnings: list[str]
    examples: list[list[Segment]]


def text(report: Report, *, colour: bool) -> str:
    """The report for a terminal; trained tokens are green, or in ``[[ ]]`` without colour."""
    length, cut, empty = report.length, report.truncated, report.empty_mask
    most = max(bar["rows"] for bar in length.histogram)
    lines = [
        f"{report.source}: {report.rows:,} rows of the shape {report.shape} ({', '.join(report.columns)})",
        f"tokens     {report.tokens:,}, of which {report.trained_tokens:,} are trained "
        f"({report.trained_share:.0%})",
        f"length     {length.min} to {length.max} tokens, mean {length.mean}, half below {length.p50}, "
        f"95% below {length.p95}",
        *(
            f"  {bar['from']:>6} to {bar['below'] - 1:<6} {bar['rows']:>8,}  "
            f"{'#' * round(40 * bar['rows'] / most)}"
            for bar in length.histogram
        ),
        f"truncated  {cut.rows:,} rows ({cut.share:.1%}) are longer than max_length {report.max_length}; "
        f"{cut.tokens_cut:,} tokens are cut off ({cut.policy})",
        f"loss mask  empty in {empty.dropped_rows + empty.kept_rows:,} rows",
        f"content    exact doubles: {report.exact_doubles:,}; blank answers: {report.blank_answers:,}",
        f"stop token {' '.join(report.stop_token.tokens) or 'none'}: "
        f"trained in {report.stop_token.share:.1%} of the rows",
    ]
    if report.packing:
        lines.append(f"packing    to {report.packing.max_length} tokens fills {report.packing.fill:.1%}")
    lines.append(f"padding    wastes {report.padding.waste:.1%} of a batch of {report.padding.batch_size}")
    lines += [f"warning    {warning}" for warning in report.warnings]
    for number, row in enumerate(report.examples, 1):
        lines += [
            "",
            f"--- row {number} of {len(report.examples)} (trained tokens "
            f"{'in green' if colour else 'in [[ ]]'})",
            _marked(row, colour),
        ]
    return "\n".join(lines)


def _marked(row: list[Segment], colour: bool) -> str:
    left, right = ("\x1b[32m", "\x1b[0m") if colour else ("[[", "]]")
    return "".join(f"{left}{segment.text}{right}" if segment.trained else segment.text for segment in row)
