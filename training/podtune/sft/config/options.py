"""The checkpoint to resume from, as the configuration names it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from podtune.sft.config.arguments import RunArguments


@dataclass(frozen=True)
class ResumeOptions:
    """The checkpoint to resume from.

    Attributes:
        path: a checkpoint that was named.
        newest: otherwise take the newest complete one.
        expected: say so if there is none.
        allow_change: resume although world, batch, schedule, data or model have changed.
    """

    path: Path | None = None
    newest: bool = True
    expected: bool = False
    allow_change: bool = False

    @classmethod
    def of(cls, named: str | None, run: RunArguments) -> ResumeOptions:
        """Read transformers' resume_from_checkpoint, a path or a truth value, beside our own keys."""
        word = str(named).lower()
        path = Path(named) if named and word not in ("true", "false") else None
        newest = run.auto_resume and word != "false"
        return cls(path, newest, word == "true", run.allow_resume_change)
