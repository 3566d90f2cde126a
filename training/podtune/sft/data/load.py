"""The rows of a source as a ``datasets.Dataset``."""

from __future__ import annotations

import collections
import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podtune.run.errors import DataError, UsageError
from podtune.sft.data import files
from podtune.sft.data.readers import Row, batches, rows
from podtune.sft.data.shapes import RowShape, detect, no_rows
from podtune.sft.data.source import DataSource, local_path
from podtune.sft.source import hub

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

IN_MEMORY_BYTES = 512 * 2**20  # larger files go through the datasets library's memory-mapped cache


def load_split(source: DataSource) -> Dataset:
    """The rows of ``source``, of local files exactly as they are written there.

    Call :func:`podtune.sft.data.source.check_source` first: errors in rows that it did not reach are Arrow's.

    Raises:
        UserError: as :func:`check_source`.
    """
    if source.mixture:
        dataset = _load_mixture(source)
    elif source.path is None:
        dataset = hub.load(source.name or "", source.config, source.split)
    else:
        folder = files.find(source.path)
        selected = folder.files(source.split)
        dataset = _load_saved(folder, source) if folder.saved else _load_files(selected, folder.format)
        dataset = _slice(dataset, source.split)
    if renames := source.renames(dataset.column_names):
        taken = {*dataset.column_names}.intersection(renames.values()).difference(renames)
        dataset = dataset.remove_columns([*taken]).rename_columns(renames)
    if source.drop_incomplete:
        dataset = _complete(dataset, source.text_field)
    if not len(dataset):
        raise no_rows(str(source))
    return dataset


def shape_of(dataset: Dataset, text_field: str = "text") -> RowShape:
    """The shape of a loaded data set, by its columns and first row.

    Raises:
        UserError: no known shape.
    """
    first = next(iter(dataset), None)
    if first is None:
        raise no_rows("data set")
    return detect(first, "data set", text_field)


def _complete(dataset: Dataset, text_field: str) -> Dataset:
    """The rows of ``dataset`` in which no value is missing that would be trained."""
    columns = shape_of(dataset, text_field).columns
    cells = dataset.select_columns(list(columns)).with_format("arrow")[:]
    valid = [cells[name].is_valid().to_pylist() for name in columns]
    rows = [row for row, there in enumerate(zip(*valid, strict=True)) if all(there)]
    return dataset if len(rows) == len(dataset) else dataset.select(rows)


def _load_saved(folder: files.Folder, source: DataSource) -> Dataset:
    import datasets

    for path in folder.files(source.split):
        collections.deque(batches(path, "arrow"), maxlen=0)  # offsets outside of the file would crash later
    loaded = datasets.load_from_disk(str(folder.root))
    if isinstance(loaded, datasets.DatasetDict):
        chosen = folder.files(source.split)
        return loaded[next(name for name, paths in folder.splits.items() if paths == chosen)]
    return loaded


def _load_files(paths: tuple[Path, ...], form: files.Format) -> Dataset:
    import datasets
    import pyarrow as pa

    if form in ("parquet", "json") and sum(path.stat().st_size for path in paths) > IN_MEMORY_BYTES:
        return datasets.load_dataset(form, data_files=[str(path) for path in paths], split="train")
    if form in ("json", "csv"):
        places, content = [], []
        for path in paths:
            for position, row in rows(path, form):
                places.append(f"{path}, {position}")
                content.append(row)
        return datasets.Dataset(_table_of_rows(content, places), fingerprint=uuid.uuid4().hex)
    tables = [_table(path, form) for path in paths]
    try:
        table = pa.concat_tables(
            [table for table in tables if table.num_rows] or tables[:1], promote_options="default"
        )
    except pa.ArrowException as error:
        raise DataError(
            f"the files do not have the same columns: {error}",
            where=f"{paths[0]} ... {paths[-1]}",
            fix="make the columns equal",
        ) from None
    # the library would hash all rows, for caches that a table in memory does not have
    return datasets.Dataset(table.replace_schema_metadata(None), fingerprint=uuid.uuid4().hex)


