"""Checkpoints that are complete or invisible. Needs no torch.

A checkpoint is written into ``.saving/checkpoint-N``, listed in a manifest with sizes and hashes, flushed,
and only then renamed to ``checkpoint-N``. Resuming takes the newest one whose files all agree with its
manifest; a damaged one is renamed, never deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from podtune.run.errors import ConfigError, DataError
from podtune.run.files import apply_umask, digest, regular_files, write_atomically
from podtune.run.manifest import MANIFEST, NAME, Damaged, Facts, Manifest, flushed_files, read_manifest

SAVING = ".saving"


@dataclass(frozen=True)
class ResumeKey:
    """The properties of a run that must not change between a checkpoint and the start that resumes it.

    ``data`` is the fingerprint of the token rows; the other names are those of the configuration.
    """

    world_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    learning_rate: float
    warmup_steps: float
    num_train_epochs: float
    max_steps: int
    seed: int
    max_length: int | None
    packing: bool
    strategy: str
    lr_scheduler_type: str
    data: str
    model: str
    use_peft: bool

    def facts(self) -> Facts:
        """Return the key as it stands in a manifest."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, with the facts of its manifest; another program's has none."""

    path: Path
    step: int
    facts: Facts

    @property
    def tokens(self) -> int:
        """Real tokens that were trained until this checkpoint, over all ranks and starts."""
        return int(self.facts.get("tokens", 0))

    @property
    def position(self) -> int:
        """Rows of a stream that were trained until this checkpoint."""
        return int(self.facts.get("position", 0))


def commit(staging_dir: Path, target: Path, step: int, facts: Facts) -> None:
    """Make the finished ``staging_dir`` visible as ``target``: manifest, flush, rename. Rank 0, last."""
    apply_umask(staging_dir)
    write_atomically(staging_dir / MANIFEST, Manifest(step, facts, flushed_files(staging_dir)).text())
    if target.exists():  # the same step again, after a damaged one was resumed over
        quarantine(target)
    staging_dir.rename(target)
    folder = os.open(target.parent, os.O_RDONLY)  # a rename is on the volume only when its folder is flushed
    os.fsync(folder)
    os.close(folder)


def read(path: Path) -> Checkpoint:
    """Read the checkpoint at ``path`` and compare every file with the manifest.

    Raises:
        Damaged: a file is not as it was written.
    """
    try:
        content = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise Damaged("it has no manifest: the save was interrupted, or another program wrote it") from None
    except OSError:
        raise Damaged("its manifest cannot be read") from None
    manifest, present = read_manifest(content, path.name), regular_files(path)
    for name, (size, written) in manifest.files.items():
        if (file := present.get(name)) is None:
            raise Damaged(f"{name} is missing")
        if file.stat().st_size != size:
            raise Damaged(f"{name} has {file.stat().st_size} bytes instead of {size}")
        if digest(file) != written:
            raise Damaged(f"{name} has changed since it was written")
    # links too, but not what file systems put there
    names = {str(file.relative_to(path)) for file in path.rglob("[!.]*") if not file.is_dir()}
    if more := sorted(names - {*manifest.files, MANIFEST}):
        raise Damaged(f"{more[0]} is not in its manifest")
    return Checkpoint(path, manifest.step, manifest.facts)


def foreign(path: Path) -> Checkpoint | None:
    """Read another program's checkpoint, TRL's for example; None if it does not say its step.

    It has no manifest, so neither that it is complete nor what it belongs to can be checked.
    """
    if (path / MANIFEST).exists():
        return None
    try:
        step = json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return Checkpoint(path, step, {}) if type(step) is int else None


def is_name(name: str) -> bool:
    """True for ``checkpoint-N``."""
    return bool(NAME.fullmatch(name))


def checkpoints(output_dir: Path) -> list[Path]:
    """List the checkpoint folders below ``output_dir``, oldest step first, complete or not."""
    if not output_dir.is_dir():
        return []
    by_step = [
        (int(match[1]), path)
        for path in output_dir.iterdir()
        if (match := NAME.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
    ]
    return [path for _, path in sorted(by_step)]


def newest_complete(output_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """Find the newest complete checkpoint, and rename the damaged ones, with a warning for each.

    ``None`` when there is none at all: a first start. Rank 0 only: it renames.

    Raises:
        UserError: there are checkpoints and every one is damaged; starting afresh must be the user's own
        decision.
    """
    shutil.rmtree(output_dir / SAVING, ignore_errors=True)  # an interrupted save
    broken: list[tuple[Path, str]] = []
    for path in reversed(checkpoints(output_dir)):
        try:
            checkpoint = read(path)
        except Damaged as reason:
            broken.append((path, str(reason)))
            continue
        warnings = [
            f"{bad.name} is damaged ({why}); kept as {quarantine(bad).name}, using {path.name}"
            for bad, why in broken
        ]
        return checkpoint, warnings
    if broken:
        raise DataError(
            "every checkpoint is damaged: " + "; ".join(f"{path.name}: {reason}" for path, reason in broken),
            where=str(output_dir),
            fix="restore one from a backup, or move them away (or use another output_dir) to start from the "
            "beginning",
        )
    return None, []


def quarantine(path: Path) -> Path:
    """Rename a damaged checkpoint so that nothing picks it up; returns the new path."""
    number = 0
    while (target := path.with_name(f"damaged-{path.name}" + (f".{number}" if number else ""))).exists():
        number += 1
    return path.rename(target)


def surplus(names: list[str], limit: int | None, keep: str = "") -> list[str]:
    """List the oldest of ``names`` beyond ``limit``: never ``keep`` (the best) nor the newest."""
    if not limit:
        return []
    candidates = [name for name in names if name != keep]
    return candidates[: -max(1, limit - (keep in names))]


def rotate(output_dir: Path, limit: int | None, keep: Path | None = None, busy: Collection[str] = ()) -> None:
    """Delete the oldest checkpoints beyond ``limit``, see :func:`surplus`; ``busy`` ones go another time."""
    best = keep.name if keep and keep.resolve().parent == output_dir.resolve() else ""
    for name in surplus([path.name for path in checkpoints(output_dir)], limit, best):
        if name not in busy:
            discard(output_dir / name)


def discard(path: Path) -> None:
    """Delete a checkpoint so that a kill in between leaves nothing that looks like one."""
    hidden = path.parent / SAVING / f"old-{path.name}"
    hidden.parent.mkdir(exist_ok=True)
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)  # what is left over goes at the next start
    with contextlib.suppress(OSError):
        hidden.parent.rmdir()


def check_resume(checkpoint: Checkpoint, key: ResumeKey, *, allowed: bool) -> list[str]:
    """List the differences between the checkpoint's run and this one, whose ``key`` is given.

    Raises:
        ConfigError: there are some and ``allowed`` (--allow_resume_change) is not set.
    """
    earlier = checkpoint.facts
    differs = [
        f"{name} was {earlier[name]!r} and is {value!r}"
        for name, value in key.facts().items()
        if name in earlier and earlier[name] != value
    ]
    if differs and not allowed:
        raise ConfigError(
            f"{checkpoint.path.name} belongs to another run: " + "; ".join(differs),
            where=str(checkpoint.path),
            fix="undo the change, use another output_dir, or say --allow_resume_change",
        )
    return differs
