"""What will be trained, seen before any GPU time is paid for: made from the very rows that training would
get.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from podtune.sft.data import files
from podtune.sft.data.encode import IGNORED
from podtune.sft.data.load import load_split
from podtune.sft.data.source import DataSource
from podtune.sft.data.tokenise import tokenised
from podtune.sft.data.tokenizer import TokenizeOptions
from podtune.sft.source.model import Origin

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

_PACK_ROWS = 1000  # TRL packs that many rows at a time
_BARS = 10
_EXAMPLE_CHARACTERS = 1200


@dataclass(frozen=True)
class Segment:
    """A stretch of a row, decoded, that is trained or is not."""

    text: str
    trained: bool


@dataclass(frozen=True)
class Report:
    """``facts`` is JSON-ready; ``examples`` are three rows as segments."""

    facts: dict[str, Any]
    examples: list[list[Segment]]

    def as_json(self) -> dict[str, Any]:
        """Facts and examples in one object."""
        return self.facts | {
            "examples": [[dataclasses.asdict(segment) for segment in row] for row in self.examples]
        }


def inspect(
    source: DataSource,
    tokenizer: PreTrainedTokenizerBase,
    options: TokenizeOptions,
    *,
    batch_size: int = 8,
    model_vocab_size: int | None = None,
    stop_ids: frozenset[int] = frozenset(),
    cache_dir: Path | None = None,
) -> Report:
    """Tokenise ``source`` as training would and describe the result.

    Args:
        source: what to look at; check it first.
        tokenizer: of the model.
        options: as for training.
        batch_size: rows of a batch, for the share of padding.
        model_vocab_size: rows of the model's embedding, if known.
        stop_ids: tokens that end generation, beside the tokenizer's EOS.
        cache_dir: as for :func:`podtune.sft.data.tokenise.tokenised`.

    Raises:
        UserError: what training would refuse.
    """
    raw = load_split(source)
    rows = tokenised(raw, source, tokenizer, options, vocabulary=model_vocab_size, cache_dir=cache_dir)
    warnings = list(rows.warnings)
    stats = rows.stats
    ids, labels, offsets = _flat(rows.dataset)
    lengths = np.diff(offsets)
    stops = stop_ids | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set())
    stop = _stop_trained(labels, offsets, frozenset(stops))
    share = stop / max(1, stats.rows_kept)
    if share < 0.9:
        warnings.append(
            f"a stop token ({_names(tokenizer, stops)}) is trained at the end of {share:.0%} of the rows "
            "only: "
            "the model may not learn to stop"
        )
    facts: dict[str, Any] = {
        "source": str(source),
        "shape": rows.shape,
        "columns": list(raw.column_names),
        "fingerprint": stats.fingerprint,
        "rows": stats.rows,
        "tokens": stats.tokens,
        "trained_tokens": stats.trained_tokens,
        "trained_share": round(stats.trained_tokens / max(1, stats.tokens), 4),
        "length": _length_facts(lengths, stats.longest),
        "max_length": options.max_length,
        "truncated": {
            "rows": stats.rows_truncated,
            "share": round(stats.rows_truncated / max(1, stats.rows), 4),
            "tokens_cut": stats.cut_tokens,
            "policy": options.truncation_mode,
        },
        "empty_mask": {"dropped_rows": stats.rows_dropped, "kept_rows": stats.rows_untrained},
        "stop_token": {
            "tokens": [tokenizer.convert_ids_to_tokens(number) for number in sorted(stops)],
            "rows": stop,
            "share": round(share, 4),
        },
        "packing": {"max_length": options.max_length, "fill": _packing_fill(lengths, options.max_length)}
        if options.max_length
        else None,
        "padding": {"batch_size": batch_size, "waste": _padding_waste(lengths, batch_size)},
        "warnings": warnings,
    }
    return Report(facts, [_segments(tokenizer, ids, labels, offsets, row) for row in _chosen(len(lengths))])


def _flat(dataset: Any) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """The token ids and labels of all rows end to end, and where rows begin and end."""
    table = dataset.data.table.combine_chunks()
    ids, labels = table.column("input_ids"), table.column("labels")
    lengths = np.concatenate(
        [chunk.value_lengths().to_numpy() for chunk in ids.chunks] or [np.zeros(0, np.int64)]
    )
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)

    def values(column: Any) -> NDArray[np.int32]:
        return np.concatenate(
            [chunk.flatten().to_numpy() for chunk in column.chunks] or [np.zeros(0, np.int32)]
        )

    return values(ids), values(labels), offsets


def _stop_trained(labels: NDArray[np.int32], offsets: NDArray[np.int64], stops: frozenset[int]) -> int:
    """Rows whose last three trained tokens hold a stop token; templates write a line break or two after
    it.
    """
    count = 0
    for start, end in itertools.pairwise(offsets.tolist()):
        row = labels[start:end]
        tail = row[row != IGNORED][-3:]
        count += not stops.isdisjoint(tail.tolist())
    return count


def _names(tokenizer: PreTrainedTokenizerBase, ids: set[int] | frozenset[int]) -> str:
    return (
        ", ".join(str(tokenizer.convert_ids_to_tokens(number)) for number in sorted(ids)) or "none is known"
    )


def _length_facts(lengths: NDArray[np.int64], longest: int) -> dict[str, Any]:
    """Lengths in tokens as trained, and a histogram with edges at round numbers; ``longest`` is before the
    cut.
    """
    if not len(lengths):
        return {}
    percentiles = {f"p{point}": int(np.percentile(lengths, point)) for point in (50, 90, 95, 99)}
    width = _round_up(int(lengths.max()) / _BARS)
    edges = np.arange(0, int(lengths.max()) + width, width)
    counts, _ = np.histogram(lengths, bins=np.append(edges, edges[-1] + width))
    bars = [
        {"from": int(edge), "below": int(edge + width), "rows": int(count)}
        for edge, count in zip(edges, counts, strict=True)
    ]
    while bars and not bars[-1]["rows"]:
        bars.pop()
    return {
        "min": int(lengths.min()),
        "mean": round(float(lengths.mean()), 1),
        **percentiles,
        "max": int(lengths.max()),
        "max_before_cut": longest,
        "histogram": bars,
    }


def _round_up(value: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50, ..."""
    step = 1
    while True:
        for factor in (1, 2, 5):
            if factor * step >= value:
                return factor * step
        step *= 10


