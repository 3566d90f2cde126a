"""Counts of a tokenised set, and the warnings that they are worth."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from podtune.sft.data.token_batch import IGNORED, TokenBatch
from podtune.sft.data.tokenizer import TokenizeOptions

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass
class Stats:
    """Rows and tokens of a whole set, counted while it is tokenised."""

    rows: int = 0  # that came in
    rows_kept: int = 0  # that came out; the rest lost every trained token to the cut to max_length
    rows_untrained: int = 0  # kept, although no token after the first is trained
    rows_truncated: int = 0
    tokens: int = 0  # of the rows kept
    trained_tokens: int = 0
    cut_tokens: int = 0
    longest: int = 0  # tokens of a row before the cut
    highest_id: int = -1
    rows_diverged: int = 0  # whose rendered prompt is not the start of the rendered row, as in generation
    rows_doubled: int = 0  # whose tokens are exactly those of an earlier row
    rows_blank: int = 0  # that came in with a blank answer
    fingerprint: str = ""  # of the values of the rows that came in, in any file or format

    def __post_init__(self) -> None:
        self._seen: set[int] = set()  # no field: it is not kept

    @property
    def rows_dropped(self) -> int:
        """Rows without a trained token after the cut."""
        return self.rows - self.rows_kept

    def add(self, batch: TokenBatch, max_length: int | None) -> None:
        """Count one batch, cut to ``max_length``."""
        trained = batch.labels != IGNORED
        scored = trained.copy()
        # no token comes before the first one to predict it from
        scored[batch.offsets[:-1][np.diff(batch.offsets) > 0]] = False
        scored_ends = np.concatenate(([0], np.cumsum(scored)))
        cut = batch.lengths - np.minimum(batch.lengths, batch.lengths if max_length is None else max_length)
        self.rows += len(batch.lengths)
        self.rows_kept += len(batch.kept)
        self.rows_untrained += int((np.diff(scored_ends[batch.offsets]) == 0).sum())
        self.rows_truncated += int((cut > 0).sum())
        self.tokens += len(batch.ids)
        self.trained_tokens += int(trained.sum())
        self.cut_tokens += int(cut.sum())
        self.longest = max(self.longest, int(batch.lengths.max(initial=0)))
        self.highest_id = max(self.highest_id, int(batch.ids.max(initial=-1)))
        self.rows_diverged += batch.diverged
        self.rows_blank += batch.blank
        self._seen.update(row_hashes(batch.ids, batch.offsets))
        self.rows_doubled = self.rows_kept - len(self._seen)

    def warnings(self, options: TokenizeOptions) -> list[str]:
        """Sentences for people about rows that are cut, left out, untrained or rendered in two ways."""
        end = "end" if options.truncation_mode == "keep_start" else "start"
        said = (
            (
                self.rows_truncated,
                f"are longer than max_length {options.max_length} (the longest: {self.longest} tokens): "
                f"their {end} is cut off, {self.cut_tokens} tokens",
            ),
            (self.rows_dropped, "are left out: the cut to max_length leaves nothing to train in them"),
            (self.rows_untrained, "have nothing to train: they are empty, or their loss mask is"),
            (self.rows_doubled, "are exact doubles of an earlier row"),
            (self.rows_blank, "have a blank answer"),
            (
                self.rows_diverged,
                "begin otherwise than their prompt alone (the template, or tokens that merge over the "
                "border): the model will see another context when it answers",
            ),
        )
        return [f"{count} of {self.rows} rows {what}" for count, what in said if count]


def row_hashes(ids: NDArray[np.int32], offsets: NDArray[np.int32]) -> Iterator[int]:
    """A hash of each row's tokens, for this process alone: row i is ``ids[offsets[i]:offsets[i + 1]]``."""
    for start, end in itertools.pairwise(offsets.tolist()):
        yield hash(ids[start:end].tobytes())
