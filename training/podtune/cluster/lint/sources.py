"""The files that ``podtune lint`` is given: names, directories, globs, and stdin."""

from __future__ import annotations

import glob
import os
import re
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podtune.cluster.job.manifest import Json
from podtune.cluster.lint.documents import read
from podtune.run.errors import NotFound, UserError

ENDINGS = (".yaml", ".yml", ".json")
TEMPLATES = (".yaml-template", ".yml-template", ".j2", ".tmpl", ".tpl")
STDIN = "-"
LARGEST = 64 * 1024**2  # bytes
#: what makes a file of a directory worth reading
WORTH = re.compile(
    r"PyTorchJob|TrainJob|TrainingRuntime|PersistentVolumeClaim|pytorch-job-name", re.IGNORECASE
)
KUSTOMIZATIONS = ("kustomization.yaml", "kustomization.yml", "Kustomization")


@dataclass
class Sources:
    """Contents of the files, those that could not be read, and templates, which are no YAML yet."""

    texts: list[tuple[str, str]] = field(default_factory=list)  # name, text
    problems: list[UserError] = field(default_factory=list)
    templates: list[str] = field(default_factory=list)


def read_sources(names: list[str]) -> Sources:
    """Read every file that ``names`` stand for."""
    sources = Sources()
    for name in names:
        try:
            if name == STDIN:
                sources.texts.append((name, _stdin()))
            elif os.path.isdir(name):
                _read_directory(Path(name), sources)
            else:
                matches = sorted(glob.glob(name, recursive=True)) if not os.path.exists(name) else [name]
                sources.texts += [
                    (match, _text(match)) for match in matches or [name] if not _passed_over(Path(match))
                ]
        except UserError as error:
            sources.problems.append(error)
    return sources


def _read_directory(folder: Path, sources: Sources) -> None:
    """Read the files below ``folder`` with jobs or claims in them, but for hidden ones and parts of objects.

    Templates of charts and patches of kustomize are parts of objects only.
    """
    for root, folders, files in os.walk(folder):
        chart = "Chart.yaml" in files
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and not (chart and name == "templates")
        )
        patches = _patches(Path(root))
        for file in sorted(files):
            if file.startswith(".") or file in patches or file in KUSTOMIZATIONS:
                continue
            path = os.path.join(root, file)
            if file.endswith((*ENDINGS, *TEMPLATES)):
                try:
                    text = _text(path)
                except UserError:
                    continue  # not text, so no manifest
                if WORTH.search(text) and file.endswith(ENDINGS):
                    sources.texts.append((path, text))
                elif WORTH.search(text):
                    sources.templates.append(path)


def _passed_over(path: Path) -> bool:
    """True for a folder that a pattern matched, and for a patch of kustomize, which is part of an object."""
    return path.is_dir() or path.name in _patches(path.parent)


def _patches(root: Path) -> set[str]:
    """Names of the files that a kustomization of this folder applies as patches."""
    names: set[str] = set()
    for file in KUSTOMIZATIONS:
        documents, _ = read(_text(str(root / file)), file) if (root / file).is_file() else ([], [])
        for document in documents:
            content = document.content
            entries = [*_listed(content, "patches"), *_listed(content, "patchesJson6902")]
            names |= {str(entry.get("path")) for entry in entries if isinstance(entry, dict)}
            names |= {str(entry) for entry in _listed(content, "patchesStrategicMerge")}
    return {os.path.normpath(name) for name in names}


def _listed(content: Json, key: str) -> list[Any]:
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
        # the pipe of <(command), of the shell, has a writer; one on a volume may wait for ever
        if stat.S_ISFIFO(os.stat(name).st_mode) and not name.startswith(("/dev/", "/proc/")):
            raise NotFound("it is a named pipe", where=name, fix=f"cat {name} | podtune lint -")
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
