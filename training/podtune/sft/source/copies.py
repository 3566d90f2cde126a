"""Copies of models and data sets in object storage, on the volume where models are. No torch.

A copy lies in ``HF_HOME/podtune/store``. It is fetched into a folder of a random name, which gets a manifest
and is renamed, so a copy is complete or absent; one process fetches, the others wait for it.

A URL is fetched only where the user wrote it, on the command line or in this run's own configuration. Of one
that a file names, an adapter or the record of a run, the copy is used (:func:`known`): whoever wrote that
file could otherwise have this machine ask any address.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path

from podtune.run.errors import NotFound, Unavailable, warn
from podtune.run.files import remove_parts, replacing_folder, write_atomically
from podtune.run.lock import hold
from podtune.run.record import now
from podtune.sft.source import hub
from podtune.sft.source.object_store import Entry, Remote, is_url

MANIFEST = "seal.json"
WAIT_S = 3600.0


def copy_of(url: str) -> Path:
    """Path of the copy of ``url``, whether it exists or not; ``file://`` is not copied."""
    if url.startswith("file://"):
        return Path(Remote(url).path())
    name = url.rstrip("/").rpartition("/")[2]
    return _entry(url) / ("copy" if name in ("", ".", "..") else name)


def _entry(url: str) -> Path:
    key = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:20]
    return hub.hf_home() / "podtune" / "store" / key


@dataclass(frozen=True)
class Copy:
    """What is known of a complete copy: the version that was fetched, and when."""

    url: str
    version: str
    at: str


def _complete(url: str) -> Copy | None:
    """Read what is known of the copy of ``url``; None if there is none."""
    if url.startswith("file://"):  # it is here, and is read where it lies
        return Copy(url, "", "")
    try:
        found = Copy(**json.loads((_entry(url) / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return found if copy_of(url).exists() else None


def local(url: str) -> Path:
    """Return the copy of ``url``, fetched only if there is none: during a run it stays what it was."""
    return copy_of(url) if _complete(url) else fetch(url)


def known(name: str, where: str) -> str:
    """Return ``name``, which the file ``where`` gives. Raises :class:`NotFound` for a URL without a copy."""
    if is_url(name) and _complete(name) is None:
        raise NotFound(
            f"{name} is not on this machine, and a URL is fetched only where you write it yourself",
            where=where,
            fix=f"if you trust it: podtune model info {shlex.quote(name)}, which fetches it",
        )
    return name


def version(url: str) -> str:
    """Hash the objects at ``url`` as they are now; where the store is unreachable return the copy's."""
    copy = _complete(url)
    if copy and (hub.offline() or url.startswith("file://")):
        return copy.version
    try:
        return _version_of(_objects(url))
    except Unavailable as error:
        if not copy:
            raise
        warn(f"{error.where}: {error.what}; the copy of {copy.at} is used")
        return copy.version


def _objects(url: str) -> dict[str, Entry]:
    listing = Remote(url).listing()
    if not listing:
        raise NotFound("there is no such object, and none below it", where=url, fix="correct the URL")
    return listing


def _version_of(objects: Mapping[str, Entry]) -> str:
    parts = [[name, entry.bytes, entry.version] for name, entry in sorted(objects.items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def fetch(url: str) -> Path:
    """Return the copy of ``url`` as the store has it now: fetched, or kept where nothing has changed.

    Under HF_HUB_OFFLINE, or where the store cannot be reached, a copy is used as it is. Pickled weights are
    left out. Of several processes one fetches, the others wait.

    Raises:
        NotFound: nothing is there.
        Unavailable: the store cannot be reached, or its package is missing.
        NoPermission: access is denied.
    """
    current, entry = version(url), _entry(url)

    def done() -> bool:
        copy = _complete(url)
        return copy is not None and copy.version == current

    if not done():
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = entry.with_suffix(".lock")
        with hold(lock, until=done, wait_s=WAIT_S, what=f"fetching {url}") as held:
            if held and not done():
                _fetch(url, entry, current)
    return copy_of(url)


def _fetch(url: str, entry: Path, current: str) -> None:
    """Download the version ``current`` of ``url`` as ``entry``; under its lock."""
    objects = _objects(url)
    if _version_of(objects) != current:
        raise Unavailable("changed while it was fetched", where=url, fix="start again")
    name = copy_of(url).name
    folder = set(objects) != {name} or objects[name].path != Remote(url).path()
    unwanted = {key for key in objects if any(fnmatch(key, pattern) for pattern in hub.UNWANTED)}
    wanted = {key: each for key, each in objects.items() if key not in unwanted}
    size = sum(each.bytes for each in wanted.values()) / 2**20
    print(f"podtune: fetching {url}: {len(wanted)} objects, {size:,.1f} MiB", flush=True)
    remove_parts(entry.parent, entry.name)
    with replacing_folder(entry) as staging_dir:
        Remote(url).download(wanted, staging_dir / name if folder else staging_dir)
        write_atomically(staging_dir / MANIFEST, json.dumps(asdict(Copy(url, current, now()))))
