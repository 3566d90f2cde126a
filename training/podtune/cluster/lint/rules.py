"""What a rule is, what it finds, and the list of all rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from podtune.cluster.lint.documents import JOBS, RUNTIMES
from podtune.cluster.lint.job import Job, Place

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
#: who makes an error one: API server, webhook and operator refuse; a "hang" cannot start or never ends
By = Literal["api", "webhook", "operator", "hang", ""]
REFUSING: tuple[By, ...] = ("api", "webhook", "operator")


@dataclass(frozen=True)
class Hit:
    """What a rule yields: a place in the job's document and one sentence; severity, fix and who refuses only
    where they differ from the rule's.

    ``{role}`` in the sentence becomes the replica types that it holds for.
    """

    path: Place
    message: str
    severity: Severity | None = None
    fix: str = ""
    role: str = ""
    by: By | None = None


Check = Callable[[Job], Iterator[Hit]]


@dataclass(frozen=True)
class Rule:
    """A named check.

    Its documentation is the function's docstring; examples are in examples.yaml.     ``severity`` is the
    highest that it gives: an error is refused by somebody, or certainly hangs or never ends     whatever the
    script does, and the docstring says which; a warning is likely to hurt; a note is a matter of     taste or
    of the cluster.
    """

    code: str
    severity: Severity
    by: By
    fix: str
    values: str  # the path in the chart's values
    kinds: tuple[str, ...]
    check: Check

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
    code: str,
    severity: Severity,
    *,
    fix: str,
    by: By = "",
    values: str = "",
    kinds: tuple[str, ...] = ("PyTorchJob",),
) -> Callable[[Check], Check]:
    """Declare a check as a rule."""

    def declare(check: Check) -> Check:
        RULES.append(Rule(code, severity, by, fix, values, kinds, check))
        return check

    return declare


BOTH = JOBS
ALL = (*JOBS, *RUNTIMES)
WITH_PODS = ("PyTorchJob", *RUNTIMES)
