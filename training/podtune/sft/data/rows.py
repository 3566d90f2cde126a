"""The one place where rows become training data: ``input_ids`` and ``labels``, as TRL would make them, but
fast and cached.

    source = Source("datasets/qa")
    check_source(source)                                       # no torch; bad data ends here
    prepared = prepare(load_split(source), tokenizer, TokenizeOptions(max_length=1024), cache_dir=folder)
    prepared.dataset, prepared.stats

What a row looks like: training/podtune/sft/data/shapes.py. Where it comes from: source.py. How it is encoded:
encode.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podtune.run.errors import CONFIG, DATA, UserError
from podtune.sft.data import cache
from podtune.sft.data.encode import IGNORED, Encoded, Encoder
from podtune.sft.data.shapes import Shape, detect
from podtune.sft.data.source import Source, check_source, find_eval_split, load_split, sources
from podtune.sft.data.tokenizer import TokenizeOptions, check_tokenizer, training_template, unknown_roles

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "IGNORED",
    "Prepared",
    "Source",
    "Stats",
    "TokenizeOptions",
    "check_source",
    "check_tokenizer",
    "cut_by_packing",
    "find_eval_split",
    "fingerprint",
    "load_split",
    "naming",
    "pack",
    "packed_tokens",
    "prepare",
    "shape_of",
    "sources",
    "tokenize",
    "unknown_roles",
]

_VERSION = 2  # raise it when the same input gives other tokens or counts
_BATCH_ROWS = 2000
_BATCH_BYTES = 16 * 2**20
_BESIDE = ("tools", "chat_template_kwargs", "prompt", "completion", "completion_mask", "assistant_masks")


@dataclass
class Stats:
    """What tokenising did. Rows and tokens are of the whole set.

    Attributes:
        rows: rows that came in.
        rows_kept: rows that came out; the rest were left without a trained token by the cut to
        ``max_length``.
        rows_untrained: rows kept although nothing is learnt from them: no token after the first is trained.
        rows_truncated: rows longer than ``max_length``.
        tokens: tokens of the rows kept.
        trained_tokens: those with a label.
        cut_tokens: tokens cut off.
        longest: tokens of the longest row, before the cut.
        highest_id: the largest token id.
        rows_diverged: rows whose rendered prompt is not how the rendered row starts; training then sees
            another context than generation will.
        fingerprint: of the rows that came in, see :func:`fingerprint`.
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
    fingerprint: str = ""

    @property
    def rows_dropped(self) -> int:
        """Rows without a trained token after the cut."""
        return self.rows - self.rows_kept

    def add(self, batch: Encoded) -> None:
        """Count one batch."""
        import numpy as np

        trained = batch.labels != IGNORED
        ends = np.concatenate(([0], np.cumsum(trained)))
        scored = trained.copy()
        # nothing comes before the first token to foretell it from
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

    def warnings(self, options: TokenizeOptions) -> list[str]:
        """What a person should know before training on this."""
        found = []
        if self.rows_truncated:
            end = "end" if options.truncation_mode == "keep_start" else "start"
            found.append(
                f"{self.rows_truncated} of {self.rows} rows are longer than max_length {options.max_length} "
                f"(the longest: {self.longest} tokens): their {end} is cut off, {self.cut_tokens} tokens"
            )
        if self.rows_dropped:
            found.append(
                f"{self.rows_dropped} of {self.rows} rows are left out: the cut to max_length "
                "leaves nothing to train in them"
            )
        if self.rows_untrained:
            found.append(
                f"{self.rows_untrained} of {self.rows} rows have nothing to train: they are empty, "
                "or their loss mask is"
            )
        if self.rows_diverged:
            found.append(
                f"in {self.rows_diverged} of {self.rows} rows the prompt alone is not how the whole row "
                "starts (the template, or tokens "
                "that merge over the border): the model will see another context when it answers"
            )
        return found


@dataclass(frozen=True)
class Prepared:
    """Tokenised rows, what was counted on the way, and the cache file they are mapped from (None: in
    memory).
    """

    dataset: Dataset
    stats: Stats
    path: Path | None = None
    from_cache: bool = False


