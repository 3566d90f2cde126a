"""The token rows of a run: training and evaluation set loaded, tokenised, packed, the same on every rank."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from podtune.run.errors import ConfigError, UsageError
from podtune.sft.data.batching import row_lengths
from podtune.sft.data.load import load_split, shape_of
from podtune.sft.data.source import Sources
from podtune.sft.data.stats import row_hashes
from podtune.sft.data.stream import BUFFER, TokenStream
from podtune.sft.data.token_batch import IGNORED
from podtune.sft.data.tokenise import Tokenised, tokenised
from podtune.sft.data.tokenizer import TokenizeOptions, tokenizer_hash

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RowOptions:
    """Options of a run's rows; the names are SFTConfig's and RunArguments'.

    Attributes:
        packing: the packing strategy of the training set; None leaves its rows as they are.
        shuffle: shuffle the training rows, before packing and after it.
        eval_for: the key that asks for evaluation rows; empty if none does.
        eval_multiple: rows of one evaluation step on all ranks.
    """

    tokens: TokenizeOptions
    eval_tokens: TokenizeOptions
    packing: str | None = None
    eval_packing: str | None = None
    max_length: int = 1024
    shuffle: bool = False
    seed: int = 42
    eval_for: str = ""
    eval_split_size: float | None = None
    max_eval_rows: int | None = None
    eval_multiple: int = 1


@dataclass(frozen=True)
class DatasetInfo:
    """The data of a run for its record: the fields are the keys of ``data`` in run.json.

    Attributes:
        tokenizer: hash of its vocabulary, rules, special tokens and chat template.
        fingerprint: of the training rows, or of a stream's files.
        chat_template: True if the rows were rendered by a chat template, False of bare text.
        rows: training rows, before packing; ``tokens`` are counted after it.
        tokens_xxh3_128: hash of the token ids as they lie in the cache.
    """

    path: str | list[str]
    tokenizer: str
    streamed: bool | None = None
    chat_template: bool | None = None
    rows: int | None = None
    fingerprint: str = ""
    tokens: int | None = None
    trained_tokens: int | None = None
    truncated_rows: int | None = None
    tokens_xxh3_128: str | None = None
    eval_rows: int | None = None
    eval_fingerprint: str | None = None
    eval_tokens: int | None = None

    def to_json(self) -> dict[str, str | int | list[str]]:
        """The fields that are known."""
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class TokenRows:
    """Token rows (``input_ids``, ``labels``) to train and evaluate on, and the raw evaluation rows."""

    train: Dataset | TokenStream
    eval: Dataset | None
    eval_rows: Dataset | None
    info: DatasetInfo
    warnings: tuple[str, ...]

    @property
    def count(self) -> int | None:
        """Training rows; None of a stream."""
        return None if isinstance(self.train, TokenStream) else len(self.train)

    def lengths(self, longest: int) -> list[int]:
        """Tokens of every training row; of a stream ``longest``, which they are at most."""
        return [longest] if isinstance(self.train, TokenStream) else row_lengths(self.train)

    def dataset(self, position: int) -> Dataset | IterableDataset:
        """The trainer's data set: a stream from behind ``position`` rows on, a set from its first."""
        return self.train.dataset(position) if isinstance(self.train, TokenStream) else self.train


