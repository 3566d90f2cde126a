"""Source of a model: a folder, the hub, or the hub's copy in the local cache. No torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from podtune.run.errors import ConfigError, DataError, NotFound, UserError
from podtune.sft.source import copies, hub, object_store

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class HubArguments(TypedDict):
    """Arguments of ``from_pretrained`` that say where files come from."""

    revision: str
    local_files_only: bool


@dataclass(frozen=True)
class Origin:
    """Location of a model that exists, with its file names."""

    name: str  # a folder or a hub id
    revision: str | None
    files: tuple[str, ...]
    local_files_only: bool  # forbids the network
    url: str = ""  # where the folder came from, if the model was named by one

    @property
    def is_adapter(self) -> bool:
        """True of a PEFT adapter, which needs its base model."""
        return "adapter_config.json" in self.files

    @property
    def arguments(self) -> HubArguments:
        """Arguments of ``from_pretrained`` beside the name."""
        return {"revision": self.revision or "main", "local_files_only": self.local_files_only}

    def processor_files(self) -> list[Path]:
        """Local paths of a multimodal model's processor files; a text model has none."""
        names = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
        return [self.file(name) for name in names if name in self.files]

    def file(self, name: str) -> Path:
        """Local path of one small file of it, downloaded if need be."""
        if Path(self.name).is_dir():
            return Path(self.name) / name
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(self.name, name, **self.arguments))


def locate_model(
    name: str | os.PathLike[str], revision: str | None = None, *, tokenizer_alone: bool = False
) -> Origin:
    """Find a model or adapter within a few seconds; ``tokenizer_alone`` accepts a tokenizer without a model.

    Raises:
        UserError: the folder is missing or holds no model; no such model on the hub, or gated without access;
            the hub cannot be reached and there is no copy in the cache.
    """
    url = str(name) if object_store.is_url(name) else ""
    folder = copies.local(url) if url else Path(name).expanduser()
    origin = _in_folder(folder, revision) if folder.is_dir() else _on_hub(url or str(name), revision)
    origin = replace(origin, url=url)
    tokenizers = {"tokenizer.json", "tokenizer_config.json"} if tokenizer_alone else set()
    if not {"config.json", "adapter_config.json", *tokenizers} & set(origin.files):
        raise NotFound(
            "is not a model: there is no config.json in it",
            where=origin.name,
            fix="give the folder that save_pretrained wrote; of a run that is RUN_DIR/final",
        )
    return origin


def _in_folder(folder: Path, revision: str | None, name: str | None = None) -> Origin:
    files = tuple(sorted(path.relative_to(folder).as_posix() for path in folder.iterdir()))
    return Origin(name or str(folder), revision, files, local_files_only=True)


def _on_hub(name: str, revision: str | None) -> Origin:
    if Path(name).exists() or name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or not name:
        raise NotFound(
            "no such folder",
            where=name or "model name",
            fix="correct the path, or give a hub id such as HuggingFaceTB/SmolLM3-3B",
        )
    try:
        files = hub.look_up(name, "model", revision)
    except UserError as error:
        if "/" in name and Path(name).parent.is_dir():  # as likely a path as a hub id
            error.what = f"no such folder; as a hub id: {error.what}"
        raise
    if files is not None:
        return Origin(name, revision, files, local_files_only=False)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot = snapshot_download(name, revision=revision, local_files_only=True)
    except LocalEntryNotFoundError:
        raise hub.no_revision(name, revision) from None
    return _in_folder(Path(snapshot), revision, name)


@contextlib.contextmanager
def explained(name: str, what: str) -> Iterator[None]:
    """Turn the errors that transformers raises for a broken or refused folder into :class:`UserError`."""
    from safetensors import SafetensorError

    broken = (OSError, ValueError, KeyError, TypeError, ImportError, RecursionError, SafetensorError)
    try:
        yield
    except broken as error:
        text = " ".join(str(error).split())
        if "trust_remote_code" in text:
            raise ConfigError(
                f"the {what} needs Python code from its own folder, which is not run unless you say so",
                where=name,
                fix="read that code, then set trust_remote_code: true; or use a model transformers knows",
            ) from None
        raise DataError(
            f"the {what} cannot be loaded: {text[:400] or type(error).__name__}", where=name
        ) from error


def load_config(origin: Origin, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load the configuration of a model; of an adapter, that of its base."""
    from transformers import AutoConfig

    if origin.is_adapter:
        return load_config(base_of(origin), trust_remote_code)
    with explained(origin.name, "config.json"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            origin.name, trust_remote_code=trust_remote_code, **origin.arguments
        )
    return config


def vocabulary_size(origin: Origin, trust_remote_code: bool = False) -> int:
    """Read the number of rows of the model's embedding from its configuration."""
    return int(load_config(origin, trust_remote_code).get_text_config().vocab_size)


def base_of(adapter: Origin) -> Origin:
    """Locate the base model that an adapter was trained on. Raises :class:`UserError`."""
    with explained(adapter.name, "adapter_config.json"):
        config = json.loads(adapter.file("adapter_config.json").read_text(encoding="utf-8"))
        base = config.get("base_model_name_or_path")
    where = f"{adapter.name}/adapter_config.json"
    if not base:
        raise DataError("names no base model", where=where, fix="set base_model_name_or_path")
    return locate_model(copies.known(str(base), where))
