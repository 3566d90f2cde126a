"""Object storage, by fsspec, with retries. No torch.

Credentials come from the environment or the cloud's own means, never from a URL.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from podtune.run.errors import CannotCreate, ConfigError, NoPermission, NotFound, Unavailable, UserError, warn
from podtune.run.files import open_regular

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")

PROBE = ".podtune-write-test"
PAUSES_S = (1.0, 4.0, 10.0)  # between attempts; each has the library's own retries in it
PARALLEL = 4
# keys by which stores say that an object was replaced; the last ones are its time
_VERSIONS = (
    *("ETag", "etag", "generation", "md5Hash", "content_md5", "blob_id", "lfs"),
    *("LastModified", "mtime", "updated", "last_modified", "created"),
)
#: where a URL may hold a secret: before an ``@`` (in some stores that is a name), after a colon that begins
#: no port, and in whatever follows the path
_SECRET = re.compile(
    r"(?!abfss?:|az:|hf:)[^:]+://[^/]*@|[^:]+://[^/]*:(?!\d*(/|$))|.*[?]|.*[#;][^/]*=", re.DOTALL
)
_PROTOCOL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
#: the protocols that are read and written, with the package that does; the others of fsspec are archives and
#: caches over one of these, or need arguments that a URL does not have
PACKAGES = {
    "file": "",
    **dict.fromkeys(("http", "https"), "aiohttp"),
    "hf": "huggingface_hub",
    **dict.fromkeys(("s3", "s3a"), "podtune[s3]"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "abfss"), "adlfs"),
}
_DENIED = ("NoCredentials", "CredentialRetrieval", "TokenRetrieval", "Unauthorized", "DefaultCredentials")


def is_url(name: object) -> bool:
    """Return whether ``name`` is a URL such as ``s3://bucket/key``."""
    return bool(_PROTOCOL.match(str(name)))


def refuse_secret(url: str, where: str) -> None:
    """Refuse a ``url`` with a password or signature in it, by a ConfigError that does not repeat it."""
    if is_url(url) and _SECRET.match(url):
        raise ConfigError(
            "the URL has a secret in it, or a place for one (user@, :word, ?name=value), which every record "
            "and log would show",
            where=where,
            fix="leave it out: credentials come from the environment (AWS_ACCESS_KEY_ID, ...), from a Secret "
            "by envFrom, or from workload identity",
        )


@functools.cache
def file_system(protocol: str) -> AbstractFileSystem:
    """Open fsspec's file system for ``protocol``, if it is known and installed. Raises :class:`UserError`."""
    import fsspec

    if protocol not in PACKAGES:
        raise ConfigError(
            f"{protocol}:// is not a storage that is read",
            where="URL",
            fix="one of " + ", ".join(f"{name}://" for name in PACKAGES),
        )
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise Unavailable(
            f"the package that reads {protocol}:// is not installed ({error})",
            where=f"{protocol}://",
            fix=f"pip install '{PACKAGES[protocol]}'",
        ) from None
    if protocol in ("s3", "s3a"):  # the attempts are ours, see with_retries
        patience = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 1}}
        storage = kind(config_kwargs=patience)
        storage.retries = 2
        return storage
    return kind(auto_mkdir=True) if protocol == "file" else kind()


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

    def __post_init__(self) -> None:
        refuse_secret(self.url, "URL")

    @property
    def fs(self) -> AbstractFileSystem:
        return file_system(self.url.partition("://")[0])

    def path(self, name: str = "") -> str:
        """Path of the object ``name`` below it in the file system."""
        root = str(self.fs._strip_protocol(self.url)).rstrip("/")
        return f"{root}/{name}" if name else root

    def listing(self, below: str = "") -> dict[str, Entry]:
        """List the objects by name (a single one by its own), or those below a folder; empty if none."""

        def find() -> dict[str, dict[str, Any]]:
            # fsspec keeps what it has listed as long as the process lives
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
            version = next((info[key] for key in _VERSIONS if info.get(key)), "")
            entries[name] = Entry(path, int(info.get("size") or 0), str(version))
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
        with_retries(f"{self.url}/{name}", lambda: self.fs.pipe_file(self.path(name), content))

    def _each(self, names: Iterable[str], transfer: Callable[[str], None]) -> None:
        """Transfer objects by name, a few at once."""

        def one(name: str) -> None:
            with_retries(f"{self.url}/{name}", functools.partial(transfer, name))

        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(one, names))

    def upload(self, files: Mapping[str, Path]) -> None:
        """Create or replace objects from files, by name; a link is an OSError."""

        def put(name: str) -> None:
            with open_regular(files[name]) as file:
                # by the open file: a link that takes its place meanwhile is not followed
                self.fs.put_file(f"/dev/fd/{file.fileno()}", self.path(name))

        self._each(files, put)

    def download(self, entries: Mapping[str, Entry], folder: Path) -> None:
        """Download objects by name into ``folder``, which is new."""

        def get(name: str) -> None:
            target, entry = folder / name, entries[name]
            target.parent.mkdir(parents=True, exist_ok=True)
            self.fs.get_file(entry.path, str(target))
            if (size := target.stat().st_size) != entry.bytes:
                raise OSError(f"{size} bytes arrived instead of {entry.bytes}")

        self._each(entries, get)

    def remove(self, names: Iterable[str]) -> None:
        """Delete objects, of which some may be gone already."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                with_retries(f"{self.url}/{name}", functools.partial(self.fs.rm_file, self.path(name)))


def check_writable(url: str) -> None:
    """Write and remove an object below ``url``, before anything expensive. Raises :class:`UserError`."""
    try:
        Remote(url).write(PROBE, b"podtune")
    except FileNotFoundError as error:
        raise CannotCreate(
            f"cannot be written: {_reason(error)}", where=url, fix="make the bucket, or correct its name"
        ) from None
    Remote(url).remove([PROBE])


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
                    fix="check the network, the bucket's name and the endpoint (AWS_ENDPOINT_URL)",
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
