"""Data files: which ones a path means, for which split, and their rows. pyarrow only, no torch, no datasets.

Rows are numbered from 1. Parquet and Arrow are read in batches, JSON lines and CSV row by row, so that
checking a file needs little memory.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from podtune.run.errors import DataError, NotFound, UserError

Format = Literal["parquet", "arrow", "json", "csv"]
FORMATS: dict[str, Format] = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
}
PACKED = (".gz", ".bz2", ".zst")
READABLE = "Parquet, JSON lines (.jsonl, .json), CSV, or a folder saved by the datasets library"
SPLITS = {  # words in file and folder names, and the split that they mean
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "eval": ("eval", "evaluation"),
    "validation": ("validation", "valid", "val", "dev"),
}
_BATCH_ROWS = 4096

Row = dict[str, Any]


@dataclass(frozen=True)
class Folder:
    """The data files at a path: for each split its files, all of one format. A single file is the split
    ``train``.
    """

    root: Path
    format: Format
    splits: dict[str, tuple[Path, ...]]
    saved: bool = False  # written by datasets' save_to_disk

    def files(self, split: str) -> tuple[Path, ...]:
        """The files of ``split`` (without a slice such as ``[:100]``); eval and validation mean each other.

        Raises:
            UserError: there is no such split; says which there are.
        """
        name = split.split("[")[0]
        same = next(
            (names for names in (("eval", "validation"),) if split_of_word(name) in names),
            (split_of_word(name) or name,),
        )
        for candidate in (name, *same):
            if candidate in self.splits:
                return self.splits[candidate]
        raise NotFound(
            f"there is no split '{name}'; found {', '.join(self.splits)}",
            where=str(self.root),
            fix="name one of those, or name the file itself",
        )


def file_format(path: Path) -> Format | None:
    """The format that the name of ``path`` says, looking through ``.gz`` and the like; None for other
    files.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    return FORMATS.get(suffixes[-1]) if suffixes else None


def split_of_word(word: str) -> str | None:
    """The split that a word such as ``dev`` means."""
    return next((split for split, words in SPLITS.items() if word.lower() in words), None)


def split_of(path: Path, root: Path) -> str | None:
    """The split that the name of a file below ``root`` says (``train-00000-of-00002.parquet``,
    ``val/part-1.jsonl``).
    """
    relative = path.relative_to(root)
    for part in (relative.name.split(".")[0], *reversed(relative.parts[:-1])):
        for word in re.split(r"[^A-Za-z]+", part):
            if split := split_of_word(word):
                return split
    return None


def find(path: Path) -> Folder:
    """The data files at ``path``, a file or a folder.

    Raises:
        UserError: missing, unreadable, of an unknown format, or a folder with nothing or with a mixture of
        formats in it.
    """
    where = str(path)
    try:
        if path.is_dir():
            return _saved(path) or _folder(path)
        if path.is_file():
            form = file_format(path)
            if form is None:
                raise NotFound(f"unknown kind of file '{path.suffix}'", where=where, fix=f"give {READABLE}")
            return Folder(path, form, {"train": (path,)})
        if path.exists():
            raise NotFound("neither a file nor a folder", where=where)
    except PermissionError as error:
        raise NotFound("cannot be read: permission denied", where=str(error.filename or where)) from None
    raise NotFound(f"no such file or folder{_neighbours(path)}", where=where, fix="correct the path")


def _neighbours(path: Path) -> str:
    """What lies where the missing file was looked for."""
    parent = path.parent
    if not parent.is_dir():
        return f"; there is no folder {parent} either"
    try:
        names = sorted(item.name for item in parent.iterdir() if item.is_dir() or file_format(item))[:5]
    except OSError:
        return ""
    return f"; {parent} holds {', '.join(names)}" if names else f"; {parent} holds no data"


def _saved(root: Path) -> Folder | None:
    """A folder written by ``save_to_disk``: one data set, or one a split."""
    if (root / "dataset_dict.json").is_file():
        names = read_json(root / "dataset_dict.json").get("splits", [])
        splits = {str(name): _saved_files(root / str(name)) for name in names}
        return Folder(root, "arrow", splits, saved=True)
    if (root / "state.json").is_file() and (root / "dataset_info.json").is_file():
        split = str(read_json(root / "state.json").get("_split") or "train").split("[")[0]
        return Folder(
            root, "arrow", {split if split.isidentifier() else "train": _saved_files(root)}, saved=True
        )
    return None


