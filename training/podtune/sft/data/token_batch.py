"""Rows of token ids, cut to a length and laid end to end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

IGNORED = -100  # the label of a token that is not trained


@dataclass
class MaskedRows:
    """Rows before the cut."""

    ids: list[list[int]]
    masks: list[NDArray[np.bool_] | None]  # the tokens that are trained; None: all
    labels: list[list[int]] | None = None  # that came with the rows; None: a trained token is its own label
    diverged: int = 0  # rows whose prompt is not how the complete row starts


@dataclass
class TokenBatch:
    """Rows end to end: row i is ``ids[offsets[i]:offsets[i + 1]]``. All arrays are int32."""

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    offsets: NDArray[np.int32]
    kept: list[int]  # the index of each row in the batch that came in
    lengths: NDArray[np.int32]  # of each row that came in, before the cut
    diverged: int = 0  # rows whose prompt is not how the complete row starts
    blank: int = 0  # rows that came in with a blank answer

    @classmethod
    def of(cls, rows: MaskedRows, max_length: int | None, truncation_mode: str, blank: int = 0) -> TokenBatch:
        """Cut ``rows`` and drop those that the cut leaves nothing to train; None cuts and drops none."""
        part = slice(max_length)
        if max_length is not None and truncation_mode == "keep_end":
            part = slice(-max_length, None)
        none = np.empty(0, dtype=np.int32)
        kept, ids, labels = list[int](), [none], [none]
        for number, (row, mask) in enumerate(zip(rows.ids, rows.masks, strict=True)):
            tokens = np.array(row[part], dtype=np.int32)
            targets = tokens if rows.labels is None else np.array(rows.labels[number][part], dtype=np.int32)
            if mask is not None:
                targets = np.where(mask[part], targets, np.int32(IGNORED))
            if max_length is None or (targets != IGNORED).any():
                kept.append(number)
                ids.append(tokens)
                labels.append(targets)
        return cls(
            np.concatenate(ids),
            np.concatenate(labels),
            np.cumsum([len(row) for row in ids], dtype=np.int32),
            kept,
            np.array([len(row) for row in rows.ids], dtype=np.int32),
            rows.diverged,
            blank,
        )
