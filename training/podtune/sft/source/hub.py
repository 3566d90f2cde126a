"""The Hugging Face hub with a short timeout. No torch.

The hub's own client retries for 23 s. One request with a short timeout comes first; if it fails, a copy in
the cache is used, and without one the error says so.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from podtune.run.errors import DataError, NoPermission, NotFound, Unavailable, first_line

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

Kind = Literal["dataset", "model"]
TIMEOUT_S = 4.0
# Pickled weights run code when they are loaded, and safetensors lie beside them nearly everywhere. The last
# two are another format's copy of the weights, and the shards from which FSDP resumes.
UNWANTED = (
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.gguf"),
    *("original/*.safetensors", "sharded/*.safetensors"),
)


def offline() -> bool:
    """Return whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set."""
    return any(
        os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def look_up(name: str, kind: Kind = "dataset", revision: str | None = None) -> tuple[str, ...] | None:
    """List the files of ``name`` on the hub; None where the copy in the cache has to do.

    If the hub cannot be reached, HF_HUB_OFFLINE is set for this process and those it starts: no later call
    retries.

    Raises:
        NotFound: the hub says that there is no such thing, or it is not cached and HF_HUB_OFFLINE is set.
        NoPermission: it is gated, and the token has no access.
        Unavailable: the hub cannot be reached and nothing is cached.
    """
    unreachable = ""
    if not offline():
        try:
            return _ask(name, kind, revision)
        except ConnectionError as error:
            unreachable = str(error)
    if cached(name, kind):
        go_offline()
        return None
    if unreachable:
        raise Unavailable(
            f"the hub cannot be reached ({unreachable}) and the {kind} is not in the cache",
            where=f"{name} at {os.environ.get('HF_ENDPOINT') or 'the default endpoint'}",
            fix="give a local path; or set HF_HUB_OFFLINE=1 and HF_HOME to a volume that holds it; or check "
            "the network and the proxy",
        )
    command = f"hf download {name}" + (" --repo-type dataset" if kind == "dataset" else "")
    raise NotFound(
        f"the {kind} is neither a local path nor in the cache, and HF_HUB_OFFLINE is set",
        where=name,
        fix=f"give a local path, or fill the cache ({_cache_root()}) where there is a network: {command}",
    )


def _ask(name: str, kind: Kind, revision: str | None) -> tuple[str, ...]:
    """Ask the hub once for the files of ``name``; a ConnectionError says why there is no answer."""
    from huggingface_hub import HfApi, errors

    try:
        info = HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=TIMEOUT_S)
        # the list of a gated one is public, its files are not
        if getattr(info, "gated", False):
            HfApi().auth_check(name, repo_type=kind)
        return tuple(item.rfilename for item in getattr(info, "siblings", None) or ())
    except errors.HFValidationError:
        what = f"no such file or folder, and not a name that a {kind} on the hub can have"
        fix = "correct the path"
    except errors.GatedRepoError:
        token = "the token in HF_TOKEN has no access" if os.environ.get("HF_TOKEN") else "HF_TOKEN is not set"
        raise NoPermission(
            f"the {kind} is gated and {token}",
            where=name,
            fix="accept its terms on its page and set HF_TOKEN to a token that may read it",
        ) from None
    except errors.RevisionNotFoundError:
        raise no_revision(name, revision) from None
    except errors.RepositoryNotFoundError:
        what = f"no such file or folder, and no such {kind} on the hub (or it is private)"
        fix = "correct the name, or set HF_TOKEN for a private one"
    except Exception as error:  # every transport has errors of its own; all mean that there is no answer
        raise ConnectionError(f"{type(error).__name__}: {str(error)[:120]}") from error
    raise NotFound(what, where=name, fix=fix)


def no_revision(name: str, revision: str | None) -> NotFound:
    """Make the error for a revision that the hub, or the cache, does not have."""
    what = f"there is no revision {revision or 'main'!r} of it"
    return NotFound(what, where=name, fix="give a branch, tag or commit")


def cached(name: str, kind: Kind = "dataset") -> bool:
    """Return whether the cache of the hub, or of the datasets library, holds something under ``name``."""
    folder = f"{kind}s--{name.replace('/', '--')}"
    if (_cache_root() / folder / "snapshots").is_dir():
        return True
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or hf_home() / "datasets") / name.replace("/", "___")
    return kind == "dataset" and (prepared.is_dir() or prepared.with_name(prepared.name.lower()).is_dir())


def hf_home() -> Path:
    """The Hugging Face cache: HF_HOME, or the libraries' default."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(os.environ.get("HF_HOME") or default).expanduser()


def _cache_root() -> Path:
    return Path(
        os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or hf_home() / "hub"
    )


def go_offline() -> None:
    """Set HF_HUB_OFFLINE, also in the libraries that have read it already."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Both read the variable once, when they are imported, and have no function to change it afterwards; each
    # further call of theirs would retry for 23 s.
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:
            sys.modules[module].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def split_names(name: str, config: str | None) -> list[str]:
    """List the splits of a data set on the hub; empty if they are unknown."""
    import datasets

    look_up(name)
    try:
        return list(datasets.get_dataset_split_names(name, config))
    except (OSError, ValueError):
        return []


def load(name: str, config: str | None, split: str, *, streaming: bool = False) -> Dataset | IterableDataset:
    """Load one split of a data set on the hub, a ``Dataset``, or stream it without a copy.

    Raises :class:`UserError` as :func:`look_up`; or names the configurations and splits that there are.
    """
    look_up(name)
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split, streaming=streaming)
    except ValueError as error:  # unknown split or configuration: the library's message lists those it knows
        fix = "set --dataset_config and --dataset_train_split"
        raise NotFound(first_line(error), where=name, fix=fix) from None
    except datasets.exceptions.DatasetsError as error:
        fix = "look at the data set's page; a local copy works too"
        raise DataError(first_line(error), where=name, fix=fix) from None
    except OSError as error:
        raise Unavailable(
            f"the hub stopped answering: {first_line(error)}",
            where=name,
            fix="try again; or set HF_HUB_OFFLINE=1 with the data set in HF_HOME",
        ) from None
