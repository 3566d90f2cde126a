"""Object storage, by fsspec: data and models are fetched from it once, runs are published to it. No torch.

A copy lies in ``HF_HOME/podtune/store``, on the volume where models are. It is fetched aside, sealed with
what was fetched and renamed, so it is whole or absent; one process fetches, the others wait for it. What a
broken transfer left is gone on with. Credentials come from the environment or the cloud's own means, never
from a URL.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from podtune.run.errors import (
    UNAVAILABLE,
    CannotCreate,
    ConfigError,
    NoPermission,
    NotFound,
    Unavailable,
    UserError,
    near,
    warn,
)
from podtune.run.files import write_whole
from podtune.run.lock import hold
from podtune.run.record import now
from podtune.sft.source import hub

T = TypeVar("T")

SEAL = "seal.json"
PROBE = ".podtune-write-test"
PAUSES_S = (1.0, 4.0, 10.0)  # between attempts; each has the library's own retries in it
PARALLEL = 4
WAIT_S = 3600.0
# how a store says that an object is another one; without these, its time
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "content_md5", "blob_id", "lfs")
_TIMES = ("LastModified", "mtime", "updated", "last_modified", "created")
_SECRET = re.compile(
    r"://[^/@\s]*:[^/@\s]*@|[?&][^=]*(sig|signature|token|secret|password|credential|key)=", re.IGNORECASE
)
_PROTOCOL = re.compile(r"([a-z][a-z0-9+]*)://")
_DENIED = (
    "NoCredentials",
    "CredentialRetrieval",
    "TokenRetrieval",
    "Unauthorized",
    "DefaultCredentialsError",
)


def is_url(name: object) -> bool:
    """True for ``s3://...`` and the like."""
    return bool(_PROTOCOL.match(str(name)))


def refuse_secret(url: str, where: str) -> None:
    """Raise :class:`UserError` if ``url`` has a password or a signature in it; without repeating it."""
    if is_url(url) and _SECRET.search(url):
        raise ConfigError(
            "the URL has a secret in it, which every record and log would show",
            where=where,
            fix="leave it out: credentials come from the environment (AWS_ACCESS_KEY_ID, ...), from a Secret "
            "by envFrom, or from workload identity",
        )


@functools.cache
def file_system(protocol: str) -> Any:
    """fsspec's file system for ``protocol``.

    Raises:
        UserError: it is not known, or its package is not installed.
    """
    import fsspec

    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ValueError:
        protocols = sorted(fsspec.available_protocols())
        raise ConfigError(
            f"no kind of storage is called {protocol}://{near(protocol, protocols)}",
            where="URL",
            fix="s3://, gs://, az://, hf:// or another protocol of fsspec",
        ) from None
    except ImportError as error:
        package = "podtune[s3]" if protocol in ("s3", "s3a") else (error.name or "").partition(".")[0]
        package = package or {"gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}.get(protocol, "")
        raise Unavailable(
            f"the package that reads {protocol}:// is not installed ({error})",
            where=f"{protocol}://",
            fix=f"pip install '{package}'" if package else "install it",
        ) from None
    if protocol in ("s3", "s3a"):  # the attempts are ours, see patiently
        patience = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 1}}
        storage = kind(config_kwargs=patience)
        storage.retries = 2
        return storage
    return kind()


@dataclass(frozen=True)
class Entry:
    """An object: where the file system has it, its size, and what changes when it does."""

    path: str
    bytes: int
    version: str


