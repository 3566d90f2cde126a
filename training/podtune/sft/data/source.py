"""Where training rows come from: a file, a folder, a hub name, a mixture. Checked without torch, then loaded.

The names are those of TRL's ScriptArguments and DatasetMixtureConfig.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podtune.run.errors import ConfigError, DataError, UsageError
from podtune.sft.data import files
from podtune.sft.data.cache import default_folder_if_usable
from podtune.sft.data.known import Memory
from podtune.sft.data.shapes import RowShape, bad_cell, cell_problem, check_rows, detect
from podtune.sft.source import hub, object_store

if TYPE_CHECKING:
    from datasets import Dataset

# a check of a huge set stops here; what it did not reach is checked while it is tokenised
CHECK_SECONDS = 8.0
IN_MEMORY_BYTES = 512 * 2**20  # larger files go through the datasets library's memory-mapped cache
EVALUATES = ("eval_strategy", "eval_on_start", "do_eval", "do_predict", "answer_rows")  # keys that ask for it
STREAMING = ("dataset_streaming", "streaming")  # TRL's keys for it, of one set and of mixtures
_EVAL_SPLITS = ("test", "eval", "validation")


@dataclass(frozen=True)
class DataSource:
    """A split of a data set.

    Attributes:
        name: a file, a folder or a hub name; None if ``mixture`` is given.
        config: the configuration of a hub data set.
        split: its split; a slice such as ``train[:1000]`` or ``train[10%:]`` is understood.
        mixture: entries of TRL's DatasetMixtureConfig; they take the place of ``name``.
        mixture_test_size: the mixture's test_split_size.
        seed: of the mixture's train and test split.
    """

    name: str | None = None
    config: str | None = None
    split: str = "train"
    mixture: tuple[dict[str, Any], ...] = ()
    mixture_test_size: float | None = None
    seed: int = 42

    @property
    def path(self) -> Path | None:
        """The local file or folder, or None for a hub name and for mixtures."""
        return local_path(self.name) if self.name and not self.mixture else None

    def fetch(self) -> None:
        """Have a copy of what lies in object storage, see :func:`podtune.sft.source.object_store.fetch`."""
        names = [entry.get("path") for entry in self.mixture] if self.mixture else [self.name]
        for name in filter(object_store.is_url, names):
            object_store.fetch(str(name))

    def __str__(self) -> str:
        return (
            "mixture"
            if self.mixture
            else f"{self.name}" + ("" if self.split == "train" else f" ({self.split})")
        )


@dataclass(frozen=True)
class Sources:
    """The training source of a configuration and where its evaluation rows come from; read no file yet.

    Attributes:
        train: the training source.
        held_out: the data set in which the evaluation split is looked for.
        eval_name: True if the configuration names a data set for evaluation.
        test_split: the split it names; None if it names none, and one is looked for.
        evaluates: True if it evaluates at all; rows that nobody asks for are not read.
        text_field: the column of plain text.
        streaming: the key that asks for streaming; empty if none does.
        cache: the folder for tokenised data that the configuration names; None: the Hugging Face cache.
    """

    train: DataSource
    held_out: DataSource
    eval_name: bool = False
    test_split: str | None = None
    evaluates: bool = True
    text_field: str = "text"
    streaming: str = ""
    cache: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Sources:
        """From a configuration's values: TRL's keys and ``eval_dataset_name``.

        Raises:
            UserError: neither ``dataset_name`` nor ``datasets`` is given.
        """
        mixture = tuple(dict(entry) for entry in values.get("datasets") or ())
        name = values.get("dataset_name")
        if not mixture and not name:
            raise UsageError(
                "no data set is given",
                where="dataset_name",
                fix="give --dataset_name FILE, FOLDER or HUB/NAME; podtune data build makes a set",
            )
        seed = values.get("seed")
        train = DataSource(
            name=None if mixture else str(name),
            config=values.get("dataset_config"),
            split="train" if mixture else values.get("dataset_train_split") or "train",
            mixture=mixture,
            mixture_test_size=values.get("test_split_size"),
            seed=42 if seed is None else int(seed),
        )
        eval_name = values.get("eval_dataset_name")
        return cls(
            train,
            DataSource(name=str(eval_name)) if eval_name else train,
            bool(eval_name),
            # a name that only repeats the default is looked for like the default
            None if values.get("dataset_test_split") == "test" else values.get("dataset_test_split"),
            bool(eval_name or any(values.get(key) not in (None, False, 0, "no") for key in EVALUATES)),
            values.get("dataset_text_field") or "text",
            next((key for key in STREAMING if values.get(key)), ""),
            values.get("tokenized_cache"),
        )

    @functools.cached_property
    def cache_dir(self) -> Path | None:
        """Where tokenised data lies; None if nobody named a place and the usual one cannot be written."""
        return Path(self.cache) if self.cache else default_folder_if_usable()

    @functools.cached_property
    def evaluation(self) -> DataSource | None:
        """The rows to evaluate on, or None if there are none or nothing asks for them. Looks at files or the
        hub, once.

        Raises:
            UserError: the configuration names a split that is not there.
        """
        if not self.evaluates:
            return None
        if self.test_split and not self.held_out.mixture:
            split = dataclasses.replace(self.held_out, split=self.test_split)
            if split.path is not None:
                files.find(split.path).files(split.split)
            return split
        eval_source = find_eval_split(self.held_out)
        return self.held_out if eval_source is None and self.eval_name else eval_source

    def check(self) -> None:
        """Answer bad data before anything heavy is imported. Raises :class:`UserError`."""
        if self.streaming and (self.train.mixture or "[" in self.train.split):
            raise ConfigError(
                "a mixture, or a slice of a split, is not streamed",
                where=self.streaming,
                fix="name one set and a whole split, or leave it off",
            )
        self.train.fetch()
        if self.eval_name:
            self.held_out.fetch()
        for source in (self.train, self.evaluation):
            if source is not None and not self._is_known(source):
                check_source(source, text_field=self.text_field)

    def _is_known(self, source: DataSource) -> bool:
        """True if the rows of ``source`` were tokenised and its files have not changed since."""
        known = Memory(source, self.cache_dir).read()
        return known is not None and known.text_field == self.text_field

    def __str__(self) -> str:
        return str(self.train)


def local_path(name: str) -> Path | None:
    """``name`` as a path, if it exists or can be nothing else; None if it can be a hub name (``user/set`` or
    ``set``). Of a URL it is that of the copy.
    """
    if object_store.is_url(name):
        return object_store.copy_of(name)
    path = Path(name).expanduser()
    looks_local = (
        name.startswith(("/", "./", "../", "~"))
        or name in (".", "..")
        or name.count("/") > 1
        or files.file_format(path) is not None
    )
    return path if looks_local or path.exists() else None


def find_eval_split(source: DataSource) -> DataSource | None:
    """The split of the same data set to evaluate on: test, eval or validation; None if it has none.

    A single file has none, whatever lies beside it. For a hub name without a known list of splits it is None,
    too.
    """
    if source.mixture:
        return dataclasses.replace(source, split="test") if source.mixture_test_size else None
    path = source.path
    if path is not None:
        names = files.find(path).splits
    else:
        names = dict.fromkeys(hub.split_names(source.name or "", source.config), ())
    train = source.split.split("[")[0]
    choice = next((name for name in _EVAL_SPLITS if name in names and name != train), None)
    return dataclasses.replace(source, split=choice) if choice else None


def check_source(source: DataSource, *, text_field: str = "text") -> None:
    """Answer bad data before anything heavy is imported or a GPU is used: about a second for 100,000 rows.

    Raises:
        UserError: code 66 for what is missing or unreadable, 65 for what is in it (file, row, column), 69 for
            a hub that cannot be reached.
    """
    if source.mixture:
        for entry in source.mixture:
            _check_mixture_entry(entry, text_field)
        return
    path = source.path
    if path is None:
        hub.check(source.name or "")
        return
    folder = files.find(path)
    check_files(folder.files(source.split), folder.format, text_field)


def _check_mixture_entry(entry: dict[str, Any], text_field: str) -> None:
    keys = ("path", "name", "data_dir", "data_files", "split", "columns", "fraction")
    unknown = [key for key in entry if key not in keys]
    if unknown or not entry.get("path"):
        what = f"unknown key '{unknown[0]}'" if unknown else "an entry has no path"
        raise UsageError(what, where="datasets", fix=f"an entry has the keys {', '.join(keys)}")
    if entry.get("data_files") or entry.get("data_dir"):
        return  # patterns and builders are the datasets library's to resolve
    check_source(
        DataSource(name=str(entry["path"]), config=entry.get("name"), split=entry.get("split") or "train"),
        text_field=text_field,
    )


def check_files(paths: Iterable[Path], form: files.Format, text_field: str = "text") -> RowShape:
    """Check every row of local files, as far as :data:`CHECK_SECONDS` go, and return their shape.

    Raises:
        UserError: see :func:`check_source`.
    """
    end = time.monotonic() + CHECK_SECONDS
    shape: RowShape | None = None
    filled = False
    where = ""
    for path in paths:
        where = str(path)
        file_shape, has_rows = (_check_rows if form in ("json", "csv") else _check_batches)(
            path, form, text_field, shape, end
        )
        shape, filled = file_shape or shape, filled or has_rows
    if not filled or shape is None:
        raise DataError("the data set holds no rows", where=where, fix="give a file with rows in it")
    return shape


def _check_rows(
    path: Path, form: files.Format, text_field: str, shape: RowShape | None, end: float
) -> tuple[RowShape | None, bool]:
    unit = "line" if form == "csv" or ".json" not in path.suffixes else "row"
    filled = False
    for number, row in files.rows(path, form):
        if shape is None:
            shape = detect(row, f"{path}, {unit} {number}" if form == "json" else str(path), text_field)
        check_rows([(number, row)], shape, str(path), unit)
        filled = True
        if number % 1000 == 0 and time.monotonic() > end:
            break
    return shape, filled


def _check_batches(
    path: Path, form: files.Format, text_field: str, shape: RowShape | None, end: float
) -> tuple[RowShape | None, bool]:
    names = files.columns_of(path, form)
    expected = detect(dict.fromkeys(names), str(path), text_field)
    wanted = [name for name in dict.fromkeys((*expected.columns, text_field)) if name in names]
    first_row = 1
    for batch in files.batches(path, form, wanted):
        if not batch.num_rows:
            continue
        if shape is None:
            shape = detect(dict.fromkeys(names) | _first_row(batch, wanted), str(path), text_field)
        for column in shape.columns:
            if column not in names:
                raise DataError(f"there is no column '{column}'; found {', '.join(names)}", where=str(path))
            _check_column(batch.column(batch.schema.get_field_index(column)), shape, column, path, first_row)
        first_row += batch.num_rows
        if time.monotonic() > end:
            break
    return shape, first_row > 1


def _first_row(batch: Any, names: list[str]) -> dict[str, Any]:
    """The cells of the first row, as far as they can be decoded."""
    try:
        columns = {name: batch.column(batch.schema.get_field_index(name)) for name in names}
        return {name: _without_json(column[0].as_py(), column.type) for name, column in columns.items()}
    except (UnicodeDecodeError, ValueError):
        return {}


def _without_json(value: Any, kind: Any) -> Any:
    """``value`` of Arrow's type ``kind`` with the parts that are stored as JSON decoded."""
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