def _packing_fill(lengths: NDArray[np.int64], max_length: int) -> float:
    """Share of packed rows that is tokens, with TRL's best fit decreasing, a thousand rows at a time."""
    packs = sum(
        _packs(lengths[start : start + _PACK_ROWS], max_length)
        for start in range(0, len(lengths), _PACK_ROWS)
    )
    return round(float(np.minimum(lengths, max_length).sum()) / (max(1, packs) * max_length), 4)


def _packs(lengths: NDArray[np.int64], max_length: int) -> int:
    spaces: list[int] = []  # free tokens of the packs so far, ascending
    packs = 0
    for length in sorted(np.minimum(lengths, max_length).tolist(), reverse=True):
        if not length:
            continue
        at = bisect.bisect_left(spaces, length)
        if at < len(spaces):
            space = spaces.pop(at)
        else:
            space, packs = max_length, packs + 1
        bisect.insort(spaces, space - length)
    return packs


def _padding_waste(lengths: NDArray[np.int64], batch_size: int) -> float:
    """Share of padded batches that is padding, rows shuffled."""
    shuffled = np.random.default_rng(0).permutation(lengths)
    padded = sum(int(batch.max()) * len(batch) for batch in _batches(shuffled, batch_size))
    return round(1 - float(lengths.sum()) / max(1, padded), 4)