@dataclass(frozen=True)
class Remote:
    """An object, or all objects below a prefix. Every call is tried a few times."""

    url: str

    @property
    def fs(self) -> Any:
        """The file system that it is on."""
        return file_system(self.url.partition("://")[0])

    def path(self, name: str = "") -> str:
        """What the file system calls the object ``name`` below it."""
        root = str(self.fs._strip_protocol(self.url)).rstrip("/")
        return f"{root}/{name}" if name else root

    def listing(self, below: str = "") -> dict[str, Entry]:
        """The objects by their names (a single object by its own), of the folder ``below`` alone if one is
        given. Nothing, where there is not even a bucket.
        """

        def look() -> dict[str, dict[str, Any]]:
            self.fs.invalidate_cache()
            objects: dict[str, dict[str, Any]] = self.fs.find(self.path(below), detail=True)
            # a web server says sizes only when asked for each
            return {
                path: info if info.get("size") is not None else self.fs.info(path)
                for path, info in objects.items()
            }

        entries: dict[str, Entry] = {}
        try:
            objects = patiently(f"{self.url}/{below}" if below else self.url, look)
        except FileNotFoundError:
            return entries
        for path, info in objects.items():
            name = path.removeprefix(self.path()).lstrip("/") or path.rpartition("/")[2]
            if info.get("type") == "directory" or path.endswith("/"):
                continue
            if ".." in name.split("/"):
                raise NotFound(f"an object is called {name}", where=self.url, fix="rename it")
            entries[name] = Entry(path, int(info.get("size") or 0), _version(info))
        return entries

    def read(self, name: str) -> bytes | None:
        """The content of a small object; None if there is none."""
        try:
            content: bytes = patiently(f"{self.url}/{name}", lambda: self.fs.cat_file(self.path(name)))
        except FileNotFoundError:
            return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Make or replace the small object ``name``."""

        def put() -> None:
            self._folder_of(name)
            self.fs.pipe_file(self.path(name), content)

        patiently(f"{self.url}/{name}", put)

    def upload(self, files: Mapping[str, Path]) -> None:
        """Make or replace objects, each by its name and from a file."""

        def put(name: str) -> None:
            def attempt() -> None:
                self._folder_of(name)
                self.fs.put_file(str(files[name]), self.path(name))

            patiently(f"{self.url}/{name}", attempt)

        _together(put, list(files))

    def _folder_of(self, name: str) -> None:
        """Where there are folders, that of ``name``. In a store of objects this would ask for the bucket."""
        if isinstance(self.fs.protocol, str) or {"file", "local", "sftp", "smb"} & set(self.fs.protocol):
            self.fs.makedirs(self.path(name).rpartition("/")[0], exist_ok=True)

    def download(self, entries: Mapping[str, Entry], folder: Path) -> None:
        """Objects into ``folder``, by their names. A file is there whole or not at all; one that is there
        already is kept.
        """

        def get(name: str) -> None:
            target, entry = folder / name, entries[name]
            if target.is_file() and target.stat().st_size == entry.bytes:
                return
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f".{target.name}.part")

            def attempt() -> None:
                self.fs.get_file(entry.path, str(part))
                if (size := part.stat().st_size) != entry.bytes:
                    raise OSError(f"{size} bytes arrived instead of {entry.bytes}")

            patiently(f"{self.url}/{name}", attempt)
            part.replace(target)

        _together(get, list(entries))

    def remove(self, names: Iterable[str]) -> None:
        """Delete objects; one that is gone already is as it should be."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                patiently(f"{self.url}/{name}", functools.partial(self.fs.rm_file, self.path(name)))


def check_writable(url: str) -> None:
    """Write and remove an object below ``url``, before anything expensive.

    Raises:
        UserError: says which and why.
    """
    try:
        Remote(url).write(PROBE, b"podtune")
    except FileNotFoundError as error:
        raise CannotCreate(
            f"cannot be written: {_reason(error)}", where=url, fix="make the bucket, or correct its name"
        ) from None
    Remote(url).remove([PROBE])


def _version(info: Mapping[str, Any]) -> str:
    return str(next((info[key] for key in (*_VERSIONS, *_TIMES) if info.get(key)), ""))


def _together(work: Callable[[str], None], names: Sequence[str]) -> None:
    """``work`` on every name, some at once; the first failure ends it."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        results = [pool.submit(work, name) for name in names]
        try:
            for result in results:
                result.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def patiently(what: str, call: Callable[[], T]) -> T:
    """The result of ``call``, tried again after a pause when the network or the store fails.

    Raises:
        FileNotFoundError: there is no such object.
        UserError: access is denied, or every attempt failed; says why.
    """
    for pause in (*PAUSES_S, None):
        try:
            return call()
        except (FileNotFoundError, UserError):
            raise
        except Exception as error:  # every store has errors of its own
            if _denied(error):
                raise NoPermission(
                    f"access is denied: {_reason(error)}",
                    where=what,
                    fix="give credentials by the environment, a Secret (envFrom) or workload identity",
                ) from None
            if pause is None:
                raise Unavailable(
                    f"the store does not do it: {_reason(error)}",
                    where=what,
                    fix="check the network, the bucket's name and the endpoint (AWS_ENDPOINT_URL); what has "
                    "arrived is kept",
                ) from error
            warn(f"{what}: {_reason(error)}; trying again in {pause:.0f} s")
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _denied(error: Exception) -> bool:
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    named = isinstance(error, PermissionError) or type(error).__name__.startswith(_DENIED)
    return named or status in (401, 403)


def _reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# ---- copies on the volume ----
def copy_of(url: str) -> Path:
    """Where the copy of ``url`` lies, or will; ``file://`` is not copied."""
    if url.startswith(("file://", "local://")):
        return Path(Remote(url).path())
    return _entry(url) / (url.rstrip("/").rpartition("/")[2] or "copy")


