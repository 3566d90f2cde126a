"""A job in a cluster at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cause:
    """A reason why a job does not run, what to do, and what shows it."""

    pod: str
    reason: (
        str  # Kubernetes' own word: OOMKilled, ImagePullBackOff, Unschedulable; or that of why/causes.yaml
    )
    text: str
    fix: str = ""
    grade: int = 0  # how much it explains; see cluster/why/causes.py
    at: str = ""  # RFC 3339, of a container that ended
    evidence: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.pod}: {self.text}" + (f" (fix: {self.fix})" if self.fix else "")


@dataclass(frozen=True)
class PodStatus:
    """A pod as `kubectl get pods` shows it; ``phase`` is the word that says most."""

    name: str
    phase: str
    node: str | None  # None before it is scheduled
    restarts: int
    start_s: dict[str, float] = field(default_factory=dict)  # by phase, up to the start of its containers


@dataclass(frozen=True)
class JobStatus:
    """A job's condition, its pods, and what is wrong with them."""

    job: str
    kind: str
    namespace: str
    condition: str
    message: str
    started_at: str | None
    ended_at: str | None
    pods: list[PodStatus]
    problems: list[Cause]

    @property
    def ended(self) -> bool:
        return self.condition in ("Succeeded", "Failed")
