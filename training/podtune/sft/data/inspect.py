"""A description of a data set as it would be trained, made from the very rows that training would get."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from podtune.sft.data import files
from podtune.sft.data.load import load_split
from podtune.sft.data.rows import trained_too
from podtune.sft.data.source import DataSource
from podtune.sft.data.token_batch import IGNORED
from podtune.sft.data.tokenise import tokenised
from podtune.sft.data.tokenizer import TokenizeOptions
from podtune.sft.source.model import Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EXAMPLE_CHARACTERS = 1200


@dataclass(frozen=True)
class Segment:
    """A stretch of a row, decoded, that is trained or is not."""

    text: str
    trained: bool


@dataclass(frozen=True)
class Report:
    """A data set as it would be trained; the fields are the keys of ``podtune data inspect --json``."""

    source: str
    shape: str
    columns: list[str]
    fingerprint: str
    rows: int
    tokens: int
    trained_tokens: int
    trained_share: float
    length: dict[str, float]  # tokens of a row, and those of the longest row before the cut
    max_length: int | None
    truncated: dict[str, int | float | str]  # rows longer than that, their tokens cut off, the end kept
    empty_mask: dict[str, int]  # rows in which no token is trained, left out because of the cut, or kept
    exact_doubles: int
    blank_answers: int
    stop_token: dict[str, list[str] | int | float]  # and the rows at whose end one of them is trained
    warnings: list[str]
    examples: list[list[Segment]]  # the first, the middle and the last row

    def text(self, *, colour: bool) -> str:
        """The report for a terminal; trained tokens are green, or in ``[[ ]]`` without colour."""
        length, cut = self.length, self.truncated
        left, right = ("\x1b[32m", "\x1b[0m") if colour else ("[[", "]]")
        lines = [
            f"{self.source}: {self.rows:,} rows of the shape {self.shape} ({', '.join(self.columns)})",
            f"tokens     {self.tokens:,}, of which {self.trained_tokens:,} are trained "
            f"({self.trained_share:.0%})",
            f"length     {length['min']} to {length['max']} tokens, mean {length['mean']}, half below "
            f"{length['p50']}, 95% below {length['p95']}",
            f"truncated  {cut['rows']:,} rows ({cut['share']:.1%}) are longer than max_length "
            f"{self.max_length}; {cut['tokens_cut']:,} tokens are cut off ({cut['policy']})",
            f"loss mask  empty in {sum(self.empty_mask.values()):,} rows",
            f"content    exact doubles: {self.exact_doubles:,}; blank answers: {self.blank_answers:,}",
            f"stop token {self.stop_token['tokens']}: trained in {self.stop_token['share']:.1%} of the rows",
            *(f"warning    {warning}" for warning in self.warnings),
        ]
        for number, row in enumerate(self.examples, 1):
            marks = "in green" if colour else "in [[ ]]"
            lines += ["", f"--- row {number} of {len(self.examples)} (trained tokens {marks})"]
            lines.append("".join(f"{left}{part.text}{right}" if part.trained else part.text for part in row))
        return "\n".join(lines)


def inspect(
    source: DataSource,
    tokenizer: PreTrainedTokenizerBase,
    options: TokenizeOptions,
    *,
    vocabulary: int | None = None,
    stop_ids: frozenset[int] = frozenset(),
    held_out: DataSource | None = None,
) -> Report:
    """Tokenise ``source``, which is checked, as training would and describe the result.

    ``stop_ids`` end generation, beside EOS; of ``held_out`` those rows are counted that are trained, too.

    Raises:
        UserError: a row, or a tokenizer, that training would refuse.
    """
    raw = load_split(source)
    made = tokenised(source, tokenizer, options, rows=raw, vocabulary=vocabulary)
    stats, warnings = made.stats, list(made.warnings)
    if held_out is not None:
        warnings += trained_too(made, tokenised(held_out, tokenizer, options, vocabulary=vocabulary))
    if tokenizer.eos_token_id is not None:
        stop_ids |= {tokenizer.eos_token_id}
    names = [str(tokenizer.convert_ids_to_tokens(number)) for number in sorted(stop_ids)]
    labels = [np.array(row) for row in made.dataset["labels"]]
    # of the last three trained tokens: templates write line breaks behind a stop token
    stop_rows = sum(not stop_ids.isdisjoint(row[row != IGNORED][-3:].tolist()) for row in labels)
    stop_share = round(stop_rows / max(1, stats.rows_kept), 4)
    if stop_share < 0.9:
        warnings.append(
            f"a stop token ({', '.join(names) or 'none is known'}) is trained at the end of {stop_share:.0%} "
            "of the rows only: the model may not learn to stop"
        )
    return Report(
        source=str(source),
        shape=made.shape,
        columns=list(raw.column_names),
        fingerprint=stats.fingerprint,
        rows=stats.rows,
        tokens=stats.tokens,
        trained_tokens=stats.trained_tokens,
        trained_share=round(stats.trained_tokens / max(1, stats.tokens), 4),
        length=_lengths([len(row) for row in labels]) | {"max_before_cut": stats.longest},
        max_length=options.max_length,
        truncated={
            "rows": stats.rows_truncated,
            "share": round(stats.rows_truncated / max(1, stats.rows), 4),
            "tokens_cut": stats.cut_tokens,
            "policy": options.truncation_mode,
        },
        empty_mask={"dropped_rows": stats.rows_dropped, "kept_rows": stats.rows_untrained},
        exact_doubles=stats.rows_doubled,
        blank_answers=stats.rows_blank,
        stop_token={"tokens": names, "rows": stop_rows, "share": stop_share},
        warnings=warnings,
        examples=[
            _segments(tokenizer, made.dataset[row]["input_ids"], labels[row] != IGNORED)
            for row in sorted({0, len(labels) // 2, len(labels) - 1})
        ],
    )


def _lengths(lengths: list[int]) -> dict[str, float]:
    ends = {"min": min(lengths), "mean": round(sum(lengths) / len(lengths), 1), "max": max(lengths)}
    return ends | {f"p{point}": int(np.percentile(lengths, point)) for point in (50, 90, 95, 99)}


def _segments(tokenizer: PreTrainedTokenizerBase, ids: list[int], trained: np.ndarray) -> list[Segment]:
    segments, room = list[Segment](), _EXAMPLE_CHARACTERS
    for is_trained, group in itertools.groupby(zip(ids, trained, strict=True), lambda pair: bool(pair[1])):
        text = str(tokenizer.decode([token for token, _ in group], skip_special_tokens=False))
        segments.append(Segment(text if len(text) <= room else text[:room] + " ...", is_trained))
        room -= len(text)
        if room <= 0:
            break
    return segments


def stop_ids_of(origin: Origin) -> frozenset[int]:
    """The stop tokens that the model's generation config names."""
    if "generation_config.json" not in origin.files:
        return frozenset()
    stops = files.read_json(origin.file("generation_config.json")).get("eos_token_id")
    return frozenset(
        stop for stop in (stops if isinstance(stops, list) else [stops]) if isinstance(stop, int)
    )
