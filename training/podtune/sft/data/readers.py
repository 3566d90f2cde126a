"""The rows of data files as they are written, each with its position. pyarrow alone, no torch, no datasets.

JSON and CSV are read by Python's own modules. Arrow's and pandas' readers guess types (a date from text, a
missing value from "None", 1.0 from a 1 beside 1.5), and a chat template writes all of that into the prompt.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podtune.run.errors import DataError, NotFound
from podtune.sft.data.files import Format, find
from podtune.sft.data.shapes import NotText

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNAR = ("parquet", "arrow")
_BATCH_ROWS = 4096

Row = dict[str, Any]


def rows_at(path: Path, split: str = "train") -> Iterator[Row]:
    """The rows of a data file or of one split of a folder, one after the other.

    Raises:
        UserError: missing, of an unknown kind, or unreadable, by row.
    """
    folder = find(path)
    for file in folder.files(split):
        yield from (row for _, row in rows(file, folder.format))


def rows(
    path: Path, form: Format, columns: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Row]]:
    """The rows of one file and their positions, "line 7" or "row 7", counted from 1.

    A CSV row's line is the one where it ends. In Parquet and Arrow the cells of columns whose names are not
    among ``columns`` are None: they need not be readable.

    Raises:
        UserError: an empty or damaged file; in JSON and CSV what is wrong, by line.
    """
    if form in COLUMNAR:
        first = 1
        for batch in batches(path, form):
            yield from _rows_of(batch, first, columns)
            first += batch.num_rows
        return
    _not_empty(path)
    try:
        yield from _csv(path) if form == "csv" else _json(path)
    except (OSError, EOFError) as error:
        raise NotFound(
            f"cannot be read: {error}", where=str(path), fix="copy or make the file again"
        ) from None


def _not_empty(path: Path) -> None:
    try:
        if path.stat().st_size == 0:
            raise DataError("the file is empty", where=str(path), fix="give a file with rows in it")
        with path.open("rb"):
            pass
    except OSError as error:
        raise NotFound(f"cannot be read: {error.strerror}", where=str(path)) from None


# ---- Parquet and Arrow ----
def batches(path: Path, form: Format) -> Iterator[pa.RecordBatch]:
    """The record batches of a Parquet or Arrow file.

    Raises:
        UserError: the file is damaged, with the row group where that is known.
    """
    import pyarrow as pa

    _not_empty(path)
    try:
        yield from _parquet(path) if form == "parquet" else _arrow(path)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).split("\n")[0][:200]
        raise DataError(
            f"not a readable {form.capitalize()} file, damaged or incomplete: {reason}",
            where=str(path),
            fix="copy or make the file again",
        ) from None


def _parquet(path: Path) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path, memory_map=True)
    for group in range(file.num_row_groups):
        try:
            yield from file.iter_batches(_BATCH_ROWS, row_groups=[group])
        except (pa.ArrowException, OSError) as error:
            raise pa.ArrowInvalid(f"row group {group + 1} of {file.num_row_groups}: {error}") from None


def _arrow(path: Path) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow stream or file."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        try:
            found: Any = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            source.seek(0)
            opened = pa.ipc.open_file(source)
            found = (opened.get_batch(index) for index in range(opened.num_record_batches))
        for batch in found:
            _validate(batch)
            yield batch


def _validate(batch: pa.RecordBatch) -> None:
    """Refuse offsets that point outside of their buffers: they would be read as foreign memory, or crash."""
    import pyarrow as pa

    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            # text that is not UTF-8 is left to those who can name the row
            is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
            if not (is_text and "UTF8" in str(error)):
                raise


def _rows_of(batch: pa.RecordBatch, first: int, columns: Callable[[str], bool]) -> Iterator[tuple[str, Row]]:
    names = batch.schema.names
    decoded = [
        _cells(column) if columns(name) else [None] * len(column)
        for name, column in zip(names, batch.columns, strict=True)
    ]
    for number, cells in enumerate(zip(*decoded, strict=True), first):
        yield f"row {number}", dict(zip(names, cells, strict=True))


def _cells(array: pa.Array) -> list[Any]:
    """Arrow's cells as Python values; :class:`~podtune.sft.data.shapes.NotText` where text is not UTF-8."""
    try:
        values = array.to_pylist()
    except UnicodeDecodeError:
        values = [_cell(scalar) for scalar in array]
    return [_without_json(value, array.type) for value in values] if "json" in str(array.type) else values


