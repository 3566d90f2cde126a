"""The Hugging Face hub, with a bound: a hub that cannot be reached is answered in seconds instead of 23. No
torch.

The hub's own client retries for 23 s. One request with a short timeout comes first; if it fails, a copy in
the cache is used, and without one the error says so.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from podtune.run.errors import DataError, NotFound, Unavailable, UserError

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

Kind = Literal["dataset", "model"]
TIMEOUT_S = 4.0
# Pickled weights run code when they are loaded, and safetensors lie beside them nearly everywhere.
UNWANTED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "original/*")
T = TypeVar("T")


def offline() -> bool:
    """True if HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) says so."""
    return any(
        os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def check(name: str, kind: Kind = "dataset") -> None:
    """Make sure that ``name`` can be had: it is on the hub, or in the cache. At most :data:`TIMEOUT_S` and a
    little.

    Without the hub, HF_HUB_OFFLINE is set for this process and those it starts, so that no later call
    retries.

    Raises:
        UserError: 66 if the hub says that there is no such thing, 69 if the hub cannot be reached and nothing
        is cached.
    """
    if offline():
        if not cached(name, kind):
            raise NotFound(
                f"the {kind} is neither a local path nor in the cache, and HF_HUB_OFFLINE is set",
                where=name,
                fix=(
                    f"give a local path, or fill the cache ({_cache_root()}) where there is a network: hf "
                    f"download {name}"
                )
                + (" --repo-type dataset" if kind == "dataset" else ""),
            )
        return
    problem = _ask(name, kind)
    if problem is None:
        return
    if isinstance(problem, UserError):
        raise problem
    if cached(name, kind):
        go_offline()
        return
    raise Unavailable(
        f"the hub cannot be reached ({problem}) and the {kind} is not in the cache",
        where=f"{name} at {_endpoint()}",
        fix="give a local path; or set HF_HUB_OFFLINE=1 and HF_HOME to a volume that holds it; or check the "
        "network and the proxy",
    )


def _ask(name: str, kind: Kind) -> UserError | str | None:
    """None if the hub has ``name``; a UserError if it says no; the reason if it cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    def ask() -> UserError | str | None:
        api = HfApi()
        try:
            (api.dataset_info if kind == "dataset" else api.model_info)(name, timeout=TIMEOUT_S - 1)
        except HFValidationError:
            return NotFound(
                f"no such file or folder, and not a name that a {kind} on the hub can have",
                where=name,
                fix="correct the path",
            )
        except GatedRepoError:
            return NotFound(
                f"the {kind} is gated", where=name, fix="accept its terms on its page and set HF_TOKEN"
            )
        except RepositoryNotFoundError:
            return NotFound(
                f"no such file or folder, and no such {kind} on the hub (or it is private)",
                where=name,
                fix="correct the name, or set HF_TOKEN for a private one",
            )
        except HfHubHTTPError as error:
            return f"it answered {error.response.status_code if error.response is not None else error}"
        except Exception as error:  # every transport has errors of its own; all mean that there is no answer
            return f"{type(error).__name__}: {str(error)[:120]}"
        return None

    silent: UserError | str | None = f"no answer within {TIMEOUT_S:.0f} s"
    return within(TIMEOUT_S, ask, silent)


def within(seconds: float, call: Callable[[], T], otherwise: T) -> T:
    """The result of ``call``, or ``otherwise`` after ``seconds``: name resolution knows no timeout of its
    own.
    """
    result: list[T] = []
    thread = threading.Thread(target=lambda: result.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0] if result else otherwise


def cached(name: str, kind: Kind = "dataset") -> bool:
    """True if the hub's cache, or that of the datasets library, holds something under ``name``."""
    folder = f"{kind}s--{name.replace('/', '--')}"
    if (_cache_root() / folder / "snapshots").is_dir():
        return True
    if kind == "model":
        return False
    home = Path(os.environ.get("HF_DATASETS_CACHE") or hf_home() / "datasets")
    return (home / name.replace("/", "___").lower()).is_dir() or (home / name.replace("/", "___")).is_dir()


def hf_home() -> Path:
    """The Hugging Face cache: HF_HOME, or where its libraries have it without."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(os.environ.get("HF_HOME") or default).expanduser()


def _cache_root() -> Path:
    return Path(
        os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or hf_home() / "hub"
    )


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "the default endpoint"


def go_offline() -> None:
    """Set HF_HUB_OFFLINE here and in the libraries that have read it already."""
    import sys

    os.environ["HF_HUB_OFFLINE"] = "1"
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:
            sys.modules[module].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def split_names(name: str, config: str | None) -> list[str]:
    """The splits of a hub data set; an empty list if they cannot be found out."""
    import datasets

    check(name)
    try:
        return list(datasets.get_dataset_split_names(name, config))
    except (OSError, ValueError):
        return []


def load(name: str, config: str | None, split: str) -> Dataset:
    """``datasets.load_dataset``, with errors for people.

    Raises:
        UserError: as :func:`check`; or no such configuration or split, with those there are.
    """
    loaded: Dataset = _load(name, config, split, streaming=False)
    return loaded


def stream(name: str, config: str | None, split: str) -> IterableDataset:
    """The same without a copy: rows come over the network as they are read. Raises as :func:`load`."""
    streamed: IterableDataset = _load(name, config, split, streaming=True)
    return streamed


def _load(name: str, config: str | None, split: str, *, streaming: bool) -> Any:
    check(name)
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split, streaming=streaming)
    except ValueError as error:  # unknown split or configuration: the library's message lists those it knows
        raise NotFound(
            _first_line(error), where=name, fix="set --dataset_config and --dataset_train_split"
        ) from None
    except datasets.exceptions.DatasetsError as error:
        raise DataError(
            _first_line(error), where=name, fix="look at the data set's page; a local copy works too"
        ) from None
    except OSError as error:
        raise Unavailable(
            f"the hub stopped answering: {_first_line(error)}",
            where=name,
            fix="try again; or set HF_HUB_OFFLINE=1 with the data set in HF_HOME",
        ) from None


def _first_line(error: Any) -> str:
    return str(error).strip().split("\n")[0][:300] or type(error).__name__