def _check_column(array: Any, shape: RowShape, column: str, path: Path, first_row: int) -> None:
    """Text without nulls is checked by Arrow, the rest cell by cell."""
    import pyarrow as pa

    if (
        shape.cell == "text"
        and not array.null_count
        and (pa.types.is_string(array.type) or pa.types.is_large_string(array.type))
    ):
        try:
            array.validate(full=True)
            return
        except pa.ArrowInvalid:
            pass  # the loop below finds the row
    stored_as_json = "json" in str(array.type)
    for offset in range(len(array)):
        try:
            problem = cell_problem(
                _without_json(array[offset].as_py(), array.type) if stored_as_json else array[offset].as_py(),
                shape.cell,
            )
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 (byte 0x{error.object[error.start]:02x} at position {error.start + 1})"
        if problem:
            raise bad_cell(str(path), f"row {first_row + offset}", column, problem)


def load_split(source: DataSource) -> Dataset:
    """The rows of ``source``.

    Local files are read as they are, without the datasets library's guesses (no dates from text, no missing
    values from the word "None"). Call :func:`check_source` first: the errors here are the library's for what
    that did not reach.

    Raises:
        UserError: as :func:`check_source`.
    """
    if source.mixture:
        return _load_mixture(source)
    path = source.path
    if path is None:
        return hub.load(source.name or "", source.config, source.split)
    folder = files.find(path)
    selected = folder.files(source.split)
    dataset = _load_saved(folder, source) if folder.saved else _load_files(selected, folder.format)
    dataset = _slice(dataset, source.split)
    if not len(dataset):
        raise DataError("the data set holds no rows", where=str(source), fix="give a file with rows in it")
    return dataset


