"""Object storage, by fsspec: data and models are fetched from it once, runs are published to it. No torch.

A copy lies in ``HF_HOME/podtune/store``, on the volume where models are. It is fetched into a staging folder,
which gets a manifest and is renamed, so a copy is complete or absent; one process fetches, the others wait
for it. An interrupted transfer is resumed. Credentials come from the environment or the cloud's own means,
never from a URL.
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
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from podtune.run.errors import (
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

MANIFEST = "seal.json"
PROBE = ".podtune-write-test"
PAUSES_S = (1.0, 4.0, 10.0)  # between attempts; each has the library's own retries in it
PARALLEL = 4
WAIT_S = 3600.0
# keys by which stores say that an object was replaced; without these, its time
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
    """Return whether ``name`` is a URL such as ``s3://bucket/key``."""
    return bool(_PROTOCOL.match(str(name)))


def refuse_secret(url: str, where: str) -> None:
    """Refuse a ``url`` with a password or a signature in it, without repeating it.

    Raises:
        ConfigError: at ``where``.
    """
    if is_url(url) and _SECRET.search(url):
        raise ConfigError(
            "the URL has a secret in it, which every record and log would show",
            where=where,
            fix="leave it out: credentials come from the environment (AWS_ACCESS_KEY_ID, ...), from a Secret "
            "by envFrom, or from workload identity",
        )


@functools.cache
def file_system(protocol: str) -> Any:
    """Open fsspec's file system for ``protocol``.

    Raises:
        ConfigError: the protocol is not known.
        Unavailable: its package is not installed.
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
    if protocol in ("s3", "s3a"):  # the attempts are ours, see with_retries
        patience = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 1}}
        storage = kind(config_kwargs=patience)
        storage.retries = 2
        return storage
    return kind()


@dataclass(frozen=True)
class Entry:
    """An object: its path in the file system, its size, and a value that changes when it is replaced."""

    path: str
    bytes: int
    version: str


@dataclass(frozen=True)
class Remote:
    """An object, or all objects below a prefix. Every call has retries."""

    url: str

    @property
    def fs(self) -> Any:
        """Its file system."""
        return file_system(self.url.partition("://")[0])

    def path(self, name: str = "") -> str:
        """Path of the object ``name`` below it in the file system."""
        root = str(self.fs._strip_protocol(self.url)).rstrip("/")
        return f"{root}/{name}" if name else root

    def listing(self, below: str = "") -> dict[str, Entry]:
        """List the objects by name (a single object by its own), or those in the folder ``below`` alone.

        Empty if there is not even a bucket.
        """

        def find() -> dict[str, dict[str, Any]]:
            self.fs.invalidate_cache()
            objects: dict[str, dict[str, Any]] = self.fs.find(self.path(below), detail=True)
            # a web server says sizes only when asked for each
            return {
                path: info if info.get("size") is not None else self.fs.info(path)
                for path, info in objects.items()
            }

        entries: dict[str, Entry] = {}
        try:
            objects = with_retries(f"{self.url}/{below}" if below else self.url, find)
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
        """Read a small object; None if there is none."""
        try:
            content: bytes = with_retries(f"{self.url}/{name}", lambda: self.fs.cat_file(self.path(name)))
        except FileNotFoundError:
            return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Create or replace the small object ``name``."""

        def put() -> None:
            self._folder_of(name)
            self.fs.pipe_file(self.path(name), content)

        with_retries(f"{self.url}/{name}", put)

    def upload(self, files: Mapping[str, Path]) -> None:
        """Create or replace objects from files, by name."""

        def put(name: str) -> None:
            def attempt() -> None:
                self._folder_of(name)
                self.fs.put_file(str(files[name]), self.path(name))

            with_retries(f"{self.url}/{name}", attempt)

        _in_parallel(put, files)

    def _folder_of(self, name: str) -> None:
        """Create the folder of ``name``, except in object stores, which would create the bucket."""
        if isinstance(self.fs.protocol, str) or {"file", "local", "sftp", "smb"} & set(self.fs.protocol):
            self.fs.makedirs(self.path(name).rpartition("/")[0], exist_ok=True)

    def download(self, entries: Mapping[str, Entry], folder: Path) -> None:
        """Download objects into ``folder``, by name. A file is complete or absent; a complete one is kept."""

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

            with_retries(f"{self.url}/{name}", attempt)
            part.replace(target)

        _in_parallel(get, entries)

    def remove(self, names: Iterable[str]) -> None:
        """Delete objects, of which some may be gone already."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                with_retries(f"{self.url}/{name}", functools.partial(self.fs.rm_file, self.path(name)))


def check_writable(url: str) -> None:
    """Write and remove an object below ``url``, before anything expensive.

    Raises:
        UserError: the bucket does not exist or cannot be written.
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


