"""The data files at a path: their format, and the split that each belongs to. Needs no torch."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from podtune.run.errors import DataError, NotFound, near

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


@dataclass(frozen=True)
class Folder:
    """The data files at a path, by split and all of one format. A single file is the split ``train``."""

    root: Path
    format: Format
    splits: dict[str, tuple[Path, ...]]

    def files(self, split: str) -> tuple[Path, ...]:
        """Return the files of ``split``; eval and validation mean each other. Raises :class:`NotFound`."""
        meant = split_of_word(split)
        for candidate in (split, *(("eval", "validation") if meant in ("eval", "validation") else (meant,))):
            if candidate in self.splits:
                return self.splits[candidate]
        raise NotFound(
            f"there is no split '{split}'; found {', '.join(self.splits)}",
            where=str(self.root),
            fix="name one of those, or name the file itself",
        )


def file_format(path: Path) -> Format | None:
    """The format that the name of ``path`` says, also behind ``.gz`` and the like; None if it says none."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    return FORMATS.get(suffixes[-1]) if suffixes else None


def split_of_word(word: str) -> str | None:
    """The split that a word such as ``dev`` means."""
    return next((split for split, words in SPLITS.items() if word.lower() in words), None)


def split_of(path: Path, root: Path) -> str | None:
    """The split in the name of a file below ``root``: ``train-00-of-02.parquet``, ``val/part-1.jsonl``."""
    relative = path.relative_to(root)
    for part in (relative.name.split(".")[0], *reversed(relative.parts[:-1])):
        for word in re.split(r"[^A-Za-z]+", part):
            if split := split_of_word(word):
                return split
    return None


def find(path: Path) -> Folder:
    """Find the data files at ``path``, a file or a folder.

    Raises:
        UserError: missing, unreadable, of an unknown format, or a folder with no file or several formats.
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
    except PermissionError as error:
        raise NotFound("cannot be read: permission denied", where=str(error.filename or where)) from None
    beside = os.listdir(path.parent) if os.access(path.parent, os.R_OK) else []
    raise NotFound(f"no such file or folder{near(path.name, beside)}", where=where, fix="correct the path")


def _saved(root: Path) -> Folder | None:
    """A folder written by ``save_to_disk``: one data set, or one a split."""
    if (root / "dataset_dict.json").is_file():
        names = read_json(root / "dataset_dict.json").get("splits", [])
        splits = {str(name): _saved_files(root / str(name)) for name in names}
        return Folder(root, "arrow", splits)
    if (root / "state.json").is_file() and (root / "dataset_info.json").is_file():
        split = str(read_json(root / "state.json").get("_split") or "train").split("[")[0]
        return Folder(root, "arrow", {split if split.isidentifier() else "train": _saved_files(root)})
    return None


def _saved_files(root: Path) -> tuple[Path, ...]:
    entries = read_json(root / "state.json").get("_data_files") or []
    files = tuple(root / str(entry["filename"]) for entry in entries)
    for file in files:
        if not file.is_file():
            raise NotFound("a file of the saved data set is missing", where=str(file), fix="save it again")
    return files


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a small file. Raises :class:`UserError`."""
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
    # other programs leave _SUCCESS, .crc and the like beside the data
    def hidden(path: Path) -> bool:
        return any(part.startswith((".", "_")) for part in path.relative_to(root).parts)

    found = (path for path in sorted(root.rglob("*")) if path.is_file() and not hidden(path))
    files = {path: form for path in found if (form := file_format(path))}
    if len({*files.values()}) > 1:  # a card or a vocabulary in JSON beside the data
        files = {path: form for path, form in files.items() if ".json" not in path.suffixes}
    formats = sorted({*files.values()})
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
    splits: dict[str, tuple[Path, ...]] = {}
    for path in files:
        name = split_of(path, root) or ""
        splits[name] = (*splits.get(name, ()), path)
    rest = splits.pop("", ())
    if rest and "train" not in splits:  # shards without a split in their names
        splits["train"] = rest
    return Folder(root, formats[0], {name: splits[name] for name in SPLITS if name in splits})
