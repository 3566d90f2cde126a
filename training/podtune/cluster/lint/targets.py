"""The versions of the operator and of Trainer that manifests are checked for."""

from __future__ import annotations

from dataclasses import dataclass

from podtune.run.errors import UserError

TRAINERS = ("2.0", "2.1", "2.2", "2.3", "2.4")
#: Trainer 2.4 has the CRDs of 2.3, and takes shorter names of replicated jobs
SAME_SCHEMA = {"2.4": "2.3"}
MAX_STEP_NAME = {"2.4": 20}
VERSIONS = {"operator": ("1.9",), "trainer": TRAINERS}


@dataclass(frozen=True)
class Target:
    """The versions in the cluster.

    Without a version of Trainer each TrainJob is held against all of them, and the newest that takes it
    counts.
    """

    operator: str = "1.9"
    trainer: str = ""

    def __str__(self) -> str:
        trainer = self.trainer or f"{TRAINERS[0]} to {TRAINERS[-1]}, the newest that fits"
        return f"training operator {self.operator}, Trainer {trainer}"


def parse(text: str) -> Target:
    """A target from ``operator=1.9,trainer=2.1``; parts that are left out keep the default.

    Raises:
        UserError: a name or a version that is not known.
    """
    given: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, version = part.partition("=")
        given[name] = ".".join(version.removeprefix("v").split(".")[:2])
        if given[name] not in VERSIONS.get(name, ()):
            fix = ", ".join(f"{known}={'|'.join(versions)}" for known, versions in VERSIONS.items())
            raise UserError(f"--target does not know {part!r}", fix=f"use {fix}", code=2)
    return Target(**given)