def _in_parallel(work: Callable[[str], None], names: Iterable[str]) -> None:
    """Call ``work`` on every name, some at once; after the first failure none is begun."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(work, names))


def with_retries(what: str, call: Callable[[], T]) -> T:
    """Return what ``call`` does, tried again after a pause when the network or the store fails.

    Raises:
        FileNotFoundError: there is no such object.
        NoPermission: access is denied.
        Unavailable: every attempt failed.
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
                    f"the transfer failed after {len(PAUSES_S) + 1} attempts: {_reason(error)}",
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
    """Path of the copy of ``url``, whether it exists or not; ``file://`` is not copied."""
    if url.startswith(("file://", "local://")):
        return Path(Remote(url).path())
    return _entry(url) / (url.rstrip("/").rpartition("/")[2] or "copy")


def _entry(url: str) -> Path:
    key = hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:20]
    return hub.hf_home() / "podtune" / "store" / key


@dataclass(frozen=True)
class Manifest:
    """Description of a complete copy: the version that was fetched, and the bytes of each file."""

    url: str
    version: str
    folder: bool
    at: str
    files: dict[str, int]


def _complete(url: str) -> Manifest | None:
    """Read the manifest of the copy of ``url``; None if there is none, or a file's size is another."""
    try:
        manifest = Manifest(**json.loads((_entry(url) / MANIFEST).read_text(encoding="utf-8")))
        copy = copy_of(url)
        sizes = {name: (copy / name if manifest.folder else copy).stat().st_size for name in manifest.files}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return manifest if manifest.version and sizes == manifest.files else None


def local(url: str, *, unwanted: Sequence[str] = ()) -> Path:
    """Return the copy of ``url``, fetched only if there is none: during a run it stays what it was."""
    return copy_of(url) if url.startswith("file://") or _complete(url) else fetch(url, unwanted=unwanted)


def version(url: str) -> str:
    """Return a hash that changes when the objects at ``url`` do; the copy's where the store is unreachable.

    Raises:
        UserError: as :func:`fetch`.
    """
    if url.startswith("file://"):
        return ""
    copy = _complete(url)
    if copy and hub.offline():
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


def fetch(url: str, *, unwanted: Sequence[str] = (), wait_s: float = WAIT_S) -> Path:
    """Return the copy of ``url`` as the store has it now: fetched, or kept where nothing has changed.

    Under HF_HUB_OFFLINE, or where the store cannot be reached, a copy is used as it is. ``unwanted`` are
    patterns of objects that are left out. Of several processes one fetches; the others wait ``wait_s``.

    Raises:
        NotFound: nothing is there.
        Unavailable: the store cannot be reached, or its package is missing.
        NoPermission: access is denied.
    """
    current = version(url)
    if url.startswith("file://"):
        return copy_of(url)

    def done() -> bool:
        copy = _complete(url)
        return copy is not None and copy.version == current

    if done():
        return copy_of(url)
    entry = _entry(url)
    entry.parent.mkdir(parents=True, exist_ok=True)
    with hold(entry.with_suffix(".lock"), until=done, wait_s=wait_s, what=f"fetching {url}") as held:
        if held and not done():
            _fetch(url, entry, current, unwanted)
    return copy_of(url)


def _fetch(url: str, entry: Path, current: str, unwanted: Sequence[str]) -> None:
    """Download the version ``current`` of ``url`` into a staging folder, and rename that to ``entry``."""
    # named after the version: an interrupted fetch of it resumes here, another version's is removed
    staging = entry.with_name(f".{entry.name}.{current[:12]}.part")
    for stale in entry.parent.glob(f".{entry.name}.*.part"):
        if stale != staging:
            shutil.rmtree(stale, ignore_errors=True)
    objects = _objects(url)
    if _version_of(objects) != current:
        raise Unavailable("changed while it was fetched", where=url, fix="start again")
    name = copy_of(url).name
    folder = set(objects) != {name} or objects[name].path != Remote(url).path()
    wanted = {
        key: each for key, each in objects.items() if not any(fnmatch(key, pattern) for pattern in unwanted)
    }
    sizes = {key: each.bytes for key, each in wanted.items()}
    print(
        f"podtune: fetching {url}: {len(wanted)} objects, {sum(sizes.values()) / 2**20:,.1f} MiB", flush=True
    )
    Remote(url).download(wanted, staging / name if folder else staging)
    manifest = Manifest(url, current, folder, now(), sizes)
    write_whole(staging / MANIFEST, json.dumps(asdict(manifest), indent=1))
    shutil.rmtree(entry, ignore_errors=True)
    staging.rename(entry)