def shape_of(dataset: Dataset | IterableDataset, text_field: str = "text") -> Shape:
    """The shape of a loaded data set, by its columns and first row.

    Raises:
        UserError: no known shape.
    """
    first = next(iter(dataset), None)
    if first is None:
        raise UserError("the data set holds no rows", fix="give a file with rows in it", code=DATA)
    return detect(first, "data set", text_field)


def tokenize(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    options: TokenizeOptions,
    *,
    cache_dir: Path | None = None,
) -> Any:
    """``dataset`` as ``input_ids`` and ``labels``; an IterableDataset stays one. See :func:`prepare`."""
    from datasets import IterableDataset

    if not isinstance(dataset, IterableDataset):
        return prepare(dataset, tokenizer, options, cache_dir=cache_dir).dataset
    shape = shape_of(dataset, options.dataset_text_field)
    check_tokenizer(tokenizer, None, options, shape)
    encode = Encoder(tokenizer, options, shape)

    def batch(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        encoded = _record_batch(encode(columns))
        return {name: encoded.column(name).to_pylist() for name in ("input_ids", "labels")}

    names = dataset.column_names or list(next(iter(dataset)))
    return dataset.map(batch, batched=True, batch_size=256, remove_columns=names)


def prepare(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: TokenizeOptions,
    *,
    cache_dir: Path | None = None,
    wait_s: float = cache.WAIT_S,
) -> Prepared:
    """Tokenise ``dataset``: columns ``input_ids`` and ``labels``, the same as TRL 1.16's SFTTrainer makes, in
    the same order.

    Question and answer become prompt and completion: messages where the tokenizer has a chat template, else
    plain text with a line break between. With ``cache_dir``, the result lies there under the hash of all that
    decides it and is mapped into memory; any number of processes may call this at once, one of them does the
    work. Without, it is in memory.

    Raises:
        UserError: a row that cannot be encoded, no trained token at all, a tokenizer that lacks what is
            needed, or a cache that cannot be written.
    """
    shape = shape_of(dataset, options.dataset_text_field)
    check_tokenizer(tokenizer, None, options, shape)
    content = fingerprint(dataset)
    if cache_dir is None:
        return _in_memory(dataset, tokenizer, options, shape, content)
    from datasets.table import MemoryMappedTable

    def make(path: Path) -> cache.Info:
        stats = _write(path, dataset, tokenizer, options, shape)
        return {
            "rows": stats.rows_kept,
            "stats": dataclasses.asdict(stats) | {"fingerprint": content},
            "options": dataclasses.asdict(options),
        }

    key = cache_key(content, tokenizer, options)
    path, info, was_there = cache.get_or_make(cache_dir, key, make, wait_s=wait_s)
    table = MemoryMappedTable.from_file(str(path))
    return Prepared(_dataset(table, key), _trainable(Stats(**info["stats"])), path, was_there)


def _in_memory(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, options: TokenizeOptions, shape: Shape, content: str
) -> Prepared:
    import pyarrow as pa

    stats = Stats(fingerprint=content)
    batches = list(_encoded(dataset, tokenizer, options, shape, stats))
    return Prepared(
        _dataset(pa.Table.from_batches(batches, _schema()), cache_key(content, tokenizer, options)),
        _trainable(stats),
    )


@contextlib.contextmanager
def naming(source: Source) -> Iterator[None]:
    """Errors about a row of a loaded set name where the row came from, too."""
    try:
        yield
    except UserError as error:
        if error.where == "data set":
            error.where = str(source)
        elif error.where.startswith("row "):
            error.where = f"{source}, {error.where}"
        raise


def _trainable(stats: Stats) -> Stats:
    if stats.rows_untrained >= stats.rows_kept:
        raise UserError(
            "there is no token to train: every row is empty, or its loss mask is",
            where="data set",
            fix="raise --max_length, or look with: podtune data inspect",
            code=DATA,
        )
    return stats


def _write(
    path: Path, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, options: TokenizeOptions, shape: Shape
) -> Stats:
    import pyarrow as pa

    stats = Stats()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, _schema()) as writer:
        for batch in _encoded(dataset, tokenizer, options, shape, stats):
            writer.write_batch(batch)
    return _trainable(stats)


