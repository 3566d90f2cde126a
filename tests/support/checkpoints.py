"""Checkpoints as a start would find them."""

from pathlib import Path
from typing import Any

from podtune.run import checkpoint
from podtune.run.manifest import Damaged


def damage(path: Path) -> str:
    """Name what is wrong with the checkpoint at ``path``; empty if nothing."""
    try:
        checkpoint.read(path)
    except Damaged as reason:
        return str(reason)
    return ""


class Bomb:
    """A pickle that touches ``target`` where it is loaded as Python would."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)
