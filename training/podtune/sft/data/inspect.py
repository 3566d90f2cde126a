"""A description of a data set as it would be trained, made from the very rows that training would get."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from podtune.sft.data import files
from podtune.sft.data.inspect_report import (
    EmptyMask,
    Lengths,
    Packing,
    Padding,
    Report,
    Segment,
    StopToken,
    Truncated,
)
from podtune.sft.data.load import load_split
from podtune.sft.data.rows import pack, packed_tokens, trained_too
from podtune.sft.data.source import DataSource
from podtune.sft.data.stats import Stats
from podtune.sft.data.token_batch import IGNORED
from podtune.sft.data.tokenise import tokenised
from podtune.sft.data.tokenizer import TokenizeOptions
from podtune.sft.source.model import Origin

if TYPE_CHECKING:
    from datasets import Dataset
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

_BARS = 10
_EXAMPLE_CHARACTERS = 1200


def inspect(
    source: DataSource,
    tokenizer: PreTrainedTokenizerBase,
    options: TokenizeOptions,
    *,
    pack_length: int | None = None,
    batch_size: int = 8,
    vocabulary: int | None = None,
    stop_ids: frozenset[int] = frozenset(),
    held_out: DataSource | None = None,
) -> Report:
    """Tokenise ``source`` as training would and describe the result.

    Args:
        source: the rows; check it first.
        tokenizer: of the model.
        options: as for training.
        pack_length: tokens of a packed row; None: ``options.max_length``.
        batch_size: rows of a batch, for the share of padding.
        vocabulary: rows of the model's embedding, if known.
        stop_ids: tokens that end generation, beside the tokenizer's EOS.
        held_out: the rows to evaluate on, of which those are counted that are trained, too.

    Raises:
        UserError: a row, or a tokenizer, that training would refuse.
    """
    raw = load_split(source)
    made = tokenised(source, tokenizer, options, rows=raw, vocabulary=vocabulary)
    stats, warnings = made.stats, list(made.warnings)
    if held_out is not None:
        warnings += trained_too(made, tokenised(held_out, tokenizer, options, vocabulary=vocabulary))
    ids, labels, offsets = _flat(made.dataset)
    lengths = np.diff(offsets)
    if tokenizer.eos_token_id is not None:
        stop_ids |= {tokenizer.eos_token_id}
    names = [str(tokenizer.convert_ids_to_tokens(number)) for number in sorted(stop_ids)]
    stop_rows = _stop_trained(labels, offsets, stop_ids)
    stop_share = stop_rows / max(1, stats.rows_kept)
    if stop_share < 0.9:
        warnings.append(
            f"a stop token ({', '.join(names) or 'none is known'}) is trained at the end of {stop_share:.0%} "
            "of the rows only: the model may not learn to stop"
        )
    pack_length = pack_length or options.max_length
    return Report(
        source=str(source),
        shape=made.shape,
        columns=list(raw.column_names),
        fingerprint=stats.fingerprint,
        rows=stats.rows,
        tokens=stats.tokens,
        trained_tokens=stats.trained_tokens,
        trained_share=round(stats.trained_tokens / max(1, stats.tokens), 4),
        length=_lengths(lengths, stats.longest),
        max_length=options.max_length,
        truncated=_truncated(stats, options),
        empty_mask=EmptyMask(stats.rows_dropped, stats.rows_untrained),
        exact_doubles=stats.rows_doubled,
        blank_answers=stats.rows_blank,
        stop_token=StopToken(names, stop_rows, round(stop_share, 4)),
        packing=Packing(pack_length, _packing_fill(made.dataset, pack_length)) if pack_length else None,
        padding=Padding(batch_size, _padding_waste(lengths, batch_size)),
        warnings=warnings,
        examples=[_segments(tokenizer, ids, labels, offsets, row) for row in _chosen(len(lengths))],
    )


def _truncated(stats: Stats, options: TokenizeOptions) -> Truncated:
    return Truncated(
        rows=stats.rows_truncated,
        share=round(stats.rows_truncated / max(1, stats.rows), 4),
        tokens_cut=stats.cut_tokens,
        policy=options.truncation_mode,
    )


def _flat(dataset: Any) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """The token ids and labels of all rows end to end, and where rows begin and end."""
    import pyarrow.compute as pc

    ids, labels = (dataset.data.column(name) for name in ("input_ids", "labels"))
    offsets = np.concatenate(([0], np.cumsum(pc.list_value_length(ids).to_numpy()))).astype(np.int64)
    return pc.list_flatten(ids).to_numpy(), pc.list_flatten(labels).to_numpy(), offsets


def _stop_trained(labels: NDArray[np.int32], offsets: NDArray[np.int64], stops: frozenset[int]) -> int:
    """Rows whose last three trained tokens hold a stop token: templates write line breaks behind it."""
    count = 0
    for start, end in itertools.pairwise(offsets.tolist()):
        row = labels[start:end]
        tail = row[row != IGNORED][-3:]
        count += not stops.isdisjoint(tail.tolist())
    return count


def _lengths(lengths: NDArray[np.int64], longest: int) -> Lengths:
    width = _round_up(int(lengths.max()) / _BARS)
    edges = np.arange(0, int(lengths.max()) + width, width)
    counts, _ = np.histogram(lengths, bins=np.append(edges, edges[-1] + width))
    bars = [
        {"from": int(edge), "below": int(edge + width), "rows": int(count)}
        for edge, count in zip(edges, counts, strict=True)
    ]
    while not bars[-1]["rows"]:
        bars.pop()
    p50, p90, p95, p99 = (int(np.percentile(lengths, point)) for point in (50, 90, 95, 99))
    return Lengths(
        min=int(lengths.min()),
        mean=round(float(lengths.mean()), 1),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=int(lengths.max()),
        max_before_cut=longest,
        histogram=bars,
    )


def _round_up(value: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50, ..."""
    step = 1
    while True:
        for factor in (1, 2, 5):
            if factor * step >= value:
                return factor * step
        step *= 10


def _packing_fill(dataset: Dataset, max_length: int) -> float:
    """Share of packed rows that is tokens."""
    packed = pack(dataset, max_length, seed=None)
    return round(packed_tokens(packed)["tokens"] / max(1, len(packed) * max_length), 4)


def _padding_waste(lengths: NDArray[np.int64], batch_size: int) -> float:
    """Share of padded batches that is padding, rows shuffled."""
    shuffled = np.random.default_rng(0).permutation(lengths)
    batches = np.split(shuffled, range(batch_size, len(shuffled), batch_size))
    padded = sum(int(batch.max()) * len(batch) for batch in batches)
    return round(1 - float(lengths.sum()) / max(1, padded), 4)


def _chosen(rows: int) -> list[int]:
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


def source_to_inspect(source: DataSource, split: str | None) -> DataSource:
    """``source`` with its ``split``; without one, with the first that a folder without a train split has."""
    source.fetch()
    if split:
        return dataclasses.replace(source, split=split)
    path = source.path
    if source.split == "train" and path is not None and path.exists():
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
