"""Rows of token ids, cut to a length and laid end to end."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

IGNORED = -100  # the label of a token that is not trained


@dataclass
class MaskedRows:
    """Rows before the cut.

    Attributes:
        ids: of each row.
        masks: for each row, the tokens that are trained; None: all.
        labels: those that came with the rows; None: a trained token is its own label.
        diverged: rows whose prompt is not how the complete row starts.
    """

    ids: list[list[int]]
    masks: list[NDArray[np.bool_] | None]
    labels: list[list[int]] | None = None
    diverged: int = 0


@dataclass
class TokenBatch:
    """Rows end to end: row i is ``ids[offsets[i]:offsets[i + 1]]``. All arrays are int32.

    Attributes:
        kept: for each row, its index in the batch that came in.
        truncated: rows cut to ``max_length``, dropped ones included.
        cut_tokens: tokens cut off them.
        dropped: rows left without a trained token by the cut.
        diverged: rows whose prompt is not how the complete row starts.
        longest: tokens of the longest row before the cut.
        blank: rows that came in with a blank answer.
    """

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    offsets: NDArray[np.int32]
    kept: NDArray[np.int32]
    truncated: int = 0
    cut_tokens: int = 0
    dropped: int = 0
    diverged: int = 0
    longest: int = 0
    blank: int = 0

    @classmethod
    def of(cls, rows: MaskedRows, max_length: int | None, truncation_mode: str) -> TokenBatch:
        """Cut ``rows`` and drop those that the cut leaves nothing to train; None cuts and drops none."""
        lengths = np.fromiter(map(len, rows.ids), dtype=np.int64, count=len(rows.ids))
        ids = _flat(rows.ids, int(lengths.sum()))
        targets = ids if rows.labels is None else _flat(rows.labels, len(ids))
        trained = np.concatenate(
            [
                np.ones(length, np.bool_) if mask is None else mask
                for mask, length in zip(rows.masks, lengths, strict=True)
            ]
            or [np.ones(0, np.bool_)]
        )
        longest = int(lengths.max(initial=0))
        kept = np.arange(len(lengths), dtype=np.int32)
        truncated = cut_tokens = 0
        if max_length is not None:
            positions = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            keep = positions < max_length
            if truncation_mode == "keep_end":
                keep = positions >= np.repeat(lengths - max_length, lengths)
            truncated, cut_tokens = int((lengths > max_length).sum()), int((~keep).sum())
            row_of = np.repeat(kept, lengths)
            alive = np.bincount(row_of, weights=trained & keep, minlength=len(lengths)) > 0
            keep &= alive[row_of]
            ids, targets, trained = ids[keep], targets[keep], trained[keep]
            lengths, kept = np.minimum(lengths, max_length)[alive], kept[alive]
        offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=offsets[1:])
        return cls(
            ids,
            labels=np.where(trained, targets, np.int32(IGNORED)),
            offsets=offsets,
            kept=kept,
            truncated=truncated,
            cut_tokens=cut_tokens,
            dropped=len(rows.ids) - len(kept),
            diverged=rows.diverged,
            longest=longest,
        )


def _flat(rows: list[list[int]], count: int) -> NDArray[np.int32]:
    return np.fromiter(itertools.chain.from_iterable(rows), dtype=np.int32, count=count)
