"""The weights and the optimizer of a sharded model in a checkpoint: each rank writes its own shards.

By torch's distributed checkpoint (DCP) in safetensors, whose headers say in JSON where in its tensor a shard
lies, so that any number of processes reads it. DCP's usual layout has an index that is a pickle, which torch
reads without restriction: whoever can write to the volume could run code. Here nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from podtune.run.errors import ConfigError

FOLDER, NUMBERS = "sharded", "optimizer.json"
SCHEDULER, UNSHARDED = "scheduler.pt", "pytorch_model_fsdp.bin"  # names of transformers and accelerate
#: of all ranks' shards in files of one number: torch holds a file in memory a second time when it writes it
FILE_BYTES = 4 * 2**30
#: what is not trained is in the base model
OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


class ShardedCheckpoints:
    """The hooks of transformers' Trainer by which it saves and loads shards; a mixin before the trainer."""

    model: Any
    optimizer: Any
    lr_scheduler: Any
    is_fsdp_enabled: bool
    args: Any
    state: Any

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        save_shards(self.model, self.optimizer, Path(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        checkpoint = Path(resume_from_checkpoint)
        if is_sharded(checkpoint):
            load_weights(self.model if model is None else model, checkpoint)
        elif self.is_fsdp_enabled and not (checkpoint / UNSHARDED).exists():  # which TRL wrote
            raise ConfigError(
                "FSDP resumes from shards, and the checkpoint has none",
                where=resume_from_checkpoint,
                fix="resume with the strategy that saved it, or begin anew with model_name_or_path set to it",
            )
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not checkpoint or not is_sharded(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        load_optimizer(self.model, self.optimizer, Path(checkpoint))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))

    def _load_best_model(self) -> None:
        if is_sharded(best := self.state.best_model_checkpoint):
            load_weights(self.model, Path(best))
        else:
            super()._load_best_model()  # type: ignore[misc]


def is_sharded(checkpoint: str | Path | None) -> bool:
    """True for the folder of a checkpoint that :func:`save_shards` wrote into."""
    return checkpoint is not None and (Path(checkpoint) / FOLDER).is_dir()


def save_shards(model: Any, optimizer: Any, checkpoint: Path) -> None:
    """Write this rank's shards into the folder ``checkpoint``. A collective call.

    Raises:
        OSError: on every rank, where one of them cannot write.
    """
    tensors, numbers = _optimizer_state(model, optimizer)
    state = {f"model.{name}": tensor for name, tensor in _weights(model).items()}
    for parameter, values in tensors.items():
        state |= {f"optimizer.{parameter}.{name}": tensor for name, tensor in values.items()}
    files, size = dict[str, int](), 0
    for name, tensor in state.items():
        size += tensor.numel() * tensor.element_size()
        files[name] = 1 + size // FILE_BYTES
    folder = checkpoint / FOLDER
    with _first_failure():
        save(state, storage_writer=HuggingFaceStorageWriter(str(folder), files, save_distributed=True))
    if dist.get_rank() == 0:
        (folder / NUMBERS).write_text(json.dumps(numbers), encoding="utf-8")


def load_weights(model: Any, checkpoint: Path) -> None:
    """Read the weights that were trained, sharded or whole as ``model`` is. A collective call."""
    weights = _weights(model)
    _load({"model": weights}, checkpoint)
    set_model_state_dict(model, weights, options=OPTIONS)


def load_optimizer(model: Any, optimizer: Any, checkpoint: Path) -> None:
    """Read the optimizer's state, sharded or whole as ``model`` is. A collective call."""
    tensors, _ = _optimizer_state(model, optimizer)
    _load({"optimizer": tensors}, checkpoint)
    numbers = json.loads((checkpoint / FOLDER / NUMBERS).read_text(encoding="utf-8"))
    for parameter, values in numbers["state"].items():
        tensors[parameter] |= values
    set_optimizer_state_dict(model, optimizer, numbers | {"state": tensors}, options=OPTIONS)


def _weights(model: Any) -> dict[str, Any]:
    """What is trained, and buffers; a tied weight once, since safetensors takes no tensor under two names."""
    every, once = (dict(model.named_parameters(remove_duplicate=each)) for each in (False, True))
    state = get_model_state_dict(model, options=OPTIONS)
    return {name: tensor for name, tensor in state.items() if name in once or name not in every}


def _optimizer_state(model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors by parameter and name, then all else of the state, which a new optimizer gets here."""
    state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=OPTIONS))
    tensors, numbers = dict[str, Any](), dict[str, Any]()
    for parameter, values in state["state"].items():
        tensors[parameter] = {name: each for name, each in values.items() if torch.is_tensor(each)}
        numbers[parameter] = {name: each for name, each in values.items() if not torch.is_tensor(each)}
    return tensors, {"state": numbers, "param_groups": state["param_groups"]}


def _load(state: dict[str, Any], checkpoint: Path) -> None:
    with warnings.catch_warnings():
        # one process, without a process group, is what is meant
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        with _first_failure():
            load(state, storage_reader=HuggingFaceStorageReader(str(checkpoint / FOLDER)))


@contextlib.contextmanager
def _first_failure() -> Iterator[None]:
    """Raise the error of the first rank that failed, which DCP wraps in one that is no Exception."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
