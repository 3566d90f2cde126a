"""Rows into token rows, ``input_ids`` and ``labels``, as TRL makes them, but fast and cached."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from datasets import Dataset
from datasets.table import InMemoryTable, MemoryMappedTable

from podtune.run.errors import DataError, UserError
from podtune.run.progress import progress
from podtune.sft.data import cache
from podtune.sft.data.encode import Encoder
from podtune.sft.data.load import load_split, shape_of
from podtune.sft.data.source import DataSource
from podtune.sft.data.stats import Stats
from podtune.sft.data.tokenizer import TokenizeOptions, tokenizer_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VERSION = 7  # raise it when the same input gives other tokens, counts or warnings
_BATCH_ROWS = 2000
_BATCH_BYTES = 16 * 2**20
SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32()))])


@dataclass(frozen=True)
class Tokenised:
    """Token rows, ``input_ids`` and ``labels``, with what was counted while they were made."""

    dataset: Dataset
    stats: Stats
    shape: str  # the name of that of the rows that they were made of
    warnings: tuple[str, ...]
    path: Path | None = None  # of the cache file that they are mapped from; None: they are in memory
    from_cache: bool = False  # the file was there already
    digest: str = ""  # XXH3 of the file
    templated: bool | None = None  # a chat template rendered the rows


def tokenised(
    source: DataSource,
    tokenizer: PreTrainedTokenizerBase,
    options: TokenizeOptions,
    *,
    rows: Dataset | None = None,
    vocabulary: int | None = None,
    cache_dir: Path | None = None,
) -> Tokenised:
    """Tokenise rows to columns ``input_ids`` and ``labels``, equal to those of TRL 1.16's SFTTrainer.

    Question and answer become prompt and completion: messages where the tokenizer has a chat template, else
    plain text with a line break between. With ``cache_dir`` the result lies there and is mapped into memory;
    any number of processes may call this at once, one of them does the work.

    ``rows`` None: all at ``source``, which are not read if the cache knows its files. ``vocabulary`` is the
    number of rows of the model's embedding; None if it is not known.

    Raises:
        UserError: a row that cannot be encoded, no trained token at all, a tokenizer that lacks what is
            needed, or a cache that cannot be written; errors about a row name where it came from.
    """
    content = source.stamps() if rows is None else rows._fingerprint
    if content is None:  # the hub's, or a mixture
        rows = load_split(source)
        content = rows._fingerprint
    key = cache_key(content, tokenizer, options)

    def make(sink: Path | pa.BufferOutputStream) -> cache.Info:
        """Write all token rows; return the content of the entry's info file."""
        file = str(sink) if isinstance(sink, Path) else sink
        with pa.ipc.new_stream(file, SCHEMA) as writer, naming(source, whole=rows is None):
            raw = load_split(source) if rows is None else rows
            encoder = Encoder(tokenizer, options, shape_of(raw, options.dataset_text_field))
            stats = _encoded(raw, encoder, writer.write_batch)
        return {
            "stats": dataclasses.asdict(stats),
            "shape": encoder.shape.name,
            "templated": encoder.templated,
            "warnings": encoder.warnings + stats.warnings(options),
        }

    if cache_dir is None:
        memory = pa.BufferOutputStream()
        info, path, was_there = make(memory), None, False
        table = InMemoryTable(pa.ipc.open_stream(memory.getvalue()).read_all())
    else:
        path, info, was_there = cache.get_or_make(cache_dir, key, make)
        table = MemoryMappedTable.from_file(str(path))
    stats = Stats(**info["stats"])
    check_ids(stats.highest_id, vocabulary, source)
    # the library caches what it derives (shuffled, packed) beside the file, under names made of the key
    dataset, digest = Dataset(table, fingerprint=key[:32]), info.get("xxh3_128", "")
    warnings = tuple(info["warnings"])
    return Tokenised(dataset, stats, info["shape"], warnings, path, was_there, digest, info["templated"])


def check_ids(highest: int, vocabulary: int | None, source: DataSource) -> None:
    """Refuse a token beyond the ``vocabulary`` rows of the model's embedding. Raises :class:`DataError`."""
    if vocabulary is not None and highest >= vocabulary:
        raise DataError(
            f"a token has the id {highest}, and the model has {vocabulary} embeddings",
            where=str(source),
            fix="leave that token out of the rows, or use a model whose embeddings were resized for it",
        )


@contextlib.contextmanager
def naming(source: DataSource, *, whole: bool = False) -> Iterator[None]:
    """Errors about a row of a loaded set name where the row came from; of a ``whole`` set file and line."""
    try:
        yield
    except UserError as error:
        if error.where == "data set":
            error.where = str(source)
        elif error.where.startswith("row "):
            number = int(error.where.removeprefix("row "))
            error.where = source.places([number])[0] if whole else f"{source}, {error.where}"
        raise


def _encoded(dataset: Dataset, encode: Encoder, write: Callable[[pa.RecordBatch], object]) -> Stats:
    """Write record batches of few enough rows that a batch of long ones fits in memory, and count them."""
    needed = [name for name in encode.shape.read if name in dataset.column_names]
    rows = dataset.with_format(None).select_columns(needed)
    per_row = max(1, rows.data.nbytes // max(1, len(rows.data)))
    step = max(1, min(_BATCH_ROWS, _BATCH_BYTES // per_row))
    stats, content = Stats(), hashlib.sha256(repr(needed).encode())
    advance = progress("tokenising", len(rows))
    with _all_cores():
        for start in range(0, len(rows), step):
            columns = rows[start : start + step]
            raw = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
            content.update("".join(map(repr, raw)).encode(errors="surrogatepass"))
            batch = encode(raw, start)
            stats.add(batch, encode.options.max_length)
            advance(len(raw))
            offsets = pa.array(batch.offsets)
            lists = [pa.ListArray.from_arrays(offsets, pa.array(flat)) for flat in (batch.ids, batch.labels)]
            write(pa.RecordBatch.from_arrays(lists, schema=SCHEMA))
    stats.fingerprint = content.hexdigest()
    if stats.rows_untrained >= stats.rows_kept:
        raise DataError(
            "there is no token to train: every row is empty, or its loss mask is",
            where="data set",
            fix="raise --max_length, or look with: podtune data inspect",
        )
    return stats


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    """Let the tokenizers library use every core, which training forbids so that it can start workers."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        os.environ[name] = before or "false"


def cache_key(content: str, tokenizer: PreTrainedTokenizerBase, options: TokenizeOptions) -> str:
    """Hash all that decides the tokens of the rows that ``content`` identifies."""
    # but for the date, which some templates write: a run resumed after midnight keeps its tokens
    from importlib.metadata import version

    import tokenizers
    import transformers

    parts = {
        "version": _VERSION,
        "data": content,
        "tokenizer": tokenizer_hash(tokenizer),
        "options": dataclasses.asdict(options),
        "libraries": {  # trl is not imported for that
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "trl": version("trl"),
        },
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:40]
