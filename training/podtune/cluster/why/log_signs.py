"""Signs in the logs of pods: what a line says about why a job does not run; the table is log_signs.yaml."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from podtune.cluster.live.diagnose import CAUSE, LIKELY, SYMPTOM, PodProblem

#: the beginning of a traceback's last line, after the names that torchrun puts before it
RAISED = r"^(?:\[[\w-]+\]:\s*)*(?:[a-z_]\w*\.)*"
#: exceptions that only repeat what another process said
REPEATED = re.compile(r"ChildFailedError|DistBackendError|DistNetworkError|SignalException|DistStoreError")
GRADES = {"cause": CAUSE, "likely": LIKELY, "symptom": SYMPTOM}


@dataclass(frozen=True)
class Sign:
    """A pattern of a log line, what it says and what to do."""

    reason: str
    pattern: re.Pattern[str]
    text: str
    fix: str
    grade: int


@cache
def signs() -> list[Sign]:
    """The table's rows, the most telling first."""
    import yaml

    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return [
        Sign(
            reason,
            re.compile(row["line"].replace("RAISED", RAISED)),
            row["text"],
            row.get("fix", ""),
            GRADES[row.get("grade", "cause")],
        )
        for reason, row in rows.items()
    ]


def read_signs(pod: str, lines: list[str], at: str = "") -> list[PodProblem]:
    """Problems that a pod's log tells, the last of them first: one before it was survived."""
    last: dict[str, PodProblem] = {}
    for line in lines:
        for sign in signs():
            match = sign.pattern.search(line)
            if match and not (sign.reason == "Exception" and REPEATED.search(line)):
                first = next((group for group in match.groups() if group), "")
                text, seen = sign.text.format(first.strip()[:300]), (line.strip()[:300],)
                last.pop(sign.reason, None)
                last[sign.reason] = PodProblem(pod, sign.reason, text, sign.fix, sign.grade, at, seen)
                break
    return [*reversed(last.values())]
