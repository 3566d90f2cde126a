"""``--save`` and ``--resume``: a training's state after every epoch, in a folder of its own.

The tensors are the strategy's to write (torch.distributed.checkpoint, or DeepSpeed). What belongs to all of
them lies beside: the epochs so far, and the options, which have to be the same when it continues.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from podtune.bench.options import Options
from podtune.bench.strategies.contract import Strategy
from podtune.run.errors import ConfigError, DataError
from podtune.run.record import Measurements, Training, write_json
from podtune.run.world import World

STATE = "training.json"  # written last: a folder without it is not complete
# options that change no step of the training
FREE = {"epochs", "steps", "warmup", "repeats", "output", "save", "resume", "profile", "memory_snapshot"}
FREE |= {"skip_parity", "timeout_s", "threads"}


def save(strategy: Strategy, so_far: Training, options: Options, world: World) -> None:
    """Write the newest epoch, then forget the others. A collective call."""
    folder = Path(options.save) / f"epoch-{len(so_far.loss_by_epoch)}"
    strategy.save(folder)
    if dist.is_initialized():
        dist.barrier()  # the file below says that every rank has written
    if world.is_main:
        write_json(folder / STATE, {"training": asdict(so_far), "options": _decisive(options, world)})
        for other in set(_complete(options)) - {folder}:
            shutil.rmtree(other)


def resume(strategy: Strategy, options: Options, world: World) -> Training | None:
    """Load the newest epoch; None where there is none. A collective call.

    Raises:
        UserError: it is of a training with other options.
    """
    if not (folders := _complete(options)):
        return None
    folder = folders[-1]
    found = json.loads((folder / STATE).read_text(encoding="utf-8"))
    before, now = found["options"], _decisive(options, world)
    other = [
        f"{name} was {before.get(name)}, is {now[name]}" for name in now if now[name] != before.get(name)
    ]
    if other:
        raise ConfigError(
            f"is of another training: {', '.join(other)}",
            where=str(folder),
            fix="give the same options, or another --save",
        )
    so_far = Measurements.read({"measurements": found}).training
    if so_far is None:
        raise DataError("does not say which epochs it holds", where=str(folder / STATE), fix="another --save")
    strategy.load(folder)
    return so_far


def _complete(options: Options) -> list[Path]:
    """Folders of whole epochs, the oldest first."""
    folders = (file.parent for file in Path(options.save).glob(f"epoch-*/{STATE}"))
    return sorted(folders, key=lambda folder: int(folder.name.removeprefix("epoch-")))


def _decisive(options: Options, world: World) -> dict[str, object]:
    chosen = {name: value for name, value in asdict(options).items() if name not in FREE}
    return {**chosen, "world_size": world.world_size}
