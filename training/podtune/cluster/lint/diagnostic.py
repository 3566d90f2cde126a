"""The diagnostic: a rule's code, a place in a document, one sentence and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Place = tuple[str | int, ...]
Severity = Literal["error", "warning", "note", ""]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
#: who makes an error one: API server, webhook and operator refuse; a "hang" cannot start or never ends
By = Literal["api", "webhook", "operator", "hang", ""]
REFUSING: tuple[By, ...] = ("api", "webhook", "operator")


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding, as a check yields it and as the verdict holds it.

    A check gives place and message, and severity, fix and ``by`` where they differ from its rule's; the rest
    is filled in from the rule and the document. ``{role}`` in a message becomes the replica types that it
    holds for.
    """

    place: Place
    message: str
    severity: Severity = ""
    fix: str = ""
    by: By = ""  # who refuses an error
    code: str = ""
    source: str = ""
    line: int = 0
    job: str = ""

    @property
    def path(self) -> str:
        """The place as kubectl and jq write it."""
        return dotted(self.place)

    @property
    def refused(self) -> bool:
        """True if the API server, a webhook or the operator refuses it."""
        return self.severity == "error" and self.by in REFUSING


def dotted(place: Iterable[str | int]) -> str:
    """``spec.containers[0].env[1]``."""
    text = ""
    for key in place:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text