def _batches(lengths: NDArray[np.int64], batch_size: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(lengths), batch_size):
        yield lengths[start : start + batch_size]


def _chosen(rows: int) -> list[int]:
    """The first, the middle and the last row."""
    return sorted({0, rows // 2, rows - 1}) if rows else []


def _segments(
    tokenizer: PreTrainedTokenizerBase,
    ids: NDArray[np.int32],
    labels: NDArray[np.int32],
    offsets: NDArray[np.int64],
    row: int,
) -> list[Segment]:
    start, end = int(offsets[row]), int(offsets[row + 1])
    trained = labels[start:end] != IGNORED
    borders = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), end - start]
    segments = []
    room = _EXAMPLE_CHARACTERS
    for left, right in itertools.pairwise(borders):
        text = str(tokenizer.decode(ids[start + left : start + right].tolist(), skip_special_tokens=False))
        segments.append(
            Segment(text if len(text) <= room else text[: max(0, room)] + " ...", bool(trained[left]))
        )
        room -= len(text)
        if room <= 0:
            break
    return segments


def text(report: Report, *, colour: bool) -> str:
    """The report for a terminal; trained tokens are green, or in ``[[ ]]`` without colour."""
    facts = report.facts
    lines = [
        f"{facts['source']}: {facts['rows']:,} rows of the shape {facts['shape']} "
        f"({', '.join(facts['columns'])})",
        f"tokens     {facts['tokens']:,}, of which {facts['trained_tokens']:,} are trained "
        f"({facts['trained_share']:.0%})",
    ]
    if length := facts["length"]:
        lines.append(
            f"length     {length['min']} to {length['max']} tokens, mean {length['mean']}, "
            f"half below {length['p50']}, 95% below {length['p95']}"
        )
        most = max(bar["rows"] for bar in length["histogram"])
        for bar in length["histogram"]:
            lines.append(
                f"  {bar['from']:>6} to {bar['below'] - 1:<6} {bar['rows']:>8,}  "
                f"{'#' * round(40 * bar['rows'] / most)}"
            )
    cut = facts["truncated"]
    lines += [
        f"truncated  {cut['rows']:,} rows ({cut['share']:.1%}) are longer than max_length "
        f"{facts['max_length']}; "
        f"{cut['tokens_cut']:,} tokens are cut off ({cut['policy']})",
        f"loss mask  empty in {facts['empty_mask']['dropped_rows'] + facts['empty_mask']['kept_rows']:,} "
        "rows",
        f"stop token {' '.join(map(str, facts['stop_token']['tokens'])) or 'none'}: "
        f"trained in {facts['stop_token']['share']:.1%} of the rows",
    ]
    if facts["packing"]:
        lines.append(
            f"packing    to {facts['packing']['max_length']} tokens fills {facts['packing']['fill']:.1%}"
        )
    lines.append(
        f"padding    wastes {facts['padding']['waste']:.1%} of a batch of {facts['padding']['batch_size']}"
    )
    lines += [f"warning    {warning}" for warning in facts["warnings"]]
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


def where_to_look(data_path: str, split: str | None) -> DataSource:
    """The source that ``--data`` and ``--split`` mean: the training split unless said otherwise."""
    source = DataSource(name=data_path)
    source.fetch()
    if split:
        return dataclasses.replace(source, split=split)
    path = source.path
    if path is not None and path.exists():
        names = files.find(path).splits
        return dataclasses.replace(source, split="train" if "train" in names else next(iter(names)))
    return source


def stop_ids_of(origin: Origin) -> frozenset[int]:
    """The stop tokens that the model's generation config names."""
    if "generation_config.json" not in origin.files:
        return frozenset()
    stops = files.read_json(origin.file("generation_config.json")).get("eos_token_id")
    return frozenset(
        stop for stop in (stops if isinstance(stops, list) else [stops]) if isinstance(stop, int)
    )