def _saved_files(root: Path) -> tuple[Path, ...]:
    entries = read_json(root / "state.json").get("_data_files") or []
    files = tuple(root / str(entry["filename"]) for entry in entries)
    for file in files:
        if not file.is_file():
            raise NotFound("a file of the saved data set is missing", where=str(file), fix="save it again")
    return files


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a small file.

    Raises:
        UserError: missing or not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound("missing", where=str(path)) from None
    except ValueError as error:
        raise DataError(f"not JSON: {error}", where=str(path)) from None
    if not isinstance(content, dict):
        raise DataError("not a JSON object", where=str(path))
    return content


def _folder(root: Path) -> Folder:
    def hidden(path: Path) -> bool:
        return any(part.startswith((".", "_")) for part in path.relative_to(root).parts)

    files = [
        path for path in sorted(root.rglob("*")) if path.is_file() and file_format(path) and not hidden(path)
    ]
    formats = sorted({str(file_format(path)) for path in files})
    if len(formats) > 1:  # a card or a vocabulary in JSON beside the data
        files = [path for path in files if ".json" not in path.suffixes]
        formats = sorted({str(file_format(path)) for path in files})
    if not files:
        raise NotFound(
            "there is no data file in this folder", where=str(root), fix=f"give a folder with {READABLE}"
        )
    if len(formats) > 1:
        raise DataError(
            f"the folder mixes {' and '.join(formats)} files",
            where=str(root),
            fix="name one file, or a folder of one format",
        )
    splits: dict[str, list[Path]] = {}
    for path in files:
        splits.setdefault(split_of(path, root) or "", []).append(path)
    rest = splits.pop("", [])
    if rest and "train" not in splits:  # shards without a split in their names
        splits["train"] = rest
    form = file_format(files[0])
    assert form is not None
    return Folder(
        root,
        form,
        {name: tuple(splits[name]) for name in ("train", "test", "eval", "validation") if name in splits},
    )


def rows_at(path: Path, split: str = "train") -> Iterator[Row]:
    """The rows of a data file or of one split of a folder, one after the other.

    Raises:
        UserError: missing, of an unknown kind, or unreadable, by row.
    """
    folder = find(path)
    for file in folder.files(split):
        if folder.format in ("parquet", "arrow"):
            for batch in batches(file, folder.format):
                yield from batch.to_pylist()
        else:
            yield from (row for _, row in rows(file, folder.format))


def batches(path: Path, form: Format, columns: list[str] | None = None) -> Iterator[Any]:
    """The record batches of a Parquet or Arrow file; ``columns`` limits what is decoded (Parquet).

    Raises:
        UserError: the file is damaged, with the row group where that is known.
    """
    import pyarrow as pa

    _not_empty(path)
    try:
        yield from _parquet(path, columns) if form == "parquet" else _arrow(path)
    except (pa.ArrowException, OSError) as error:
        what = "Parquet" if form == "parquet" else "Arrow"
        reason = str(error).split("\n")[0][:200]
        raise DataError(
            f"the {what} file is damaged or incomplete: {reason}",
            where=str(path),
            fix="copy or make the file again",
        ) from None


def _parquet(path: Path, columns: list[str] | None) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path, memory_map=True)
    for group in range(file.num_row_groups):
        try:
            yield from file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns)
        except (pa.ArrowException, OSError) as error:
            raise pa.ArrowInvalid(f"row group {group + 1} of {file.num_row_groups}: {error}") from None


def _arrow(path: Path) -> Iterator[Any]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        try:
            reader = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            source.seek(0)
            opened = pa.ipc.open_file(source)
            batches = (opened.get_batch(index) for index in range(opened.num_record_batches))
        else:
            batches = iter(reader)
        for batch in batches:
            _validate(batch)
            yield batch


def _validate(batch: Any) -> None:
    """Refuse offsets that point outside of their buffers, which would be read as foreign memory or crash.

    A column of text that is not UTF-8 is left to those who can name the row.
    """
    import pyarrow as pa

    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            flat = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
            if not (flat and "UTF8" in str(error)):
                raise


