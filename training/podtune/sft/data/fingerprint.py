"""The hash of a data set's rows: their values and column names, in any file, format or chunks."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from datasets import Dataset

_STEP_ROWS = 50_000


def fingerprint(dataset: Dataset) -> str:
    """Hash the rows. The order of rows counts, the order of columns does not."""
    tables: Iterable[pa.Table] = [dataset.data.table]
    if dataset._indices is not None:  # selected or shuffled: the table holds other rows, or another order
        rows = dataset.with_format("arrow")
        tables = (rows[start : start + _STEP_ROWS] for start in range(0, len(rows), _STEP_ROWS))
    hashes = _PartHashes()
    for table in tables:
        for name in dataset.column_names:
            for chunk in table.column(name).chunks:
                hashes.update(name, chunk)
    return hashes.hexdigest()


class _PartHashes:
    """A hash for each part of each column: validity, lengths, values, and so on downwards.

    Each part has a hasher of its own, so that where one chunk ends and the next begins leaves no trace.
    """

    def __init__(self) -> None:
        self._hashers: defaultdict[str, Any] = defaultdict(hashlib.sha256)

    def hexdigest(self) -> str:
        total = hashlib.sha256()
        for part in sorted(self._hashers):
            total.update(f"{part}={self._hashers[part].hexdigest()}\n".encode())
        return total.hexdigest()

    def update(self, part: str, array: pa.Array) -> None:
        kind, types = array.type, pa.types
        if isinstance(kind, pa.BaseExtensionType):
            return self.update(part, array.storage)
        if types.is_dictionary(kind):
            return self.update(part, array.dictionary_decode())
        self._numbers(f"{part} valid", array.is_valid().cast(pa.uint8()))
        if types.is_struct(kind):
            for field, child in zip(kind, array.flatten(), strict=True):
                self.update(f"{part}.{field.name}", child)
        elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            self._numbers(f"{part} length", pc.list_value_length(array).cast(pa.int64()))
            self.update(f"{part}[]", array.flatten())
        elif any(is_kind(kind) for is_kind in (types.is_string, types.is_large_string)):
            self._bytes(part, array.fill_null("").cast(pa.large_binary()))
        elif any(is_kind(kind) for is_kind in (types.is_binary, types.is_large_binary)):
            self._bytes(part, array.fill_null(b"").cast(pa.large_binary()))
        elif types.is_integer(kind):
            self._numbers(f"{part} value", array.cast(pa.int64()))
        elif types.is_floating(kind):
            self._numbers(f"{part} value", array.cast(pa.float64()))
        else:
            for value in array.to_pylist():
                self._hashers[f"{part} value"].update(repr(value).encode() + b"\0")
        return None

    def _numbers(self, part: str, values: pa.Array) -> None:
        self._hashers[part].update(memoryview(values.fill_null(0).to_numpy()))

    def _bytes(self, part: str, binary: pa.Array) -> None:
        """Hash the lengths and the bytes of a large_binary array without nulls."""
        self._numbers(f"{part} length", pc.binary_length(binary))
        _, offsets, data = binary.buffers()
        content = memoryview(b"")
        if data is not None and len(binary):
            ends = np.frombuffer(offsets, dtype=np.int64, count=len(binary) + 1, offset=8 * binary.offset)
            content = memoryview(data)[int(ends[0]) : int(ends[-1])]
        self._hashers[f"{part} value"].update(content)
