"""Rows into token rows, ``input_ids`` and ``labels``, as TRL would make them, but fast and cached.

    sources = Sources.of({"dataset_name": "datasets/qa"})
    sources.check()                                            # no torch; bad data ends here
    rows = tokenised(None, sources.train, tokenizer, TokenizeOptions(max_length=1024), cache_dir=folder)
    rows.dataset, rows.stats

What a row looks like: shapes.py. Where it comes from: source.py. How it is encoded: encode.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podtune.run.counting import progress
from podtune.run.errors import DataError, UserError
from podtune.sft.data import cache
from podtune.sft.data.encode import IGNORED, Encoded, Encoder
from podtune.sft.data.known import Known, Memory
from podtune.sft.data.shapes import RowShape, detect
from podtune.sft.data.source import DataSource, load_split
from podtune.sft.data.tokenizer import (
    TokenizeOptions,
    check_tokenizer,
    tokenizer_hash,
    training_template,
    unknown_roles,
)

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_VERSION = 5  # raise it when the same input gives other tokens, counts or warnings
_BATCH_ROWS = 2000
_BATCH_BYTES = 16 * 2**20
BESIDE = ("tools", "chat_template_kwargs", "prompt", "completion", "completion_mask", "assistant_masks")


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
        if self.rows_diverged:
            warnings.append(
                f"in {self.rows_diverged} of {self.rows} rows the prompt alone is not how the whole row "
                "starts (the template, or tokens "
                "that merge over the border): the model will see another context when it answers"
            )
        return warnings


@dataclass(frozen=True)
class Tokenised:
    """Token rows, what was counted on the way, the shape of the rows they were made of (its name), what a
    person should know of them, and the cache file they are mapped from (None: in memory).
    """

    dataset: Dataset
    stats: Stats
    shape: str
    warnings: tuple[str, ...]
    path: Path | None = None
    from_cache: bool = False
    digest: str = ""  # of the file, empty without one

    def summary(self, source: DataSource) -> dict[str, Any]:
        """What was done with ``source``, JSON-ready."""
        return {
            "source": str(source),
            "path": str(self.path),
            "from_cache": self.from_cache,
            **dataclasses.asdict(self.stats),
            "warnings": list(self.warnings),
        }


def shape_of(dataset: Dataset, text_field: str = "text") -> RowShape:
    """The shape of a loaded data set, by its columns and first row.

    Raises:
        UserError: no known shape.
    """
    first = next(iter(dataset), None)
    if first is None:
        raise DataError("the data set holds no rows", fix="give a file with rows in it")
    return detect(first, "data set", text_field)


def tokenised(
    dataset: Dataset | None,
    source: DataSource,
    tokenizer: PreTrainedTokenizerBase,
    options: TokenizeOptions,
    *,
    vocabulary: int | None = None,
    cache_dir: Path | None = None,
    wait_s: float = cache.WAIT_S,
) -> Tokenised:
    """Tokenise the rows of ``source``: columns ``input_ids`` and ``labels``, the same as TRL 1.16's
    SFTTrainer makes, in the same order.

    Question and answer become prompt and completion: messages where the tokenizer has a chat template, else
    plain text with a line break between. With ``cache_dir``, the result lies there under the hash of all that
    decides it and is mapped into memory; any number of processes may call this at once, one of them does the
    work. Without, it is in memory. ``dataset`` holds the rows; None: those that lie at the source, which are
    not read if the cache knows its files. ``vocabulary`` is the number of rows of the model's embedding.

    Raises:
        UserError: a row that cannot be encoded, no trained token at all, a tokenizer that lacks what is
            needed, or a cache that cannot be written; errors about a row name where it came from.
    """
    with naming(source):
        memory = Memory(source, cache_dir if dataset is None else None)
        made = _remembered(memory, tokenizer, options, cache_dir)
        if made is None:
            rows = load_split(source) if dataset is None else dataset
            made = _made(rows, tokenizer, options, cache_dir, wait_s)
            memory.write(Known(made.stats.fingerprint, options.dataset_text_field))
        highest = made.stats.highest_id
        if vocabulary is not None and highest >= vocabulary:
            token = tokenizer.convert_ids_to_tokens(highest)
            raise DataError(
                f"token {token!r} has the id {highest}, and the model has {vocabulary} embeddings",
                where="data set",
                fix="leave that token out of the rows, or use a model whose embeddings were resized for it",
            )
    return made


def _remembered(
    memory: Memory, tokenizer: PreTrainedTokenizerBase, options: TokenizeOptions, cache_dir: Path | None
) -> Tokenised | None:
    """What the cache holds of rows that ``memory`` knows; None if it does not, or the cache does not."""
    known = memory.read()
    if known is None or cache_dir is None:
        return None
    key = cache_key(known.fingerprint, tokenizer, options)
    entry = cache.read(cache_dir, key)
    return _mapped(key, options, *entry, True) if entry else None


def _made(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: TokenizeOptions,
    cache_dir: Path | None,
    wait_s: float,
) -> Tokenised:
    """What ``rows`` become, from the cache if it has that; without one in memory."""
    import pyarrow as pa

    shape = shape_of(rows, options.dataset_text_field)
    warnings = check_tokenizer(tokenizer, options, shape) + unknown_roles(rows, tokenizer, shape)
    content = fingerprint(rows)
    key = cache_key(content, tokenizer, options)
    stats = Stats(fingerprint=content)
    encoded = _encoded(rows, Encoder(tokenizer, options, shape), stats)

    def info() -> cache.Info:
        return {
            "rows": stats.rows_kept,
            "stats": dataclasses.asdict(stats),
            "options": dataclasses.asdict(options),
            "shape": shape.name,
            "warnings": warnings,
        }

    def write(path: Path) -> cache.Info:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, _schema()) as writer:
            for batch in encoded:
                writer.write_batch(batch)
        return info()

    if cache_dir is not None:
        return _mapped(key, options, *cache.get_or_make(cache_dir, key, write, wait_s=wait_s))
    table = pa.Table.from_batches(list(encoded), _schema())
    return _described(key, options, table, info())


def _mapped(key: str, options: TokenizeOptions, path: Path, info: cache.Info, was_there: bool) -> Tokenised:
    from datasets.table import MemoryMappedTable

    table = MemoryMappedTable.from_file(str(path))
    made = _described(key, options, table, info)
    return dataclasses.replace(made, path=path, from_cache=was_there, digest=info["xxh3_128"])


def _described(key: str, options: TokenizeOptions, table: Any, info: cache.Info) -> Tokenised:
    from datasets import Dataset

    stats = Stats(**info["stats"])
    warnings = (*info["warnings"], *stats.warnings(options))
    return Tokenised(Dataset(table, fingerprint=key[:32]), stats, info["shape"], warnings)


@contextlib.contextmanager
def naming(source: DataSource) -> Iterator[None]:
    """Errors about a row of a loaded set name where the row came from, too."""
    try:
        yield
    except UserError as error:
        if error.where == "data set":
            error.where = str(source)
        elif error.where.startswith("row "):
            error.where = f"{source}, {error.where}"
        raise


def _encoded(dataset: Dataset, encode: Encoder, stats: Stats) -> Iterator[Any]:
    """Record batches of few enough rows that a batch of long ones fits in memory.

    Raises:
        UserError: a row that cannot be encoded, or none of them has a token to train.
    """
    columns = (*encode.shape.columns, *BESIDE)
    needed = [name for name in dict.fromkeys(columns) if name in dataset.column_names]
    rows = dataset.with_format(None).select_columns(needed)
    per_row = max(1, rows.data.nbytes // max(1, len(rows.data)))
    step = max(1, min(_BATCH_ROWS, _BATCH_BYTES // per_row))
    with _all_cores(), progress("tokenising", len(rows)) as advance:
        for start in range(0, len(rows), step):
            batch = encode(rows[start : start + step], start)
            stats.add(batch)
            advance(min(step, len(rows) - start))
            yield _record_batch(batch)
    if stats.rows_untrained >= stats.rows_kept:
        raise DataError(
            "there is no token to train: every row is empty, or its loss mask is",
            where="data set",
            fix="raise --max_length, or look with: podtune data inspect",
        )


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    """Let the tokenizers library use every core, which training forbids it so that it can start workers."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        os.environ[name] = before or "false"


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


def cache_key(content: str, tokenizer: PreTrainedTokenizerBase, options: TokenizeOptions) -> str:
    """The hash of all that decides the tokens of rows with the fingerprint ``content``.

    A template that writes today's date gives other tokens tomorrow. The date is left out on purpose: a run
    that is resumed after midnight goes on with the tokens it started with.
    """
    from importlib.metadata import version

    import tokenizers
    import transformers

    parts = {
        "version": _VERSION,
        "data": content,
        "tokenizer": tokenizer_hash(tokenizer),
        "template": training_template(tokenizer, options) or tokenizer.chat_template,
        "options": dataclasses.asdict(options),
        "libraries": {  # trl is not imported for that
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "trl": version("trl"),
        },
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:40]


def fingerprint(dataset: Dataset) -> str:
    """A hash of the rows: their values and column names, whatever file, format or chunks they come in.

    The order of rows counts, the order of columns does not.
    """
    if dataset._indices is None:
        return cache.fingerprint_of_tables(dataset.column_names, [dataset.data.table])
    rows, step = dataset.with_format("arrow"), 50_000
    return cache.fingerprint_of_tables(
        dataset.column_names, (rows[start : start + step] for start in range(0, len(rows), step))
    )