def token_rows(
    sources: Sources, tokenizer: PreTrainedTokenizerBase, options: RowOptions, *, vocabulary: int
) -> TokenRows:
    """Load, tokenise and (if asked) pack; the result is the same on every rank.

    ``vocabulary`` is the number of rows of the model's embedding. The first rank to come fills the cache.

    Raises:
        UserError: no row would be trained, or evaluation is asked for and there is nothing to evaluate on.
    """
    raw, raw_eval = _raw(sources, options)
    name = sources.train.name or [str(entry["path"]) for entry in sources.train.mixture]
    info = DatasetInfo(name, tokenizer_hash(tokenizer)[:12])
    common: dict[str, Any] = {"vocabulary": vocabulary, "cache_dir": sources.cache_dir}
    rows: Dataset | TokenStream
    if sources.streaming:
        made = None
        rows, info, warnings = _stream(sources, tokenizer, options, vocabulary, info)
    else:
        made = tokenised(sources.train, tokenizer, options.tokens, rows=raw, **common)
        rows, info, warnings = _training_set(made, options, info)
    if sources.train.path is not None and sources.train.config:
        warnings.append("dataset_config has no effect: the rows are local files")
    evaluation = None
    if raw_eval is not None:
        held_out = sources.evaluation or sources.train
        scored = tokenised(held_out, tokenizer, options.eval_tokens, rows=raw_eval, **common)
        if made is not None:
            warnings += trained_too(made, scored)
        info = dataclasses.replace(
            info,
            eval_rows=len(scored.dataset),
            eval_fingerprint=scored.stats.fingerprint,
            eval_tokens=scored.stats.tokens,
        )
        evaluation = scored.dataset
        if options.eval_packing:
            evaluation = pack(evaluation, options.max_length, options.eval_packing, None)
        evaluation = filled(evaluation, options.eval_multiple)
    return TokenRows(rows, evaluation, raw_eval, info, tuple(warnings))


def _raw(sources: Sources, options: RowOptions) -> tuple[Dataset | None, Dataset | None]:
    """Training rows if a part of them is held out, else None, and evaluation rows if there are any."""
    held_out = sources.evaluation
    raw, raw_eval = None, load_split(held_out) if held_out is not None else None
    if not sources.streaming and held_out is None and (size := options.eval_split_size):
        raw, raw_eval = split_off(load_split(sources.train), size, options.seed, sources.train.text_field)
    if raw_eval is None and options.eval_for:
        raise UsageError(
            "evaluation is asked for and there is no eval split",
            where=options.eval_for,
            fix="--eval_dataset_name FILE, or --eval_split_size 0.05 to hold rows out",
        )
    if raw_eval is not None and options.max_eval_rows:
        raw_eval = raw_eval.select(range(min(options.max_eval_rows, len(raw_eval))))
    return raw, raw_eval


def _training_set(
    made: Tokenised, options: RowOptions, info: DatasetInfo
) -> tuple[Dataset, DatasetInfo, list[str]]:
    warnings, rows = list(made.warnings), made.dataset
    info = dataclasses.replace(
        info,
        rows=len(rows),
        fingerprint=made.stats.fingerprint,
        tokens=made.stats.tokens,
        trained_tokens=made.stats.trained_tokens,
        truncated_rows=made.stats.rows_truncated,
        tokens_xxh3_128=made.digest or None,
        chat_template=made.templated,
    )
    if options.packing:
        warnings += cut_by_packing(rows, options.max_length, options.packing)
        rows = pack(rows, options.max_length, options.packing, options.seed if options.shuffle else None)
        left = packed_tokens(rows)  # bfd cuts long rows
        info = dataclasses.replace(info, tokens=left["tokens"], trained_tokens=left["trained_tokens"])
    return rows.shuffle(seed=options.seed) if options.shuffle else rows, info, warnings


def _stream(
    sources: Sources,
    tokenizer: PreTrainedTokenizerBase,
    options: RowOptions,
    vocabulary: int,
    info: DatasetInfo,
) -> tuple[TokenStream, DatasetInfo, list[str]]:
    seed = options.seed if options.shuffle else None
    stream = TokenStream(sources.train, tokenizer, options.tokens, vocabulary=vocabulary, seed=seed)
    warnings = list(stream.warnings)
    if seed is None:
        warnings.append(
            f"{sources.streaming}: the rows are trained in their order; shuffle_dataset shuffles them within "
            f"{BUFFER:,} rows"
        )
    info = dataclasses.replace(
        info, streamed=True, fingerprint=stream.fingerprint, chat_template=stream.templated
    )
    return stream, info, warnings