def _cell(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return NotText(f"is not UTF-8 (byte 0x{error.object[error.start]:02x} at position {error.start + 1})")


def _without_json(value: Any, kind: pa.DataType) -> Any:
    """``value`` of Arrow's type ``kind`` with the parts decoded that are stored as JSON."""
    import pyarrow as pa

    if value is None:
        return None
    if isinstance(kind, pa.BaseExtensionType):
        return json.loads(value) if isinstance(value, str) else value
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [_without_json(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {field.name: _without_json(value[field.name], field.type) for field in kind}
    return value


# ---- JSON and CSV ----
def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text file, unpacked."""
    import pyarrow as pa

    with pa.input_stream(str(path), compression="detect") as stream:
        for number, line in enumerate(io.BufferedReader(stream), 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                byte = f"byte 0x{error.object[error.start]:02x} at position {error.start + 1} of the line"
                raise DataError(
                    f"not UTF-8: {byte}",
                    where=f"{path}, line {number}",
                    fix="save the file as UTF-8, for example: iconv -f latin1 -t utf-8 FILE",
                ) from None


def _json(path: Path) -> Iterator[tuple[str, Row]]:
    """The objects of JSON lines, or those of one array."""
    for number, line in _lines(path):
        if number == 1 and line.lstrip().startswith("["):
            content = _parsed("".join(line for _, line in _lines(path)), str(path))
            for row, value in enumerate(content, 1):
                yield f"row {row}", _object(value, f"{path}, row {row}")
            return
        if text := line.strip():
            where = f"{path}, line {number}"
            yield f"line {number}", _object(_parsed(text, where), where)


def _parsed(text: str, where: str) -> Any:
    fix = "correct the row or remove it"
    try:
        content = json.loads(text)
        if "\\ud" in text or "\\uD" in text:  # an escaped half of a surrogate pair is JSON, but not text
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise DataError(f"{half} is half of a character", where=where, fix=fix) from None
    except RecursionError:
        raise DataError("nested too deeply", where=where, fix=fix) from None
    except ValueError as error:
        fix = "write one JSON object a line, or one JSON array of objects"
        raise DataError(f"not JSON: {error}", where=where, fix=fix) from None
    return content


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        what = f"not a JSON object but {type(value).__name__}"
        raise DataError(what, where=where, fix='write {"column": value, ...}')
    return value


def _csv(path: Path) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB refuses long answers
    lines = (line for _, line in _lines(path))
    names = next(lines, "")
    # spreadsheets of many countries write semicolons: what the line of names has, if no comma
    delimiter = "\t" if ".tsv" in path.suffixes else max("," if "," in names else ",;\t", key=names.count)
    reader = csv.DictReader(itertools.chain([names], lines), delimiter=delimiter, strict=True)

    def refuse(what: str, fix: str) -> DataError:
        return DataError(what, where=f"{path}, line {reader.reader.line_num}", fix=fix)

    try:
        header = reader.fieldnames or []
        if twice := next((name for name in header if list(header).count(name) > 1), None):
            raise refuse(f"two columns have the name '{twice}'", "rename one of them")
        for row in reader:
            if more := row.get(None):  # cells that the header has no name for
                raise refuse(
                    f"{len(header) + len(more)} cells but the header has {len(header)}",
                    "put cells that contain the delimiter in double quotes",
                )
            # An empty or absent cell is null: CSV has no other way to say it.
            yield f"line {reader.line_num}", {name: cell or None for name, cell in row.items()}
    except csv.Error as error:
        raise refuse(f"not CSV: {error}", "check the quotes") from None