def columns_of(path: Path, form: Format) -> list[str]:
    """The column names of a Parquet or Arrow file, from its schema.

    Raises:
        UserError: the file is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    _not_empty(path)
    try:
        if form == "parquet":
            return list(pq.read_schema(path).names)
        with pa.memory_map(str(path)) as source:
            try:
                return list(pa.ipc.open_stream(source).schema.names)
            except pa.ArrowInvalid:
                source.seek(0)
                return list(pa.ipc.open_file(source).schema.names)
    except (pa.ArrowException, OSError) as error:
        what = "Parquet" if form == "parquet" else "Arrow"
        reason = str(error).split("\n")[0][:200]
        raise DataError(
            f"not a readable {what} file: {reason}", where=str(path), fix="copy or make the file again"
        ) from None


def rows(path: Path, form: Format) -> Iterator[tuple[int, Row]]:
    """The numbered rows of a JSON or CSV file; the number is the line where the row ends (an array's rows:
    the index).

    Raises:
        UserError: not UTF-8, or not JSON or CSV, by line.
    """
    _not_empty(path)
    try:
        yield from _csv(path) if form == "csv" else _json(path)
    except UnicodeDecodeError as error:
        raise _not_utf8(path, 1, error) from None
    except (OSError, EOFError) as error:
        raise NotFound(
            f"cannot be read: {error}", where=str(path), fix="copy or make the file again"
        ) from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    import pyarrow as pa

    with pa.input_stream(str(path), compression="detect") as stream:
        for number, line in enumerate(io.BufferedReader(stream), 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(path, number, error) from None


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> UserError:
    return DataError(
        f"not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start + 1} of the line",
        where=f"{path}, line {line}",
        fix="save the file as UTF-8, for example: iconv -f latin1 -t utf-8 FILE",
    )


def _json(path: Path) -> Iterator[tuple[int, Row]]:
    for number, line in _lines(path):
        text = line.strip()
        if not text:
            continue
        if number == 1 and text.startswith("["):
            yield from _array(path)
            return
        yield number, _object(_parsed(text, f"{path}, line {number}"), path, f"line {number}")


def _array(path: Path) -> Iterator[tuple[int, Row]]:
    content = _parsed("".join(line for _, line in _lines(path)), str(path))
    for number, row in enumerate(content, 1):
        yield number, _object(row, path, f"row {number}")


def _parsed(text: str, where: str) -> Any:
    try:
        content = json.loads(text)
        if "\\ud" in text or "\\uD" in text:  # an escaped half of a surrogate pair is JSON, but no text
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise DataError(
            f"{half} is half of a character", where=where, fix="correct the row or remove it"
        ) from None
    except RecursionError:
        raise DataError("nested too deeply", where=where, fix="correct the row or remove it") from None
    except ValueError as error:
        fix = "write one JSON object a line, or one JSON array of objects"
        raise DataError(f"not JSON: {error}", where=where, fix=fix) from None
    return content


def _object(row: Any, path: Path, place: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(
            f"not a JSON object but {type(row).__name__}",
            where=f"{path}, {place}",
            fix='write {"column": value, ...}',
        )
    return row


def _csv(path: Path) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB refuses long answers
    delimiter = "\t" if ".tsv" in path.suffixes else ","
    reader = csv.reader((line for _, line in _lines(path)), delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        for cells in reader:
            if cells:
                if len(cells) > len(header):
                    raise DataError(
                        f"{len(cells)} cells but the header has {len(header)}",
                        where=f"{path}, line {reader.line_num}",
                        fix="put cells that contain the delimiter in double quotes",
                    )
                # An empty or absent cell is null: CSV has no other way to say it.
                yield (
                    reader.line_num,
                    {
                        name: (cells[at] or None) if at < len(cells) else None
                        for at, name in enumerate(header)
                    },
                )
    except csv.Error as error:
        raise DataError(
            f"not CSV: {error}", where=f"{path}, line {reader.line_num}", fix="check the quotes"
        ) from None


def _not_empty(path: Path) -> None:
    try:
        if path.stat().st_size == 0:
            raise DataError("the file is empty", where=str(path), fix="give a file with rows in it")
        with path.open("rb"):
            pass
    except OSError as error:
        raise NotFound(f"cannot be read: {error.strerror}", where=str(path)) from None
