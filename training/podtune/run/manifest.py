"""The manifest of a checkpoint: its step, what it belongs to, and size and hash of each file. No torch."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podtune.run.files import digest, open_regular, regular_files

MANIFEST = "podtune-manifest.json"
SCHEMA = "podtune.checkpoint/2"
NAME = re.compile(r"checkpoint-(\d+)")
#: a :class:`podtune.run.checkpoint.ResumeKey`, and how far the run was
Facts = dict[str, Any]
#: bytes and XXH3 hash of a checkpoint's files, by name
Files = dict[str, tuple[int, str]]


class Damaged(Exception):
    """A checkpoint, or its manifest, that is not as it was written; the text says what is wrong."""


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint."""

    step: int
    facts: Facts
    files: Files

    def text(self) -> str:
        """Write it as JSON, with the hash of its own content."""
        files = {name: {"bytes": size, "xxh3_128": hashed} for name, (size, hashed) in self.files.items()}
        content = {"schema": SCHEMA, "step": self.step, "facts": self.facts, "files": files}
        return json.dumps(content | {"xxh3_128": _own_digest(content)}, indent=1)


def read_manifest(content: bytes, name: str) -> Manifest:
    """Parse the manifest of the checkpoint called ``name``.

    Raises:
        Damaged: it is not as it was written, or that of another one.
    """
    try:
        manifest = json.loads(content)
        own = manifest.pop("xxh3_128", None)
        step, facts = manifest["step"], manifest["facts"]
        files = {file: (entry["bytes"], entry["xxh3_128"]) for file, entry in manifest["files"].items()}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise Damaged("its manifest cannot be read") from None
    if own != _own_digest(manifest):
        raise Damaged("its manifest has changed since it was written")
    if type(step) is not int or not isinstance(facts, dict):
        raise Damaged("its manifest cannot be read")
    if (named := NAME.fullmatch(name)) and int(named[1]) != step:
        raise Damaged(f"its manifest is of step {step}")
    return Manifest(step, facts, files)


def flushed_files(folder: Path) -> Files:
    """Describe the files in ``folder``, each flushed to the volume; links are left out."""
    files = regular_files(folder)
    with ThreadPoolExecutor(4) as pool:  # a flush waits for the volume, not for the processor
        return dict(zip(files, pool.map(_flushed, files.values()), strict=True))


def _flushed(path: Path) -> tuple[int, str]:
    with open_regular(path) as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, digest(path)


def _own_digest(manifest: dict[str, object]) -> str:
    """The hash of a manifest's content, whatever its order and white space."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode(errors="surrogatepass"))