def _table(path: Path, form: files.Format) -> pa.Table:
    import pyarrow as pa

    found = list(batches(path, form))
    return pa.Table.from_batches(found).replace_schema_metadata(None) if found else pa.table({})


def _table_of_rows(content: list[Row], places: list[str]) -> pa.Table:
    import pyarrow as pa

    names = dict.fromkeys(name for row in content for name in row)
    return pa.table({name: _column(name, [row.get(name) for row in content], places) for name in names})


def _column(name: str, cells: list[Any], places: list[str]) -> pa.Array:
    """``cells`` as an Arrow array that gives back exactly them, as JSON (datasets' ``Json``) where none can.

    Arrow fills absent keys with nulls, widens a 1 beside 1.5 and refuses mixed types.

    Raises:
        UserError: an integer beyond 64 bits, which the datasets library does not read back.
    """
    import pyarrow as pa

    try:
        array = pa.array(cells)
        if not pa.types.is_nested(array.type) or _canonical(array.to_pylist()) == _canonical(cells):
            return array
    except (pa.ArrowException, OverflowError):
        pass
    for cell, place in zip(cells, places, strict=True):
        if _widest(cell) >= 2**64:
            what = f"column '{name}' holds a whole number of more than 64 bits"
            raise DataError(what, where=place, fix="write it as text, in double quotes")
    texts = [None if cell is None else json.dumps(cell, ensure_ascii=False) for cell in cells]
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))


def _widest(cell: Any) -> int:
    """The largest whole number in a cell, as unsigned as 64 bits hold it."""
    if isinstance(cell, dict | list):
        return max(map(_widest, cell.values() if isinstance(cell, dict) else cell), default=0)
    return max(cell, -2 * cell - 1) if isinstance(cell, int) else 0


def _canonical(cells: list[Any]) -> str:
    return json.dumps(cells, sort_keys=True)


def _slice(dataset: Dataset, split: str) -> Dataset:
    """``train[:100]``, ``train[10%:20%]``, as in the datasets library."""
    if "[" not in split:
        return dataset
    from datasets import ReadInstruction

    name = split.split("[")[0]
    try:
        parts = ReadInstruction.from_spec(split).to_absolute({name: len(dataset)})
    except (ValueError, AssertionError) as error:
        raise UsageError(
            f"not a slice of a split: {error}",
            where=split,
            fix="write for example train[:1000] or train[10%:]",
        ) from None
    rows = [row for part in parts for row in range(part.from_, part.to)]
    return dataset.select(rows)


def _load_mixture(source: DataSource) -> Dataset:
    from trl import DatasetMixtureConfig, get_dataset

    entries = [_as_builder(entry) for entry in source.mixture]
    try:
        config = DatasetMixtureConfig(datasets=entries)
        mixed = get_dataset(config)["train"]
    except (ValueError, TypeError) as error:
        raise DataError(
            f"the mixture cannot be made: {error}", where="datasets", fix="see TRL's DatasetMixtureConfig"
        ) from None
    if not source.mixture_test_size:
        return mixed
    # TRL splits without a seed, so that two ranks, or a run and its resume, would hold out different rows.
    return mixed.train_test_split(test_size=source.mixture_test_size, seed=source.seed)[source.split]


def _as_builder(entry: dict[str, Any]) -> dict[str, Any]:
    """TRL hands ``path`` to ``load_dataset``, which takes a folder or a hub name but no file."""
    path = local_path(str(entry["path"]))
    if path is None or entry.get("data_files") or entry.get("data_dir"):
        return entry
    folder = files.find(path)
    split = entry.get("split") or "train"
    chosen = [str(file) for file in folder.files(split)]
    name = split.split("[")[0]
    return entry | {"path": folder.format, "data_files": {name: chosen}, "split": split}
