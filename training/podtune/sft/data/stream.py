"""Token rows that are read and tokenised while they are trained, for a set that is larger than the disk.

Nothing is counted or cached, so there are no epochs: when the source ends it begins again. A row's position
is its number among all rows read so far, of all passes; a checkpoint keeps the position after its last row,
and a resumed run begins there instead of training on rows twice or reading them as token rows again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from podtune.run.errors import DataError, PeerLost, first_line
from podtune.sft.data import files
from podtune.sft.data.batching import ROW
from podtune.sft.data.encode import Encoder
from podtune.sft.data.readers import rows_at
from podtune.sft.data.shapes import Row, detect, no_rows
from podtune.sft.data.source import DataSource, renamed
from podtune.sft.data.token_batch import TokenBatch
from podtune.sft.data.tokenise import check_ids, naming
from podtune.sft.data.tokenizer import TokenizeOptions
from podtune.sft.source import hub

if TYPE_CHECKING:
    from datasets import IterableDataset
    from transformers import PreTrainedTokenizerBase

BUFFER = 1000  # rows that are shuffled among each other: the datasets library's own choice
_CHUNK = 64  # rows tokenised at once


class TokenStream:
    """The rows of ``source`` as TRL's SFTTrainer tokenises them, in their order or shuffled by ``seed``.

    Shuffled within :data:`BUFFER` rows. Every rank reads all rows and trains its share. ``vocabulary`` is the
    number of rows of the model's embedding. Raises :class:`UserError` as :class:`Encoder` does.
    """

    def __init__(
        self,
        source: DataSource,
        tokenizer: PreTrainedTokenizerBase,
        options: TokenizeOptions,
        *,
        vocabulary: int,
        seed: int | None = None,
    ) -> None:
        self.source, self.vocabulary, self.seed = source, vocabulary, seed
        with naming(source):
            first = next(_answered(untokenised(source), source), None)
            if first is None:
                raise no_rows(str(source))
            self.shape = detect(first, "data set", options.dataset_text_field)
            self._encode = Encoder(tokenizer, options, self.shape)
            self.warnings = self._encode.warnings
            if seed is None:
                self.warnings.append(
                    "the stream's rows are trained in their order; shuffle_dataset shuffles them within "
                    f"{BUFFER:,} rows"
                )
            self.templated = self._encode.templated

    @property
    def fingerprint(self) -> str:
        """A hash of where the rows come from: they themselves are not read before they are trained."""
        path = self.source.path
        parts = (
            [self.source.name, self.source.config]
            if path is None
            else [[file.name, file.stat().st_size] for file in files.find(path).files(self.source.split)]
        )
        named = json.dumps([parts, self.source.split, self.seed])
        return hashlib.sha256(named.encode()).hexdigest()

    def dataset(self, position: int = 0) -> IterableDataset:
        """Endless rows ``input_ids``, ``labels`` and their position, from the row at ``position`` on."""
        from datasets import IterableDataset

        return IterableDataset.from_generator(self._token_rows, gen_kwargs={"position": position})

    def _token_rows(self, position: int) -> Iterator[dict[str, Any]]:
        barren = False  # True while this pass has given no row
        for first, begins, rows in self._chunks(position):
            if begins and barren:
                raise DataError(
                    "there is no token to train: every row is empty, or its loss mask is",
                    where=str(self.source),
                    fix="raise --max_length, or look with: podtune data inspect",
                )
            barren = barren or begins
            batch = self._encoded(rows, first)
            for number, kept in enumerate(batch.kept):
                barren = False
                its = slice(batch.offsets[number], batch.offsets[number + 1])
                yield {
                    "input_ids": batch.ids[its].tolist(),
                    "labels": batch.labels[its].tolist(),
                    ROW: first + int(kept),
                }

    def _encoded(self, rows: list[Row], first: int) -> TokenBatch:
        names = [name for name in self.shape.read if any(name in row for row in rows)]
        with naming(self.source):
            batch = self._encode([{name: row.get(name) for name in names} for row in rows], first)
        check_ids(int(batch.ids.max(initial=-1)), self.vocabulary, self.source)
        return batch

    def _chunks(self, position: int) -> Iterator[tuple[int, bool, list[Row]]]:
        """Rows from ``position`` on: position of the first, True if a pass begins there, the rows."""
        at = 0
        for passes in itertools.count():
            rows = untokenised(self.source)
            if self.seed is not None:
                rows = rows.shuffle(seed=self.seed + passes, buffer_size=BUFFER)
            began, chunk = at, list[Row]()
            for row in _answered(rows, self.source):
                at += 1
                if at > position:
                    chunk.append(row)
                if len(chunk) == _CHUNK:
                    yield at - _CHUNK, at - _CHUNK == began, chunk
                    chunk = []
            if chunk:
                yield at - len(chunk), at - len(chunk) == began, chunk
            if at == began:
                raise no_rows(str(self.source))


def untokenised(source: DataSource) -> IterableDataset:
    """The rows of ``source`` as they are, one after the other."""
    from datasets import IterableDataset

    if source.path is None:
        return hub.load(source.name or "", source.config, source.split, streaming=True)
    return IterableDataset.from_generator(rows_at, gen_kwargs={"path": source.path, "split": source.split})


def _answered(rows: Iterable[Row], source: DataSource) -> Iterator[Row]:
    """``rows`` renamed; a hub that stops answering is :class:`PeerLost`, a reason to start again."""
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # whatever client it uses

    try:
        renames: dict[str, str] | None = None
        for row in rows:
            renames = source.renames(row) if renames is None else renames
            yield renamed(row, renames)
    except (OSError, httpx.HTTPError) as error:
        if source.path is not None:
            raise
        what = f"{source}: the hub stopped answering while its rows were read: {first_line(error)}"
        raise PeerLost(what) from error