def _entry(url: str) -> Path:
    key = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:20]
    return hub.hf_home() / "podtune" / "store" / key


def _seal(url: str) -> dict[str, Any] | None:
    """What the copy of ``url`` was sealed with; None if there is none, or a file of it is not as it was."""
    try:
        seal: dict[str, Any] = json.loads((_entry(url) / SEAL).read_text(encoding="utf-8"))
        whole = all(
            (copy_of(url) / name if seal["folder"] else copy_of(url)).stat().st_size == size
            for name, size in seal["files"].items()
        )
        return seal if whole and seal["version"] else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def local(url: str, *, unwanted: Sequence[str] = ()) -> Path:
    """The copy of ``url``, fetched if there is none. Does not ask whether it is still the same."""
    return copy_of(url) if url.startswith("file://") or _seal(url) else fetch(url, unwanted=unwanted)


def version(url: str) -> str:
    """What changes when the objects at ``url`` do; that of the copy where the store cannot be asked.

    Raises:
        UserError: as :func:`fetch`.
    """
    if url.startswith("file://"):
        return ""
    seal = _seal(url)
    if seal and hub.offline():
        return str(seal["version"])
    try:
        return _version_of(_objects(url))
    except UserError as error:
        if not seal or error.code != UNAVAILABLE:
            raise
        warn(f"{error.where}: {error.what}; the copy of {seal['at']} is used")
        return str(seal["version"])


def _objects(url: str) -> dict[str, Entry]:
    listing = Remote(url).listing()
    if not listing:
        raise NotFound("there is no such object, and none below it", where=url, fix="correct the URL")
    return listing


def _version_of(objects: Mapping[str, Entry]) -> str:
    parts = [[name, entry.bytes, entry.version] for name, entry in sorted(objects.items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def fetch(url: str, *, unwanted: Sequence[str] = (), wait_s: float = WAIT_S) -> Path:
    """The copy of ``url`` as the store has it now: fetched, or kept where nothing has changed.

    Under HF_HUB_OFFLINE, or where the store cannot be asked, a copy is used as it is. ``unwanted`` are
    patterns of objects that are left out.

    Raises:
        UserError: 66 nothing is there, 69 the store cannot be reached or its package is missing, 77 no
        access.
    """
    current = version(url)
    if url.startswith("file://"):
        return copy_of(url)

    def done() -> bool:
        seal = _seal(url)
        return bool(seal and seal["version"] == current)

    if done():
        return copy_of(url)
    entry = _entry(url)
    entry.parent.mkdir(parents=True, exist_ok=True)
    lock = entry.with_suffix(".lock")
    with hold(lock, until=done, wait_s=wait_s, what=f"fetching {url}") as held:
        if held and not done():
            _fetch(url, entry, current, unwanted)
    return copy_of(url)


def _fetch(url: str, entry: Path, current: str, unwanted: Sequence[str]) -> None:
    aside = entry.with_name(f".{entry.name}.{current[:12]}.part")
    for left in entry.parent.glob(f".{entry.name}.*.part"):  # of what was there before
        if left != aside:
            shutil.rmtree(left, ignore_errors=True)
    objects = _objects(url)
    if _version_of(objects) != current:
        raise Unavailable("changed while it was fetched", where=url, fix="start again")
    name = copy_of(url).name
    folder = set(objects) != {name} or objects[name].path != Remote(url).path()
    wanted = {
        key: each for key, each in objects.items() if not any(fnmatch(key, pattern) for pattern in unwanted)
    }
    total = sum(each.bytes for each in wanted.values())
    print(f"podtune: fetching {url}: {len(wanted)} objects, {total / 2**20:,.1f} MiB", flush=True)
    Remote(url).download(wanted, aside / name if folder else aside)
    seal = {
        "url": url,
        "version": current,
        "folder": folder,
        "at": now(),
        "files": {key: each.bytes for key, each in wanted.items()},
    }
    write_whole(aside / SEAL, json.dumps(seal, indent=1))
    shutil.rmtree(entry, ignore_errors=True)
    aside.rename(entry)