def _encoded(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, options: TokenizeOptions, shape: Shape, stats: Stats
) -> Iterator[Any]:
    """Record batches of few enough rows that a batch of long ones fits in memory."""
    encode = Encoder(tokenizer, options, shape)
    needed = [name for name in dict.fromkeys((*shape.columns, *_BESIDE)) if name in dataset.column_names]
    rows = dataset.with_format(None).select_columns(needed)
    per_row = max(1, rows.data.nbytes // max(1, len(rows.data)))
    step = max(1, min(_BATCH_ROWS, _BATCH_BYTES // per_row))
    for start in range(0, len(rows), step):
        batch = encode(rows[start : start + step], start)
        stats.add(batch)
        yield _record_batch(batch)


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32()))])


def _record_batch(batch: Encoded) -> Any:
    import pyarrow as pa

    lists = [
        pa.ListArray.from_arrays(pa.array(batch.offsets), pa.array(flat))
        for flat in (batch.ids, batch.labels)
    ]
    return pa.RecordBatch.from_arrays(lists, schema=_schema())


def _dataset(table: Any, key: str) -> Dataset:
    from datasets import Dataset

    return Dataset(table, fingerprint=key[:32])


def cache_key(content: str, tokenizer: PreTrainedTokenizerBase, options: TokenizeOptions) -> str:
    """The hash of all that decides the tokens of rows with the fingerprint ``content``.

    A template that writes today's date gives other tokens tomorrow. The date is left out on purpose: a run
    that is resumed after midnight goes on with the tokens it started with.
    """
    from importlib.metadata import version

    parts = {
        "version": _VERSION,
        "data": content,
        "tokenizer": tokenizer_hash(tokenizer),
        "template": training_template(tokenizer, options) or tokenizer.chat_template,
        "options": dataclasses.asdict(options),
        "libraries": {name: version(name) for name in ("transformers", "tokenizers", "trl")},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:40]


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """The hash of a tokenizer's vocabulary, rules and special tokens."""
    rules = (
        tokenizer.backend_tokenizer.to_str()
        if tokenizer.is_fast
        else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    )
    kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    return hashlib.sha256(
        "\0".join((rules, kind, special, str(tokenizer.chat_template))).encode()
    ).hexdigest()


def fingerprint(dataset: Dataset) -> str:
    """A hash of the rows: their values and column names, whatever file, format or chunks they come in.

    The order of rows counts, the order of columns does not.
    """
    from podtune.sft.data.fingerprint import of_tables

    if dataset._indices is None:
        return of_tables(dataset.column_names, [dataset.data.table])
    rows, step = dataset.with_format("arrow"), 50_000
    return of_tables(
        dataset.column_names, (rows[start : start + step] for start in range(0, len(rows), step))
    )


def pack(dataset: Dataset, max_length: int, strategy: str = "bfd", seed: int | None = 42) -> Dataset:
    """TRL's ``pack_dataset`` after its shuffle (``seed`` None: as they are). Adds the column ``seq_lengths``.

    The strategy ``bfd`` cuts rows at ``max_length``: see :func:`cut_by_packing`.

    Raises:
        UserError: unknown strategy.
    """
    from trl import pack_dataset

    if strategy not in ("bfd", "bfd_split", "wrapped"):
        raise UserError(
            (f"packing_strategy is {strategy!r}"), fix="one of bfd, bfd_split, wrapped", code=CONFIG
        )
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
    """A warning if packing will cut rows: ``bfd`` throws away what is beyond ``max_length``, the others carry
    it over.
    """
    import pyarrow.compute as pc

    rows = dataset.with_format("arrow")
    lengths = pc.list_value_length(
        rows.data.column("input_ids") if rows._indices is None else rows[:]["input_ids"]
    )
    longer = pc.sum(pc.greater(lengths, max_length)).as_py() or 0
    if strategy != "bfd" or not longer:
        return []
    return [
        f"{longer} of {len(dataset)} rows are longer than max_length {max_length} and packing cuts them "
        f"(the longest: {pc.max(lengths).as_py()} tokens); packing_strategy bfd_split keeps the rest as rows "
        "of its own"
    ]
