"""The list of all rules, and how a check becomes one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from podtune.cluster.lint.diagnostic import By, Diagnostic, Severity
from podtune.cluster.lint.documents import JOBS, RUNTIMES
from podtune.cluster.lint.job import Job
from podtune.run.errors import UserError, near

Check = Callable[[Job], Iterator[Diagnostic]]
ALL = (*JOBS, *RUNTIMES)
WITH_PODS = ("PyTorchJob", "Job", *RUNTIMES)


@dataclass(frozen=True)
class Rule:
    """A named check; its examples are in examples.yaml.

    ``severity`` is the highest that it gives. An error is refused by somebody (``by``), or certainly hangs or
    never ends whatever the script does, and the docstring says which; a warning is likely to hurt; a note is
    a matter of taste or of the cluster.
    """

    code: str
    severity: Severity
    by: By
    fix: str
    kinds: tuple[str, ...]
    check: Check
    name: str
    summary: str  # the docstring as one line


RULES: list[Rule] = []


def find(code: str, where: str = "") -> Rule:
    """The rule of this code, in letters of either case.

    Raises:
        UserError: there is none.
    """
    rules = {rule.code: rule for rule in RULES}
    name = code.strip().upper()
    if name in rules:
        return rules[name]
    what = f"{name!r} is not a rule{near(name, [*rules])}"
    raise UserError(what, where=where, fix=f"use one of {', '.join(sorted(rules))}", code=2)


def rule(
    code: str,
    severity: Severity,
    *,
    fix: str,
    by: By = "",
    kinds: tuple[str, ...] = ("PyTorchJob",),
) -> Callable[[Check], Check]:
    """Declare a check as a rule."""

    def declare(check: Check) -> Check:
        # docs/lint.md and --explain show both
        name, summary = check.__name__.replace("_", "-"), " ".join((check.__doc__ or "").split())
        RULES.append(Rule(code, severity, by, fix, kinds, check, name, summary))
        return check

    return declare


def collected(code: str, name: str, by: By, fix: str, refused: str) -> None:
    """Declare a rule without a check of its own: the passes over the whole document find it."""
    severity: Severity = "error" if by else "warning"
    summary = f"The API server refuses what {refused}."
    RULES.append(Rule(code, severity, by, fix, ALL, lambda job: iter(()), name, summary))
