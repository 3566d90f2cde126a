"""The files that ``podtune lint`` is given: names, directories, globs, and stdin."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from podtune.cluster.lint.documents import read
from podtune.run.errors import NotFound, UserError

ENDINGS = (".yaml", ".yml", ".json")
LARGEST = 64 * 1024**2  # bytes
#: what makes a file of a directory worth reading
WORTH = re.compile(
    r"PyTorchJob|TrainJob|TrainingRuntime|PersistentVolumeClaim|pytorch-job-name", re.IGNORECASE
)
KUSTOMIZATIONS = ("kustomization.yaml", "kustomization.yml", "Kustomization")


def texts(names: list[str]) -> tuple[list[tuple[str, str]], list[UserError]]:
    """(name, text) of every file that ``names`` stand for, and what could not be read."""
    pairs: list[tuple[str, str]] = []
    problems: list[UserError] = []
    for name in names:
        try:
            if name == "-":
                pairs.append((name, _stdin()))
            elif os.path.isdir(name):
                pairs += _of_directory(Path(name))
            else:
                matches = sorted(glob.glob(name, recursive=True)) if not os.path.exists(name) else [name]
                pairs += [(match, _text(match)) for match in matches or [name] if not os.path.isdir(match)]
        except UserError as error:
            problems.append(error)
    return pairs, problems


def _of_directory(folder: Path) -> Iterator[tuple[str, str]]:
    """Files below ``folder`` with jobs or claims in them, but for hidden ones and parts of objects.

    Templates of charts and patches of kustomize are parts of objects only.
    """
    for root, folders, files in os.walk(folder):
        chart = "Chart.yaml" in files
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and not (chart and name == "templates")
        )
        patches = _patches(Path(root), files)
        for file in sorted(files):
            if (
                not file.endswith(ENDINGS)
                or file.startswith(".")
                or file in patches
                or file in KUSTOMIZATIONS
            ):
                continue
            try:
                text = _text(os.path.join(root, file))
            except UserError:
                continue  # not text, so no manifest
            if WORTH.search(text):
                yield os.path.join(root, file), text


def _patches(root: Path, files: list[str]) -> set[str]:
    """Names of the files that a kustomization of this folder applies as patches."""
    names: set[str] = set()
    for file in set(KUSTOMIZATIONS) & set(files):
        documents, _ = read(_text(str(root / file)), file)
        for document in documents:
            content: dict[str, Any] = document.content
            entries = [*_listed(content, "patches"), *_listed(content, "patchesJson6902")]
            names |= {str(entry.get("path")) for entry in entries if isinstance(entry, dict)}
            names |= {str(entry) for entry in _listed(content, "patchesStrategicMerge")}
    return {os.path.normpath(name) for name in names}


def _listed(content: dict[str, Any], key: str) -> list[Any]:
    value = content.get(key)
    return value if isinstance(value, list) else []


def _stdin() -> str:
    if sys.stdin is None or sys.stdin.closed:
        raise NotFound("stdin is closed", where="-", fix="pipe a manifest in, or name a file")
    try:
        content = sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read().encode()
    except (OSError, ValueError) as error:
        raise NotFound(f"cannot read stdin: {error}", where="-") from error
    return _decoded(content, "-")


def _text(name: str) -> str:
    try:
        if os.path.getsize(name) > LARGEST:
            raise NotFound("it is larger than 64 MiB", where=name, fix="lint its parts")
        return _decoded(Path(name).read_bytes(), name)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        fix = "name a YAML file, a directory, or - for stdin"
        raise NotFound(f"cannot read it: {reason}", where=name, fix=fix) from error


def _decoded(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fix = "save it as UTF-8; name a YAML file, or - for stdin"
        raise NotFound("cannot read it: it is not UTF-8", where=name, fix=fix) from error
