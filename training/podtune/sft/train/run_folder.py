"""The folder of a run, opened: lock, watch on the volume, copy in object storage, checkpoint, record."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from podtune.run import output_volume
from podtune.run.checkpoint import Checkpoint
from podtune.run.distributed import on_main
from podtune.run.lock import Lock, claim
from podtune.run.world import World
from podtune.sft.config.resolve import Arguments
from podtune.sft.data.rows import TokenRows
from podtune.sft.train.resume import find_checkpoint, is_finished
from podtune.sft.train.run import FineTune, not_published
from podtune.sft.train.saving import CheckpointWriter
from podtune.sft.train.uploader import CheckpointUploader

VOLUME_SLACK_S = 20.0  # beyond timeout_s: within it a volume may be slow


@contextlib.contextmanager
def open_run(arguments: Arguments, rows: TokenRows, world: World) -> Iterator[FineTune | None]:
    """Open the folder of a run; yield None if an earlier start has finished it. A collective call.

    In the order in which each needs the one before: the lock, the watch on the volume, the copy in object
    storage, the checkpoint to resume from, the record. An exception in the block is put on
    record, and everything is closed in the opposite order.
    """
    folder, options, limit = arguments.folder, arguments.run, arguments.training.save_total_limit
    with contextlib.ExitStack() as stack:
        locks: list[Lock] = []  # one, on rank 0: two jobs in one folder would ruin both
        on_main(world, lambda: locks.append(stack.enter_context(claim(folder))))
        if world.local_rank == 0:
            stack.enter_context(output_volume.watch_volume(folder, options.timeout_s + VOLUME_SLACK_S))
        url = arguments.publish_url
        uploader = CheckpointUploader(url, folder, world, limit) if url else None
        resume = _find_resume(arguments, rows.info.fingerprint, world, uploader)
        if resume and _is_finished(arguments, resume, world, uploader):
            yield None
            return
        writer = CheckpointWriter(
            folder, world, limit=limit, async_save=options.async_save, uploader=uploader
        )
        run = FineTune(arguments, rows, world, resume, writer, locks[0] if locks else None)
        if world.is_main:
            run.begin()
            if options.aim_repo:
                from podtune.run.aim.tracking import start_tracker

                stack.callback(start_tracker(folder, options.aim_repo).finish)
        try:
            yield run
        except Exception as error:
            run.fail(error)
            raise


def _find_resume(
    arguments: Arguments, fingerprint: str, world: World, uploader: CheckpointUploader | None
) -> Checkpoint | None:
    """Find the checkpoint to resume from, on every pod's volume. A collective call."""
    key, options = arguments.resume_key(fingerprint), arguments.resume_options()
    resume = on_main(world, lambda: find_checkpoint(arguments.folder, key, options, uploader))
    return uploader.share(resume, fingerprint) if uploader else resume


def _is_finished(
    arguments: Arguments, resume: Checkpoint, world: World, uploader: CheckpointUploader | None
) -> bool:
    """True if there is nothing left to train; then what was not published yet is. A collective call."""
    asked = arguments.training.max_steps, arguments.training.num_train_epochs
    if not on_main(world, lambda: is_finished(arguments.folder, resume, *asked)):
        return False
    if world.is_main:
        print(
            f"{arguments.name} is finished at step {resume.step}: a higher max_steps with "
            "--allow_resume_change resumes it"
        )
    if uploader and (unpublished := on_main(world, uploader.complete)):
        raise not_published(arguments.folder, unpublished)
    return True
