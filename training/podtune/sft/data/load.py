"""The rows of a source as a ``datasets.Dataset``."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from podtune.run.errors import DataError, warn
from podtune.sft.data import files
from podtune.sft.data.readers import COLUMNAR, batches, rows
from podtune.sft.data.shapes import RowShape, detect, no_rows
from podtune.sft.data.source import DataSource, local_path
from podtune.sft.source import hub

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

IN_MEMORY_BYTES = 512 * 2**20  # larger files go through the datasets library's memory-mapped cache


def load_split(source: DataSource) -> Dataset:
    """The rows of ``source``, of local files exactly as they are written there.

    Raises:
        UserError: files that are missing or damaged, no rows, or rows that lack a value (all in one message)
            if ``drop_incomplete`` does not leave them out.
    """
    if source.mixture:
        dataset = _load_mixture(source)
    elif source.path is None:
        dataset = hub.load(source.name or "", source.config, source.split)
    else:
        dataset = _load_files(source)
    if not len(dataset):
        raise no_rows(str(source))
    if renames := source.renames(dataset.column_names):
        taken = {*dataset.column_names}.intersection(renames.values()).difference(renames)
        dataset = dataset.remove_columns([*taken]).rename_columns(renames)
    return _complete(dataset, source)


def shape_of(dataset: Dataset, text_field: str = "text") -> RowShape:
    """Detect the shape of a loaded data set by its first row. Raises :class:`UserError` if it has none."""
    return detect(dataset[0], "data set", text_field)


def _complete(dataset: Dataset, source: DataSource) -> Dataset:
    """The rows of ``dataset`` in which no value is missing that would be trained."""
    columns = shape_of(dataset, source.text_field).columns
    if not any(dataset.data.column(name).null_count for name in columns):
        return dataset
    cells = dataset.select_columns(list(columns)).with_format("arrow")[:]
    valid = zip(*(cells[name].is_valid().to_pylist() for name in columns), strict=True)
    problems = {
        number: f"column '{columns[there.index(False)]}' is missing or null"
        for number, there in enumerate(valid, 1)
        if not all(there)
    }
    if not problems:
        return dataset
    if not source.drop_incomplete:
        (where, problem), *more = zip(
            source.places(list(problems)[:5]), itertools.islice(problems.values(), 5), strict=True
        )
        if more:
            others = "".join(f"\n    {place}: {other}" for place, other in more)
            rest = "\n    ..." if len(problems) > 5 else ""
            problem = f"{len(problems)} rows lack a value: {problem}{others}{rest}"
        fix = "correct or remove such rows, or leave them out with drop_incomplete: true"
        raise DataError(problem, where=where, fix=fix)
    warn(f"{source}: rows left out for want of a value: {len(problems)} (drop_incomplete)")
    if len(problems) == len(dataset):
        raise no_rows(str(source))
    return dataset.select([row for row in range(len(dataset)) if row + 1 not in problems])


def _load_files(source: DataSource) -> Dataset:
    import datasets
    import pyarrow as pa

    assert source.path is not None
    folder, stamps = files.find(source.path), source.stamps()
    paths, form = folder.files(source.split), folder.format
    if form in ("parquet", "json") and sum(path.stat().st_size for path in paths) > IN_MEMORY_BYTES:
        return datasets.load_dataset(form, data_files=[str(path) for path in paths], split="train")
    if form in COLUMNAR:
        found = [batch for path in paths for batch in batches(path, form)]
        tables = [pa.Table.from_batches([batch]).replace_schema_metadata(None) for batch in found]
        try:
            table = pa.concat_tables(tables, promote_options="default") if tables else pa.table({})
        except pa.ArrowException as error:
            what = f"the files do not have the same columns: {error}"
            raise DataError(what, where=str(source), fix="make the columns equal") from None
    else:
        content = [row for path in paths for _, row in rows(path, form)]
        names = dict.fromkeys(name for row in content for name in row)
        table = pa.table({name: _column([row.get(name) for row in content]) for name in names})
    # the library would hash all rows, for caches that a table in memory does not have
    return datasets.Dataset(table, fingerprint=stamps)


def _column(cells: list[Any]) -> pa.Array:
    """``cells`` as an Arrow array that gives back exactly them, as JSON (datasets' ``Json``) where none can.

    Arrow fills absent keys with nulls, widens a 1 beside 1.5 and refuses mixed types.
    """
    import pyarrow as pa

    canonical = functools.partial(json.dumps, sort_keys=True)
    try:
        array = pa.array(cells)
        if not pa.types.is_nested(array.type) or canonical(array.to_pylist()) == canonical(cells):
            return array
    except (pa.ArrowException, OverflowError):
        pass
    texts = [None if cell is None else json.dumps(cell, ensure_ascii=False) for cell in cells]
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))


def _load_mixture(source: DataSource) -> Dataset:
    from trl import DatasetMixtureConfig, get_dataset

    try:
        config = DatasetMixtureConfig(datasets=[_as_builder(entry) for entry in source.mixture])
        mixed = get_dataset(config)["train"]
    except (ValueError, TypeError) as error:
        raise DataError(
            f"the mixture cannot be made: {error}", where="datasets", fix="see TRL's DatasetMixtureConfig"
        ) from None
    if not source.mixture_test_size:
        return mixed
    # TRL splits without a seed, so that two ranks, or a run and its resume, would hold out different rows.
    return mixed.train_test_split(test_size=source.mixture_test_size, seed=source.seed)[source.split]


def _as_builder(entry: Mapping[str, object]) -> dict[str, object]:
    """TRL hands ``path`` to ``load_dataset``, which takes a folder or a hub name but no file."""
    path = local_path(name := str(entry.get("path")))
    if entry.get("data_files") or entry.get("data_dir"):
        return dict(entry)
    if path is None:
        hub.look_up(name)
        return dict(entry)
    folder = files.find(path)
    split = str(entry.get("split") or "train")
    name = split.partition("[")[0]  # a slice, train[:100], is the library's to cut
    chosen = [str(file) for file in folder.files(name)]
    return {**entry, "path": folder.format, "data_files": {name: chosen}, "split": split}