def _load_saved(folder: files.Folder, source: DataSource) -> Dataset:
    import datasets

    for path in folder.files(source.split):
        for _ in files.batches(path, "arrow"):
            """Offsets that point outside of the file end here, not in a crash later."""
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
        rows = [row for path in paths for _, row in files.rows(path, form)]
        return datasets.Dataset(_table_of_rows(rows), fingerprint=uuid.uuid4().hex)
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


def _table(path: Path, form: files.Format) -> Any:
    import pyarrow as pa

    batches = list(files.batches(path, form))
    return pa.Table.from_batches(batches).replace_schema_metadata(None) if batches else pa.table({})


def _table_of_rows(rows: list[files.Row]) -> Any:
    import pyarrow as pa

    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: _column([row.get(name) for row in rows]) for name in names})


def _column(cells: list[Any]) -> Any:
    """``cells`` as an Arrow array that gives back exactly them.

    Arrow would fill absent keys with nulls, widen 1 beside 1.5 and refuse mixed types, and a template writes
    all of that into the prompt. Such a column is kept as JSON, as the datasets library does (``Json``).
    """
    import pyarrow as pa

    try:
        array = pa.array(cells)
        if not pa.types.is_nested(array.type) or _canonical(array.to_pylist()) == _canonical(cells):
            return array
    except (pa.ArrowException, OverflowError):
        pass
    texts = [None if cell is None else json.dumps(cell, ensure_ascii=False) for cell in cells]
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))


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
