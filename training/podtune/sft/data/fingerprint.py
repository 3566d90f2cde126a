"""A hash of a table's values that does not depend on its file, its chunks or the width of its offsets. No
torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any


def of_tables(names: list[str], tables: Iterable[Any]) -> str:
    """The hash of the named columns of Arrow tables, as if the tables were one. The order of columns does not
    count.
    """
    hashers: dict[str, Any] = {}
    for table in tables:
        for name in names:
            for chunk in table.column(name).chunks:
                _update(hashers, name, chunk)
    total = hashlib.sha256()
    for part in sorted(hashers):
        total.update(f"{part}={hashers[part].hexdigest()}\n".encode())
    return total.hexdigest()


def _update(hashers: dict[str, Any], part: str, array: Any) -> None:
    """Feed one array to the hashers of its parts: validity, lengths, values, and so on downwards.

    Each part has a hasher of its own, so that where one chunk ends and the next begins leaves no trace.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _update(hashers, part, array.storage)
    if pa.types.is_dictionary(kind):
        return _update(hashers, part, array.dictionary_decode())
    _feed(hashers, f"{part} valid", array.is_valid().cast(pa.uint8()))
    if pa.types.is_struct(kind):
        for field, child in zip(kind, array.flatten(), strict=True):
            _update(hashers, f"{part}.{field.name}", child)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        _feed(hashers, f"{part} length", pc.list_value_length(array).cast(pa.int64()))
        _update(hashers, f"{part}[]", array.flatten())
    elif (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    ):
        binary = (array.fill_null(b"" if "binary" in str(kind) else "") if array.null_count else array).cast(
            pa.large_binary()
        )
        _feed(hashers, f"{part} length", pc.binary_length(binary))
        _feed(hashers, f"{part} value", _content(binary))
    elif pa.types.is_integer(kind):
        _feed(hashers, f"{part} value", array.cast(pa.int64()))
    elif pa.types.is_floating(kind):
        _feed(hashers, f"{part} value", array.cast(pa.float64()))
    else:
        for value in array.to_pylist():
            _hasher(hashers, f"{part} value").update(repr(value).encode() + b"\0")
    return None


def _hasher(hashers: dict[str, Any], part: str) -> Any:
    return hashers.setdefault(part, hashlib.sha256())


def _feed(hashers: dict[str, Any], part: str, values: Any) -> None:
    numbers = values if isinstance(values, memoryview) else memoryview(values.fill_null(0).to_numpy())
    _hasher(hashers, part).update(numbers)


def _content(binary: Any) -> memoryview:
    """The bytes of a large_binary array without nulls, as one piece."""
    import numpy as np

    _, offsets, data = binary.buffers()
    if data is None or not len(binary):
        return memoryview(b"")
    ends = np.frombuffer(offsets, dtype=np.int64, count=len(binary) + 1, offset=8 * binary.offset)
    return memoryview(data)[int(ends[0]) : int(ends[-1])]
