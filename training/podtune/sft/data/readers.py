"""The rows of data files as they are written, each with its position. No torch.

JSON and CSV are read by Python's own modules. Arrow's and pandas' readers guess types (a date from text, a
missing value from "None", 1.0 from a 1 beside 1.5), and a chat template writes all of that into the prompt.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from podtune.run.errors import DataError, NotFound, first_line
from podtune.sft.data.files import Format, find
from podtune.sft.data.shapes import Row

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNAR = ("parquet", "arrow")


def rows_at(path: Path, split: str = "train") -> Iterator[Row]:
    """Yield the rows of a data file or of one split of a folder. Raises :class:`UserError`, by row."""
    return (row for _, row in placed_rows(path, split))


def placed_rows(path: Path, split: str = "train") -> Iterator[tuple[str, Row]]:
    """The rows as :func:`rows_at` gives them, each with its file and position."""
    folder = find(path)
    for file in folder.files(split):
        for position, row in rows(file, folder.format):
            yield f"{file}, {position}", row


def rows(path: Path, form: Format) -> Iterator[tuple[str, Row]]:
    """Yield the rows of one file and their positions, "line 7" or "row 7", counted from 1.

    A CSV row's line is the one where it ends. Raises :class:`UserError`; in JSON and CSV by line.
    """
    if form in COLUMNAR:
        yield from _columnar(path, form)
        return
    try:
        yield from _csv(path) if form == "csv" else _json(path)
    except (OSError, EOFError) as error:
        raise NotFound(
            f"cannot be read: {error}", where=str(path), fix="copy or make the file again"
        ) from None


# ---- Parquet and Arrow ----
def _columnar(path: Path, form: Format) -> Iterator[tuple[str, Row]]:
    import pyarrow as pa
    from datasets import Dataset

    number = itertools.count(1)
    for batch in batches(path, form):
        # the library decodes what it has written as JSON
        for row in Dataset(pa.Table.from_batches([batch]).replace_schema_metadata(None)):
            yield f"row {next(number)}", row


def batches(path: Path, form: Format) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a Parquet or Arrow file. Raises :class:`DataError` if it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if form == "parquet":
            found = pq.ParquetFile(path, memory_map=True).iter_batches(4096)
        else:
            found = _arrow(pa.memory_map(str(path)))
        for batch in found:
            batch.validate(full=True)  # offsets outside of their buffers would be read as foreign memory
            yield batch
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"not a readable {form.capitalize()} file, damaged or incomplete: {first_line(error)}",
            where=str(path),
            fix="copy or make the file again",
        ) from None


def _arrow(source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """The batches of an Arrow stream or file."""
    import pyarrow as pa

    try:
        yield from pa.ipc.open_stream(source)
    except pa.ArrowInvalid:
        yield from pa.ipc.open_file(source).read_all().to_batches()


# ---- JSON and CSV ----
def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text file, unpacked."""
    import pyarrow as pa

    with pa.input_stream(str(path), compression="detect") as stream:
        for number, line in enumerate(io.BufferedReader(stream), 1):
            try:
                # spreadsheets begin a file with a byte order mark
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
            assert isinstance(content, list)  # as it begins with a bracket
            for row, value in enumerate(content, 1):
                yield f"row {row}", _object(value, f"{path}, row {row}")
            return
        if text := line.strip():
            where = f"{path}, line {number}"
            yield f"line {number}", _object(_parsed(text, where), where)


def _parsed(text: str, where: str) -> object:
    try:
        content: object = json.loads(text, parse_int=_int64)
        if "\\ud" in text or "\\uD" in text:  # an escaped half of a surrogate pair is JSON, but not text
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"not JSON that can be read: {error}",
            where=where,
            fix="write one JSON object a line, or one JSON array of objects",
        ) from None
    return content


def _int64(digits: str) -> int:
    number = int(digits)
    if number.bit_length() > 64:  # the datasets library would not read it back
        raise ValueError("a whole number of more than 64 bits; write it as text, in double quotes")
    return number


def _object(value: object, where: str) -> Row:
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
        header = list(reader.fieldnames or [])
        if twice := next((name for name in header if header.count(name) > 1), None):
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