def split_off(rows: Dataset, size: float, seed: int, text_field: str = "text") -> tuple[Dataset, Dataset]:
    """``rows`` as train and test, with a share or number of rows in the latter, both in their order.

    Which they are is decided by a hash of the question, so that rows which ask the same are on one side.

    Raises:
        UserError: one of the two would be empty.
    """
    shape = shape_of(rows, text_field)
    asked = rows.select_columns([name for name in shape.read if name in rows.column_names])
    groups: dict[bytes, list[int]] = {}
    for number, row in enumerate(asked):
        text = json.dumps([seed, shape.asked(row)], sort_keys=True, default=str)
        groups.setdefault(hashlib.sha256(text.encode()).digest(), []).append(number)
    room = int(size) if size >= 1 else math.ceil(size * len(rows))
    test: list[int] = []
    for _, group in sorted(groups.items()):
        if len(test) + len(group) <= room:
            test += group
    if not 0 < len(test) < len(rows):
        raise ConfigError(
            f"eval_split_size is {size:g}, and the set has {len(rows)} rows, of which {len(groups)} "
            "differ in what they ask: one part would be empty",
            where="eval_split_size",
            fix="hold fewer or more rows out, or give --eval_dataset_name",
        )
    train = sorted(set(range(len(rows))).difference(test))
    return rows.select(train), rows.select(sorted(test))


def trained_too(train: Tokenised, held_out: Tokenised) -> list[str]:
    """A warning if rows to evaluate on are trained as well."""
    trained = set(_hashes(train.dataset))
    if count := sum(row in trained for row in _hashes(held_out.dataset)):
        return [f"{count} of {len(held_out.dataset)} rows held out are also trained, token for token"]
    return []


def _hashes(dataset: Dataset) -> Iterator[int]:
    for chunk in dataset.data.column("input_ids").chunks:
        yield from row_hashes(chunk.values.to_numpy(), chunk.offsets.to_numpy())


def filled(rows: Dataset, multiple: int) -> Dataset:
    """``rows`` and as many unscored copies of the first one as make the count a multiple of ``multiple``.

    Otherwise accelerate evens out the ranks' batches with scored rows, and the evaluation depends on the
    world's size.
    """
    import datasets

    missing = -len(rows) % multiple
    if not missing:
        return rows
    first = rows[0]
    unscored = datasets.Dataset.from_list(
        [first | {"labels": [-100] * len(first["input_ids"])}] * missing, features=rows.features
    )
    return datasets.concatenate_datasets([rows, unscored])


def pack(dataset: Dataset, max_length: int, strategy: str = "bfd", seed: int | None = 42) -> Dataset:
    """TRL's ``pack_dataset`` after its shuffle (``seed`` None: as they are). Adds the column ``seq_lengths``.

    The strategy ``bfd`` cuts rows at ``max_length``: see :func:`cut_by_packing`.
    """
    from datasets import disable_progress_bars
    from trl import pack_dataset

    disable_progress_bars()  # packing takes a moment
    rows = dataset.select_columns(["input_ids", "labels"])
    if seed is not None:
        rows = rows.shuffle(seed=seed)
    return pack_dataset(rows, max_length, strategy)


def packed_tokens(dataset: Dataset) -> dict[str, int]:
    """Tokens that packing left, and those of them that are trained."""
    import pyarrow.compute as pc

    labels = pc.list_flatten(dataset.with_format("arrow").data.column("labels"))
    return {"tokens": len(labels), "trained_tokens": pc.sum(pc.not_equal(labels, IGNORED)).as_py() or 0}


def cut_by_packing(dataset: Dataset, max_length: int, strategy: str) -> list[str]:
    """A warning if packing cuts rows: ``bfd`` drops the tokens beyond ``max_length``."""
    lengths = row_lengths(dataset)
    longer = sum(length > max_length for length in lengths)
    if strategy != "bfd" or not longer:
        return []
    return [
        f"{longer} of {len(dataset)} rows are longer than max_length {max_length} and packing cuts them "
        f"(the longest: {max(lengths)} tokens); packing_strategy bfd_split keeps the rest as rows "
        "of its own"
    ]
