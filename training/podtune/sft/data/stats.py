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
    """Rows and tokens of a whole set, counted while it is tokenised.

    Attributes:
        rows: rows that came in.
        rows_kept: rows that came out; the rest lost every trained token to the cut to ``max_length``.
        rows_untrained: rows kept although nothing is learnt from them: no token after the first is trained.
        rows_truncated: rows longer than ``max_length``.
        tokens: tokens of the rows kept.
        trained_tokens: those with a label.
        cut_tokens: tokens cut off.
        longest: tokens of the longest row, before the cut.
        highest_id: the largest token id.
        rows_diverged: rows whose rendered prompt is not the start of the rendered row; training then sees
            another context than generation will.
        rows_doubled: rows whose tokens are exactly those of an earlier row.
        rows_blank: rows that came in with a blank answer.
        fingerprint: of the rows that came in, see :func:`podtune.sft.data.fingerprint`.
    """

    rows: int = 0
    rows_kept: int = 0
    rows_untrained: int = 0
    rows_truncated: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    cut_tokens: int = 0
    longest: int = 0
    highest_id: int = -1
    rows_diverged: int = 0
    rows_doubled: int = 0
    rows_blank: int = 0
    fingerprint: str = ""

    def __post_init__(self) -> None:
        self._seen: set[int] = set()  # no field: it is not kept

    @property
    def rows_dropped(self) -> int:
        """Rows without a trained token after the cut."""
        return self.rows - self.rows_kept

    def add(self, batch: TokenBatch) -> None:
        """Count one batch."""
        trained = batch.labels != IGNORED
        ends = np.concatenate(([0], np.cumsum(trained)))
        scored = trained.copy()
        # no token comes before the first one to predict it from
        scored[batch.offsets[:-1][np.diff(batch.offsets) > 0]] = False
        scored_ends = np.concatenate(([0], np.cumsum(scored)))
        self.rows += len(batch.kept) + batch.dropped
        self.rows_kept += len(batch.kept)
        self.rows_untrained += int((np.diff(scored_ends[batch.offsets]) == 0).sum())
        self.rows_truncated += batch.truncated
        self.tokens += len(batch.ids)
        self.trained_tokens += int(ends[-1])
        self.cut_tokens += batch.cut_tokens
        self.longest = max(self.longest, batch.longest)
        self.highest_id = max(self.highest_id, int(batch.ids.max(initial=-1)))
        self.rows_diverged += batch.diverged
        self.rows_blank += batch.blank
        self._seen.update(row_hashes(batch.ids, batch.offsets))
        self.rows_doubled = self.rows_kept - len(self._seen)

    def warnings(self, options: TokenizeOptions) -> list[str]:
        """Sentences for people about rows that are cut, left out, untrained or rendered in two ways."""
        warnings = []
        if self.rows_truncated:
            end = "end" if options.truncation_mode == "keep_start" else "start"
            warnings.append(
                f"{self.rows_truncated} of {self.rows} rows are longer than max_length {options.max_length} "
                f"(the longest: {self.longest} tokens): their {end} is cut off, {self.cut_tokens} tokens"
            )
        if self.rows_dropped:
            warnings.append(
                f"{self.rows_dropped} of {self.rows} rows are left out: the cut to max_length "
                "leaves nothing to train in them"
            )
        if self.rows_untrained:
            warnings.append(
                f"{self.rows_untrained} of {self.rows} rows have nothing to train: they are empty, "
                "or their loss mask is"
            )
        if self.rows_doubled:
            warnings.append(f"{self.rows_doubled} of {self.rows} rows are exact doubles of an earlier row")
        if self.rows_blank:
            warnings.append(f"{self.rows_blank} of {self.rows} rows have a blank answer")
        if self.rows_diverged:
            warnings.append(
                f"in {self.rows_diverged} of {self.rows} rows the prompt alone is not how the whole row "
                "starts (the template, or tokens "
                "that merge over the border): the model will see another context when it answers"
            )
        return warnings


def row_hashes(ids: NDArray[np.int32], offsets: NDArray[np.int32]) -> Iterator[int]:
    """A hash of each row's tokens, for this process alone: row i is ``ids[offsets[i]:offsets[i + 1]]``."""
    for start, end in itertools.pairwise(offsets.tolist()):
        yield hash(ids[start:end].tobytes())
