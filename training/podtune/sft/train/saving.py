"""The checkpoints of a trainer: staged, committed, rotated and published, one at a time.

How a checkpoint becomes visible is :mod:`podtune.run.checkpoint`; here is when, and who waits for it.
"""

from __future__ import annotations

import functools
import shutil
import time
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from transformers import TrainerState

from podtune.machine.facts import GIB, free_memory
from podtune.run import background_save, checkpoint
from podtune.run.background_save import BackgroundSave
from podtune.run.errors import warn
from podtune.run.files import regular_files
from podtune.run.manifest import Facts
from podtune.run.record import SaveTimes
from podtune.run.world import World
from podtune.sft.train.uploader import CheckpointUploader


@dataclass
class _Save:
    """One save. ``write_s``, until it is complete on the volume, is None; ranks waited for ``stall_s``."""

    step: int
    staging_dir: Path
    target: Path
    facts: Facts
    began: float
    last: bool
    best: Path | None = None
    stall_s: float = 0.0
    write_s: float | None = None
    logged: bool = False


class CheckpointWriter:
    """Writes a run's checkpoints; every rank has one. Its states follow each other in one order:

    - *idle*;
    - *collecting*: ranks stand still and transformers writes into :attr:`folder`. A synchronous save is
      committed there and then, and the writer is idle again;
    - *in flight* (async save): training continues, a thread of each pod copies its files to the volume, and
      rank 0's commits them once every pod has copied (:meth:`allow_commit`). :meth:`finish` waits for that.

    Args:
        limit: checkpoints that rotation keeps, None for all.
        async_save: stage checkpoints in shared memory where it has room for them.
        uploader: publishes what is committed.

    Attributes:
        folder: where transformers writes the current checkpoint; None when it writes none.
        limit: as given.
    """

    def __init__(
        self,
        output_dir: Path,
        world: World,
        *,
        limit: int | None = None,
        async_save: bool = False,
        uploader: CheckpointUploader | None = None,
    ) -> None:
        self.uploader, self.limit = uploader, limit
        self.folder: Path | None = None
        self._output_dir, self._world = output_dir, world
        self._async_save, self._shared = async_save, uploader is None or uploader.shared
        self._memory_dir = background_save.stage_of(output_dir, world.node_rank)
        if world.local_rank == 0:
            shutil.rmtree(self._memory_dir, ignore_errors=True)  # of a start that was killed
        self._saves: list[_Save] = []  # on rank 0, of this start
        self._staged_bytes = 0  # of the last staged save of this pod
        self._in_flight = False  # on every rank
        self._background: BackgroundSave | None = None  # the thread of this pod, on its first rank
        self._warned_of_memory = False

    # ---- collecting ----
    def save(
        self,
        write: Callable[[], None],
        state: TrainerState,
        facts: Facts,
        *,
        last: bool,
        estimated_bytes: int,
    ) -> None:
        """Save a checkpoint of ``state``. A collective call; ranks wait for ``write`` alone if they can.

        Args:
            write: has transformers write its files into :attr:`folder`.
            facts: of the manifest.
            last: of this run, so that training has nothing to continue with meanwhile.
            estimated_bytes: size of the checkpoint, for the first one.
        """
        began = time.monotonic()  # a save before this one is waited for, too
        self.finish()
        name = f"checkpoint-{state.global_step}"
        staging_dir = self._output_dir / checkpoint.SAVING / name
        save = _Save(state.global_step, staging_dir, self._output_dir / name, facts, began, last)
        memory = None if last else self._cleared_memory(estimated_bytes)
        folder = (memory or staging_dir.parent) / name
        if self._world.is_main or (self._world.local_rank == 0 and not self._shared):
            shutil.rmtree(staging_dir.parent, ignore_errors=True)
        _barrier()
        self._collect(folder, write)
        _barrier()  # every rank's random state is in the folder
        if not self._shared:
            self._bring_together(folder)
        if state.best_model_checkpoint == str(folder):
            state.best_model_checkpoint = str(save.target)
        save.best = Path(state.best_model_checkpoint) if state.best_model_checkpoint else None
        if self._world.is_main:
            state.save_to_json(str(folder / "trainer_state.json"))
            (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle with every key, tokens included
            self._saves.append(save)
        commit = functools.partial(self._commit, save) if self._world.is_main else None
        if memory is None:
            if commit:
                commit()
            _barrier()
        else:
            self._in_flight = True
            if self._world.is_main or (self._world.local_rank == 0 and self._shared):
                alone = self._world.nnodes == 1 or not self._shared
                self._staged_bytes = background_save.staged_bytes(folder)
                self._background = BackgroundSave(folder, staging_dir, commit, alone=alone)
        save.stall_s = time.monotonic() - save.began

    def _collect(self, folder: Path, write: Callable[[], None]) -> None:
        # the manifest has a hash of each file; torch's checksums took half of the time that ranks stop
        checksums = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        self.folder = folder
        try:
            write()
        finally:
            self.folder = None
            torch.serialization.set_crc32_options(checksums)

    def _bring_together(self, folder: Path) -> None:
        """Bring what other pods wrote on their own volumes, random states, to rank 0. A collective call."""
        own: dict[str, bytes] = {}
        if self._world.local_rank == 0 and not self._world.is_main:
            own = {name: path.read_bytes() for name, path in regular_files(folder).items()}
            shutil.rmtree(folder, ignore_errors=True)  # empty or absent under save_only_model
        parts: list[dict[str, bytes]] = [{}] * self._world.world_size
        dist.gather_object(own, parts if self._world.is_main else None)
        for name, content in ChainMap(*parts).items():
            (folder / name).write_bytes(content)

    def _commit(self, save: _Save) -> None:
        checkpoint.commit(save.staging_dir, save.target, save.step, save.facts)
        uploading = self.uploader.busy if self.uploader else ()
        checkpoint.rotate(self._output_dir, self.limit, save.best, uploading)
        if self.uploader:
            self.uploader.saved(save.target.name, save.best.name if save.best else "", last=save.last)
        save.write_s = time.monotonic() - save.began

    def _cleared_memory(self, estimated_bytes: int) -> Path | None:
        """The empty folder in shared memory for the next checkpoint; None if some pod has no room for one.

        A collective call.
        """
        if not self._async_save:
            return None
        lack = self._lack_of_memory(estimated_bytes) if self._world.local_rank == 0 else ""
        all_can = torch.tensor(int(not lack))
        if self._world.world_size > 1:
            dist.all_reduce(all_can, op=dist.ReduceOp.MIN)
        if not all_can and self._world.is_main and not self._warned_of_memory:
            warn(f"training waits for its saves: {lack or 'another pod has no memory for them'}")
            self._warned_of_memory = True
        return self._memory_dir if all_can else None

    def _lack_of_memory(self, estimated_bytes: int) -> str:
        """Name what this pod lacks to hold a checkpoint in memory; empty if nothing."""
        needed = int(1.1 * (self._staged_bytes or estimated_bytes)) + 2**26  # tokenizer, random states
        where = background_save.SHARED_MEMORY
        if not background_save.clear(self._memory_dir):
            return f"{self._memory_dir} cannot be made"
        if (shared := shutil.disk_usage(where).free) < needed:
            return (
                f"{where} has {shared / GIB:.2f} GiB free and a checkpoint takes "
                f"{needed / GIB:.2f} (shm.sizeLimit in the chart, --shm-size in Docker)"
            )
        if (free := free_memory()) < 1.5 * needed:
            return f"{free / GIB:.2f} GiB of memory are free and a checkpoint takes {needed / GIB:.2f}"
        return ""

    # ---- in flight ----
    def copying(self) -> bool:
        """Return whether files of this pod's save in flight are not on the volume yet.

        Raises:
            OSError: they cannot be written, to a full volume for instance.
        """
        if self._background is None:
            return False
        self._background.check()
        return self._background.writes

    def allow_commit(self) -> None:
        """Let the save in flight be committed: every pod has copied its files."""
        if self._background is not None:
            self._background.release()

    def finish(self) -> None:
        """Wait until the save in flight, if there is one, is a checkpoint. A collective call.

        Raises:
            OSError: it could not be written.
        """
        if not self._in_flight:
            return
        if self._background is not None:
            self._background.wait_written()
        _barrier()
        if self._background is not None:
            self._background.release()
            self._background.join()
            self._background.check()
        _barrier()
        self._in_flight, self._background = False, None

    def abandon(self, timeout_s: float) -> None:
        """Give the save in flight of a failed run ``timeout_s`` to complete; its peers may be gone."""
        if self._background is not None and self._background.join(timeout_s):
            self.close()

    def close(self) -> None:
        """Give back the shared memory."""
        if self._world.local_rank == 0:
            shutil.rmtree(self._memory_dir, ignore_errors=True)

    # ---- measurements ----
    def newly_complete(self) -> dict[str, float]:
        """Times of the newest save that has become complete since the last call, for metrics.jsonl."""
        times: dict[str, float] = {}
        for save in self._saves:
            if save.write_s is not None and not save.logged:
                save.logged = True
                times = {"save_stall_s": save.stall_s, "save_write_s": save.write_s}
        return times

    def times(self) -> SaveTimes | None:
        """Times of this start's complete checkpoints. Rank 0."""
        stalls = [save.stall_s for save in self._saves if save.write_s is not None]
        writes = [save.write_s for save in self._saves if save.write_s is not None]
        return SaveTimes(len(stalls), sum(stalls), max(stalls), sum(writes)) if stalls else None


def _barrier() -> None:
    PartialState().wait_for_everyone()
