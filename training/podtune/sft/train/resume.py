"""The checkpoint that a start continues from, and whether there is anything left to train."""

from __future__ import annotations

from pathlib import Path

from podtune.run import checkpoint
from podtune.run.checkpoint import Checkpoint, ResumeKey
from podtune.run.errors import ConfigError, warn
from podtune.run.follow import read_record
from podtune.run.manifest import Damaged
from podtune.sft.config.arguments import ResumeOptions
from podtune.sft.train.uploader import CheckpointUploader


def find_checkpoint(
    output_dir: Path, key: ResumeKey, options: ResumeOptions, uploader: CheckpointUploader | None = None
) -> Checkpoint | None:
    """Find the checkpoint to resume from: the one named, else the newest complete one, else none. Rank 0.

    The newest is looked for in ``output_dir``, then where the run is published.

    Raises:
        UserError: the one named is damaged, all are, or they belong to a run that differs from this one.
    """
    allowed = options.allow_change
    resume: Checkpoint | None = None
    if options.path is not None:
        resume = _named(options.path, allowed=allowed)
    elif options.newest:
        resume, damaged = checkpoint.newest_complete(output_dir)
        for warning in damaged:
            warn(warning)
        # what one pod has alone the others cannot load
        if uploader and (resume is None or not uploader.shared):
            resume = uploader.newest(lambda there: checkpoint.check_resume(there, key, allowed=allowed))
    elif checkpoint.checkpoints(output_dir) or (uploader and uploader.steps()):
        raise ConfigError(
            "the run has checkpoints of an earlier start, and auto_resume is off",
            where=f"{output_dir} or {uploader.remote.url}" if uploader else str(output_dir),
            fix="use another output_dir (and run_name), or resume",
        )
    if resume is None and options.expected:
        warn(f"resume_from_checkpoint: there is none in {output_dir}, so the run begins at step 0")
    if resume is not None:
        for change in checkpoint.check_resume(resume, key, allowed=allowed):
            warn(f"resuming although {change}")
    return resume


def _named(path: Path, *, allowed: bool) -> Checkpoint:
    try:
        return checkpoint.read(path)
    except Damaged as reason:
        theirs = checkpoint.foreign(path) if allowed else None
        if theirs is None:
            why = reason if path.is_dir() else "there is no such folder"
            raise ConfigError(
                f"cannot be resumed: {why}",
                where=str(path),
                fix="name a complete checkpoint, or none; "
                "one that TRL wrote is taken with --allow_resume_change",
            ) from None
        warn(f"{path} has no manifest: that it is complete, and of this run, is not checked")
        return theirs


def is_finished(output_dir: Path, resume: Checkpoint, max_steps: int, num_train_epochs: float) -> bool:
    """True if the run ended well and this start asks for no step beyond its last checkpoint."""
    record = read_record(output_dir) or {}
    ended = (
        record.get("status") == "ok"
        and (output_dir / "final").is_dir()
        and record["measurements"].get("steps") == resume.step
    )
    asked = {"max_steps": max_steps, "num_train_epochs": num_train_epochs}
    return bool(ended and all(record["config"].get(key) == value for key, value in asked.items()))
