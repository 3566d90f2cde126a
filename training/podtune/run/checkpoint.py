"""Checkpoints that are complete or invisible. Needs no torch.

A checkpoint is written into ``.saving/checkpoint-N``, listed in a manifest with sizes and hashes, flushed,
and only then renamed to ``checkpoint-N``. Resuming takes the newest one whose files all agree with its
manifest; a damaged one is renamed, never deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import socket
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podtune.run.errors import (
    CannotCreate,
    ConfigError,
    DataError,
    PeerLost,
    platform_fault,
)
from podtune.run.files import apply_umask, digest, open_regular, regular_files, write_atomically

MANIFEST = "podtune-manifest.json"
SCHEMA = "podtune.checkpoint/2"
SAVING = ".saving"
_NAME = re.compile(r"checkpoint-(\d+)")
#: of a manifest: a :class:`ResumeKey`, and how far the run was
Facts = dict[str, Any]


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
    write_atomically(staging_dir / MANIFEST, manifest_of(step, facts, entries_of(staging_dir)))
    if target.exists():  # the same step again, after a damaged one was resumed over
        quarantine(target)
    staging_dir.rename(target)
    _flush_folder(target.parent)


def _flushed_entry(path: Path) -> dict[str, Any]:
    with open_regular(path) as file:
        os.fsync(file.fileno())
        return {"bytes": os.fstat(file.fileno()).st_size, "xxh3_128": digest(path)}


def _own_digest(manifest: dict[str, Any]) -> str:
    """The hash of a manifest's content, whatever its order and white space."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(json.dumps(manifest, sort_keys=True).encode(errors="surrogatepass"))


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Damaged(Exception):
    """A checkpoint, or its manifest, that is not as it was written; the text says what is wrong."""


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint; of each file the bytes and their hash."""

    step: int
    facts: Facts
    files: dict[str, tuple[int, str]]


def read_manifest(content: bytes, name: str) -> Manifest:
    """Parse the manifest of the checkpoint called ``name``.

    Raises:
        Damaged: it is not as it was written, or that of another one.
    """
    try:
        manifest = json.loads(content)
        own = manifest.pop("xxh3_128", None)
        step, facts = manifest["step"], manifest["facts"]
        files = {file: (entry["bytes"], entry["xxh3_128"]) for file, entry in manifest["files"].items()}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise Damaged("its manifest cannot be read") from None
    if own != _own_digest(manifest):
        raise Damaged("its manifest has changed since it was written")
    if type(step) is not int or not isinstance(facts, dict):
        raise Damaged("its manifest cannot be read")
    if (named := _NAME.fullmatch(name)) and int(named[1]) != step:
        raise Damaged(f"its manifest is of step {step}")
    return Manifest(step, facts, files)


def manifest_of(step: int, facts: Facts, files: dict[str, Any]) -> str:
    """Write the text of a manifest; ``files`` by name, see :func:`entries_of`."""
    manifest = {"schema": SCHEMA, "step": step, "facts": facts, "files": files}
    return json.dumps(manifest | {"xxh3_128": _own_digest(manifest)}, indent=1)


def entries_of(folder: Path) -> dict[str, Any]:
    """Describe the files in ``folder`` for a manifest, each flushed to the volume; links are left out."""
    files = regular_files(folder)
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(files, pool.map(_flushed_entry, files.values()), strict=True))


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
    if more := sorted(_files(path) - {*manifest.files, MANIFEST}):
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


def damage(path: Path) -> str:
    """Name what is wrong with the checkpoint at ``path``; empty if nothing."""
    try:
        read(path)
    except Damaged as reason:
        return str(reason)
    return ""


def _files(folder: Path) -> set[str]:
    """List the files of a checkpoint, without those that file systems put there."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if not path.is_dir() and not path.name.startswith(".")
    }


def is_name(name: str) -> bool:
    """True for ``checkpoint-N``."""
    return bool(_NAME.fullmatch(name))


def checkpoints(output_dir: Path) -> list[Path]:
    """List the checkpoint folders below ``output_dir``, oldest step first, complete or not."""
    if not output_dir.is_dir():
        return []
    by_step = [
        (int(match[1]), path)
        for path in output_dir.iterdir()
        if (match := _NAME.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
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


def check_writable(output_dir: Path) -> None:
    """Write and remove a file in ``output_dir``, or in the folder where it will be made.

    Nothing else is created or removed: the other pods may be looking at the same volume.

    Raises:
        UserError: says which folder and why.
        PeerLost: the volume fails, and held checkpoints before: to be tried again.
    """
    existing = next(
        folder for folder in (output_dir.absolute(), *output_dir.absolute().parents) if folder.exists()
    )
    probe = existing / f".write-test-{socket.gethostname()}-{os.getpid()}"
    try:
        probe.write_bytes(b"podtune")
        probe.unlink()
    except OSError as error:
        was_writable = error.errno != errno.EROFS or checkpoints(output_dir)
        if was_writable and platform_fault(error):
            raise PeerLost(f"{output_dir}: cannot be written at the moment: {error.strerror}") from None
        raise CannotCreate(
            f"cannot be written: {error.strerror or error}",
            where=str(output_dir),
            fix="mount the volume read-write, or set output_dir to a folder that this user may write",
        ) from None


def checkpoint_bytes(weights: int, optim: str, *, model_only: bool) -> int:
    """Estimate the size of a checkpoint from the bytes of trained ``weights``.

    Adam keeps two moments, each as large as they are.
    """
    adam = optim.startswith("adamw") and "bit" not in optim and not model_only
    return weights * (3 if adam else 1)


def check_space(output_dir: Path, checkpoint_bytes: int, limit: int | None) -> None:
    """Compare what the checkpoints will take with the free space, before any step is paid for.

    ``checkpoint_bytes`` is of one; ``limit`` of them are kept (None counts as one, the least that a run
    needs) while another is written.

    Raises:
        UserError: the volume will be full before the run ends.
    """
    needed, free = missing_bytes(output_dir, checkpoint_bytes, limit), shutil.disk_usage(output_dir).free
    if needed > free:
        raise CannotCreate(
            f"{size_text(free)} are free and checkpoints of {size_text(checkpoint_bytes)} need about "
            f"{size_text(needed)} more",
            where=str(output_dir),
            fix="free space or enlarge the volume (persistence.output.size), lower save_total_limit, or set "
            "save_only_model "
            "(which cannot be resumed)",
        )


def size_text(count: float) -> str:
    """``count`` bytes in GiB, below one in MiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def missing_bytes(output_dir: Path, checkpoint_bytes: int, limit: int | None) -> int:
    """Compute the bytes that ``limit`` checkpoints and one being written need beside those that are there."""
    held = sum(
        file.stat().st_size for path in checkpoints(output_dir) for file in path.rglob("*") if file.is_file()
    )
    return max(0, checkpoint_bytes * ((limit or 1) + 1) - held)
