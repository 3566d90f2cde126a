"""The files that ``podtune lint`` is given: names, directories, globs, and stdin."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from podtune.cluster.lint.documents import DISTRIBUTED, read
from podtune.run.errors import NotFound

ENDINGS = (".yaml", ".yml", ".json")
STDIN = "-"
#: what makes a file of a directory worth reading
WORTH = re.compile(
    r"(?i:PyTorchJob|TrainJob|TrainingRuntime|PersistentVolumeClaim|pytorch-job-name)"
    rf"|\bkind\"?: *\"?Job\b(?s:.*?)(?:{DISTRIBUTED.pattern})"
)
KUSTOMIZATION = "kustomization.yaml"


def read_sources(names: list[str]) -> list[tuple[str, str]]:
    """The name and the text of every file that ``names`` stand for.

    Raises:
        NotFound: one of them cannot be read.
    """
    sources: list[tuple[str, str]] = []
    for name in names:
        if os.path.isdir(name):
            sources += _in_directory(Path(name))
            continue
        matches = [name] if name == STDIN or os.path.exists(name) else sorted(glob.glob(name, recursive=True))
        for match in matches or [name]:
            path = Path(match)
            if not path.is_dir() and path.name not in _patches(path.parent):
                sources.append((match, _text(match)))
    return sources


def _in_directory(folder: Path) -> Iterator[tuple[str, str]]:
    """Read the files below ``folder`` with jobs or claims in them, but for hidden ones and parts of objects.

    Templates of charts and patches of kustomize are parts of objects only.
    """
    for root, folders, files in os.walk(folder):
        left_out = {"templates"} if "Chart.yaml" in files else set()
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in left_out)
        left_out = {KUSTOMIZATION, *_patches(Path(root))}
        for file in sorted(files):
            if file.startswith(".") or file in left_out or not file.endswith(ENDINGS):
                continue
            path = os.path.join(root, file)
            try:
                text = _text(path)
            except NotFound:
                continue  # not text, so no manifest
            if WORTH.search(text):
                yield path, text


def _patches(folder: Path) -> set[str]:
    """Names of the files that a kustomization of this folder applies as patches."""
    file = folder / KUSTOMIZATION
    # a patch is a part of an object, of which half the fields would be missing
    documents, _ = read(_text(str(file)), KUSTOMIZATION) if file.is_file() else ([], [])
    names: set[str] = set()
    for document in documents:
        for key in ("patches", "patchesStrategicMerge"):
            listed = document.content.get(key)
            for entry in listed if isinstance(listed, list) else []:
                names.add(os.path.normpath(str(entry.get("path") if isinstance(entry, dict) else entry)))
    return names


def _text(name: str) -> str:
    try:
        content = sys.stdin.buffer.read() if name == STDIN else Path(name).read_bytes()
        # editors of Windows begin a file with a byte order mark
        return content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8: {error}"
        fix = "name a YAML file, a directory, or - for stdin"
        raise NotFound(f"cannot read it: {reason}", where=name, fix=fix) from error
