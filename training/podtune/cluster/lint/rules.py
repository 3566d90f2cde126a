"""What a rule is, what it finds, and the list of all rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from podtune.cluster.lint.job import Job, Place

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Found:
    """What a rule yields: a place in the job's document and one sentence; severity and fix only where they
    differ from the rule's.
    """

    path: Place
    message: str
    severity: Severity | None = None
    fix: str = ""


@dataclass(frozen=True)
class Rule:
    """A named check. Its documentation line is the function's docstring; examples are in examples.yaml."""

    code: str
    # error: refused, hangs, never ends, trains wrongly or leaks; warning: costs GPU hours; note: depends on
    # the cluster
    severity: Severity
    fix: str
    values: str  # the path in the chart's values
    kinds: tuple[str, ...]
    check: Callable[[Job], Iterator[Found]]

    @property
    def name(self) -> str:
        """The rule in words, from the function's name."""
        return self.check.__name__.replace("_", "-")

    @property
    def summary(self) -> str:
        """One line of documentation."""
        return " ".join((self.check.__doc__ or "").split())


RULES: list[Rule] = []


def rule(
    code: str, severity: Severity, *, fix: str, values: str = "", kinds: tuple[str, ...] = ("PyTorchJob",)
) -> Callable[[Callable[[Job], Iterator[Found]]], Callable[[Job], Iterator[Found]]]:
    """Declare a check as a rule."""

    def declare(check: Callable[[Job], Iterator[Found]]) -> Callable[[Job], Iterator[Found]]:
        RULES.append(Rule(code, severity, fix, values, kinds, check))
        return check

    return declare


BOTH = ("PyTorchJob", "TrainJob")
