"""The token rows of a run: training and evaluation set loaded, tokenised, packed, the same on every rank."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from podtune.run.errors import ConfigError, UsageError
from podtune.sft.data.batching import row_lengths
from podtune.sft.data.load import load_split, shape_of
from podtune.sft.data.source import Sources
from podtune.sft.data.stats import row_hashes
from podtune.sft.data.stream import TokenStream
from podtune.sft.data.token_batch import IGNORED
from podtune.sft.data.tokenise import Tokenised, tokenised
from podtune.sft.data.tokenizer import TokenizeOptions, tokenizer_hash

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase
    from trl import SFTConfig


@dataclass(frozen=True)
class DatasetInfo:
    """The data of a run for its record: the fields are the keys of ``data`` in run.json."""

    path: str | list[str]
    tokenizer: str  # hash of its vocabulary, rules, special tokens and chat template
    streamed: bool | None = None
    chat_template: bool | None = None  # False of bare text
    rows: int | None = None  # before packing; tokens are counted after it
    fingerprint: str = ""  # of the training rows, or of a stream's files
    tokens: int | None = None
    trained_tokens: int | None = None
    truncated_rows: int | None = None
    tokens_xxh3_128: str | None = None  # of the token ids as they lie in the cache
    eval_rows: int | None = None
    eval_fingerprint: str | None = None
    eval_tokens: int | None = None

    def to_json(self) -> dict[str, str | int | list[str]]:
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class TokenRows:
    """Token rows (``input_ids``, ``labels``) to train and evaluate on, and the raw evaluation rows.

    Several sets to evaluate on are tokenised by name; the raw rows are those of the first.
    """

    train: Dataset | TokenStream
    eval: Dataset | dict[str, Dataset] | None
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


def packing_strategies(training: SFTConfig) -> tuple[str | None, str | None]:
    """The packing strategy of the training and of the evaluation set; None leaves their rows as they are."""
    prepared = (training.dataset_kwargs or {}).get("skip_prepare_dataset")  # neither cut nor packed
    eval_packs = training.packing if training.eval_packing is None else training.eval_packing
    strategy = None if prepared else training.packing_strategy
    return strategy if training.packing else None, strategy if eval_packs else None


class EvaluationRows(Protocol):
    """The run's arguments about rows to evaluate on, beside those of ``SFTConfig``."""

    eval_split_size: float | None
    max_eval_rows: int | None
    answer_rows: int


def token_rows(
    sources: Sources,
    tokenizer: PreTrainedTokenizerBase,
    training: SFTConfig,
    run: EvaluationRows,
    *,
    vocabulary: int,
) -> TokenRows:
    """Load, tokenise and (if asked) pack; the result is the same on every rank.

    ``vocabulary`` is the number of rows of the model's embedding. The first rank to come fills the cache.

    Raises:
        UserError: no row would be trained, or evaluation is asked for and there is nothing to evaluate on.
    """
    raw, raw_evals = _raw(sources, training, run)
    packing, eval_packing = packing_strategies(training)
    options, eval_options = (
        TokenizeOptions.of(functools.partial(getattr, training), packed=bool(packs))
        for packs in (packing, eval_packing)
    )
    seed = training.seed if training.shuffle_dataset else None
    name = sources.train.name or [str(entry["path"]) for entry in sources.train.mixture]
    info: dict[str, Any] = {"path": name, "tokenizer": tokenizer_hash(tokenizer)[:12]}
    common: dict[str, Any] = {"vocabulary": vocabulary, "cache_dir": sources.cache_dir}
    rows: Dataset | TokenStream
    if sources.streaming:
        made = None
        rows = TokenStream(sources.train, tokenizer, options, vocabulary=vocabulary, seed=seed)
        warnings = list(rows.warnings)
        info |= {"streamed": True, "fingerprint": rows.fingerprint, "chat_template": rows.templated}
    else:
        made = tokenised(sources.train, tokenizer, options, rows=raw, **common)
        rows, stats, warnings = made.dataset, made.stats, list(made.warnings)
        info |= {"rows": len(rows), "fingerprint": stats.fingerprint, "truncated_rows": stats.rows_truncated}
        info |= {"tokens_xxh3_128": made.digest or None, "chat_template": made.templated}
        info |= {"tokens": stats.tokens, "trained_tokens": stats.trained_tokens}
        if packing:
            warnings += cut_by_packing(rows, training.max_length, packing)
            rows = pack(rows, training.max_length, packing, seed)
            info |= packed_tokens(rows)  # bfd cuts long rows
        if seed is not None:
            rows = rows.shuffle(seed=seed)
    if sources.train.path is not None and sources.train.config:
        warnings.append("dataset_config has no effect: the rows are local files")
    evaluations: dict[str, Dataset] = {}
    for key, raw_eval in raw_evals.items():
        held_out = sources.evaluations.get(key, sources.train)
        scored = tokenised(held_out, tokenizer, eval_options, rows=raw_eval, **common)
        warnings += trained_too(made, scored) if made else []
        evaluation, stats = scored.dataset, scored.stats
        info["eval_rows"] = info.get("eval_rows", 0) + len(evaluation)
        info["eval_tokens"] = info.get("eval_tokens", 0) + stats.tokens
        info["eval_fingerprint"] = f"{info.get('eval_fingerprint', '')} {stats.fingerprint}".lstrip()
        if eval_packing:
            evaluation = pack(evaluation, training.max_length, eval_packing, None)
        # whole batches on all ranks
        evaluations[key] = filled(evaluation, training.per_device_eval_batch_size * training.world_size)
    raw_eval, scored_rows = next(iter(raw_evals.values()), None), evaluations.get("", evaluations) or None
    return TokenRows(rows, scored_rows, raw_eval, DatasetInfo(**info), tuple(warnings))


def _raw(
    sources: Sources, training: SFTConfig, run: EvaluationRows
) -> tuple[Dataset | None, dict[str, Dataset]]:
    """Training rows if a part of them is held out, else None, and evaluation rows by the set's name."""
    raw, evals = None, {key: load_split(held_out) for key, held_out in sources.evaluations.items()}
    if not sources.streaming and not evals and (size := run.eval_split_size):
        raw, evals[""] = split_off(load_split(sources.train), size, training.seed, sources.train.text_field)
    evaluates = training.eval_strategy != "no"
    if not evals and (evaluates or run.answer_rows):
        raise UsageError(
            "evaluation is asked for and there is no eval split",
            where="eval_strategy" if evaluates else "answer_rows",
            fix="--eval_dataset_name FILE, or --eval_split_size 0.05 to hold rows out",
        )
    if most := run.max_eval_rows:
        evals = {key: rows.select(range(min(most, len(rows)))) for key, rows in evals.items()}
    return raw, evals


def split_off(rows: Dataset, size: float, seed: int, text_field: str = "text") -> tuple[Dataset, Dataset]:
    """Split ``rows`` in train and test, with a share or number of rows in the latter, both in their order.

    Which they are is decided by a hash of the question, so that rows which ask the same are on one side.
    Raises :class:`UserError` if one of the two would be empty.
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
    """Add as many unscored copies of the first row as make the count a multiple of ``multiple``."""
    import datasets

    # accelerate would even out the ranks' batches with scored rows, more or fewer by the world's size
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
