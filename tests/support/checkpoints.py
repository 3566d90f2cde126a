"""Checkpoints as a start would find them."""

from pathlib import Path

from podtune.run import checkpoint
from podtune.run.manifest import Damaged


def damage(path: Path) -> str:
    """Name what is wrong with the checkpoint at ``path``; empty if nothing."""
    try:
        checkpoint.read(path)
    except Damaged as reason:
        return str(reason)
    return ""
