"""The source of training rows: a file, a folder, a hub name or a mixture; found and checked without torch.

The names are those of TRL's ScriptArguments and DatasetMixtureConfig. What is found is read by load.py.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podtune.run.errors import ConfigError, DataError, UsageError
from podtune.run.files import stamp
from podtune.sft.data import files
from podtune.sft.data.cache import default_folder_if_usable
from podtune.sft.data.readers import placed_rows, rows
from podtune.sft.data.shapes import Row, RowShape, check_cells, detect, no_rows
from podtune.sft.source import copies, hub, object_store

EVALUATES = ("eval_strategy", "eval_on_start", "do_eval", "do_predict", "answer_rows")  # keys that ask for it
STREAMING = ("dataset_streaming", "streaming")  # TRL's keys for it, of one set and of mixtures
_EVAL_SPLITS = ("test", "eval", "validation")


@dataclass(frozen=True)
class DataSource:
    """A split of a data set: a file, a folder, a hub name, or entries of TRL's DatasetMixtureConfig."""

    name: str | None = None
    config: str | None = None  # of a hub data set
    split: str = "train"
    mixture: tuple[dict[str, Any], ...] = ()
    mixture_test_size: float | None = None
    seed: int = 42  # splits a mixture
    text_field: str = "text"
    columns: tuple[tuple[str, str], ...] = ()  # names in the files, and those that they get
    drop_incomplete: bool = False

    @property
    def path(self) -> Path | None:
        """The local file or folder, or None for a hub name and for mixtures."""
        return local_path(self.name) if self.name and not self.mixture else None

    def renames(self, names: Iterable[str]) -> dict[str, str]:
        """Return the new names of those columns that ``columns`` renames; each has to be among ``names``."""
        names = set(names)
        for old, new in self.columns:
            if not {old, new} & names:
                raise DataError(
                    f"there is no column '{old}' to rename; found {', '.join(sorted(names))}",
                    where=str(self),
                    fix="name columns of the data in `columns`",
                )
        return {old: new for old, new in self.columns if old in names and old != new}

    def stamps(self) -> str | None:
        """A hash that changes with any of the local files, without reading them; None where not all are.

        As with git's index, a file counts as unchanged while its size, its times and its inode are the same.
        """
        if self.path is None:
            return None
        stamps = [[str(file.resolve()), *stamp(file)] for file in files.find(self.path).files(self.split)]
        name = json.dumps([stamps, self.split, self.columns, self.drop_incomplete])
        return hashlib.sha256(name.encode()).hexdigest()[:32]

    def places(self, numbers: Sequence[int]) -> list[str]:
        """File and line of rows, counted from 1, for a message; the files are read once more for it."""
        if self.path is None or self.drop_incomplete:
            return [f"{self}, row {number}" for number in numbers]
        every = enumerate(placed_rows(self.path, self.split), 1)
        return [place for number, (place, _) in every if number in numbers]

    def fetch(self) -> None:
        """Have a copy of what lies in object storage, see :func:`podtune.sft.source.copies.fetch`."""
        names = [entry.get("path") for entry in self.mixture] if self.mixture else [self.name]
        for name in filter(object_store.is_url, names):
            copies.fetch(str(name))

    def __str__(self) -> str:
        if self.mixture:
            return "mixture"
        return f"{self.name}" + ("" if self.split == "train" else f" ({self.split})")


