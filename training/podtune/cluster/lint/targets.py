"""The versions of the operator, of Trainer and of Kubernetes that manifests are checked for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from podtune.run.errors import UserError

OPERATORS = ("1.9",)
TRAINERS = ("2.0", "2.1", "2.2", "2.3", "2.4")
#: Trainer 2.4 has the CRDs of 2.3, and takes shorter names of replicated jobs
SAME_SCHEMA = {"2.4": "2.3"}
MAX_STEP_NAME = {"2.4": 20}
OLDEST_KUBERNETES, NEWEST_KUBERNETES = 25, 36  # minor versions


@dataclass(frozen=True)
class Target:
    """The versions in the cluster.

    Without a version of Trainer each TrainJob is held against all of them, and the newest that takes it
    counts.
    """

    operator: str = "1.9"
    trainer: str = ""
    kubernetes: int = 34  # the minor version

    def __str__(self) -> str:
        trainer = self.trainer or f"{TRAINERS[0]} to {TRAINERS[-1]}, the newest that fits"
        return f"training operator {self.operator}, Trainer {trainer}, Kubernetes 1.{self.kubernetes}"


def parse(text: str) -> Target:
    """A target from ``operator=1.9,trainer=2.1,kubernetes=1.34``; parts that are left out keep the default.

    Raises:
        UserError: a name or a version that is not known.
    """
    target = Target()
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, version = part.partition("=")
        short = ".".join(version.strip().removeprefix("v").split(".")[:2])
        if name == "operator" and short in OPERATORS:
            target = replace(target, operator=short)
        elif name == "trainer" and short in TRAINERS:
            target = replace(target, trainer=short)
        elif name == "kubernetes" and _minor(short) is not None:
            target = replace(target, kubernetes=_minor(short) or 0)
        else:
            choices = f"operator={'|'.join(OPERATORS)}, trainer={'|'.join(TRAINERS)}"
            span = f"kubernetes=1.{OLDEST_KUBERNETES} to 1.{NEWEST_KUBERNETES}"
            raise UserError(f"--target does not know {part!r}", fix=f"use {choices}, {span}", code=2)
    return target


def _minor(version: str) -> int | None:
    major, _, minor = version.partition(".")
    ok = major == "1" and minor.isdigit() and OLDEST_KUBERNETES <= int(minor) <= NEWEST_KUBERNETES
    return int(minor) if ok else None