@dataclass(frozen=True)
class Sources:
    """The sources of training and evaluation rows that a configuration names; no file is read yet."""

    train: DataSource
    held_out: Mapping[str, DataSource]  # sets with splits to evaluate on, by the user's names; one has none
    eval_name: bool = False  # the configuration names a data set for evaluation
    test_split: str | None = None  # the split it names; None: one is looked for
    evaluates: bool = True  # at all: rows that nobody asks for are not read
    streaming: str = ""  # the key that asks for it
    cache: str | None = None  # the folder for tokenised data that is named; None: the Hugging Face cache

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Sources:
        """Read a configuration's values: TRL's keys and ``eval_dataset_name``. Raises :class:`UserError`."""
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
            text_field=values.get("dataset_text_field") or "text",
            columns=tuple((values.get("columns") or {}).items()),
            drop_incomplete=bool(values.get("drop_incomplete")),
        )
        eval_name = values.get("eval_dataset_name")
        names = eval_name if isinstance(eval_name, dict) else {"": eval_name} if eval_name else {}
        alone: dict[str, Any] = {"config": None, "split": "train", "mixture": ()}
        named = {str(key): dataclasses.replace(train, name=str(name), **alone) for key, name in names.items()}
        return cls(
            train,
            named or {"": train},
            bool(eval_name),
            # a name that only repeats the default is looked for like the default
            None if values.get("dataset_test_split") == "test" else values.get("dataset_test_split"),
            bool(eval_name or any(values.get(key) not in (None, False, 0, "no") for key in EVALUATES)),
            next((key for key in STREAMING if values.get(key)), ""),
            values.get("tokenized_cache"),
        )

    @functools.cached_property
    def cache_dir(self) -> Path | None:
        """The folder of tokenised data; None if none is named and the usual one cannot be written."""
        return Path(self.cache) if self.cache else default_folder_if_usable()

    @property
    def evaluation(self) -> DataSource | None:
        """The rows to evaluate on, of several sets the first; None if there are none or nothing asks."""
        return next(iter(self.evaluations.values()), None)

    @functools.cached_property
    def evaluations(self) -> dict[str, DataSource]:
        """Sets to evaluate on by name, looked for once; a single one has an empty name.

        Raises :class:`UserError` for a named split that is not there.
        """
        if not self.evaluates:
            return {}
        found = {key: self._evaluation_in(held_out) for key, held_out in self.held_out.items()}
        return {key: source for key, source in found.items() if source is not None}

    def _evaluation_in(self, held_out: DataSource) -> DataSource | None:
        if self.test_split and not held_out.mixture:
            split = dataclasses.replace(held_out, split=self.test_split)
            if split.path is not None:
                files.find(split.path).files(split.split)
            return split
        eval_source = find_eval_split(held_out)
        return held_out if eval_source is None and self.eval_name else eval_source

    def check(self) -> None:
        """Answer bad data before anything heavy is imported. Raises :class:`UserError`."""
        if self.streaming and (self.train.mixture or "[" in self.train.split):
            raise ConfigError(
                "a mixture, or a slice of a split, is not streamed",
                where=self.streaming,
                fix="name one set and a whole split, or leave it off",
            )
        self.train.fetch()
        for held_out in self.held_out.values() if self.eval_name else ():
            held_out.fetch()
        for source in (self.train, *self.evaluations.values()):
            check_source(source)

    def __str__(self) -> str:
        return str(self.train)


def renamed(row: Row, renames: Mapping[str, str]) -> Row:
    """``row`` with new names for columns; those that had such a name are left out."""
    if not renames:
        return row
    taken = set(renames.values()).difference(renames)
    return {renames.get(name, name): cell for name, cell in row.items() if name not in taken}


def local_path(name: str) -> Path | None:
    """``name`` as a path (of a URL: its copy's); None if it can be a hub name, ``user/set`` or ``set``."""
    if object_store.is_url(name):
        return copies.copy_of(name)
    path = Path(name).expanduser()
    looks_local = (
        name.startswith(("/", "./", "../", "~"))
        or name in (".", "..")
        or name.count("/") > 1
        or files.file_format(path) is not None
    )
    return path if looks_local or path.exists() else None


def find_eval_split(source: DataSource) -> DataSource | None:
    """Find the split of the same data set to evaluate on: test, eval or validation; None if it has none.

    A single file has none, whatever lies beside it, nor has a hub name whose splits are unknown.
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


def check_source(source: DataSource) -> None:
    """Find files, columns and the shape of their first rows before anything heavy is imported.

    All other rows are checked where they are read and tokenised, before a model is loaded.

    Raises:
        UserError: code 66 for what is missing or unreadable, 65 for what is in it (file, row, column), 69 for
            a hub that cannot be reached.
    """
    if source.mixture:  # TRL's to read
        return
    if source.path is None:
        hub.look_up(source.name or "")
        return
    folder = files.find(source.path)
    shape: RowShape | None = None
    for path in folder.files(source.split):
        place, row = next(rows(path, folder.format), ("", None))
        if row is None:
            continue
        row = renamed(row, source.renames(row))
        where = f"{path}, {place}"
        shape = shape or detect(row, where if folder.format == "json" else str(path), source.text_field)
        if all(row.get(name) is not None for name in shape.columns):  # the others are told all at once
            check_cells(row, shape, where)
    if shape is None:
        raise no_rows(str(source.path))
