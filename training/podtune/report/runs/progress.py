"""Progress of a running run: steps done, time left, and stalls. No torch."""

from __future__ import annotations

import time
from dataclasses import dataclass

from podtune.report.runs.runs import Run
from podtune.run.lock import SILENT_S
from podtune.run.record import number


@dataclass(frozen=True)
class Progress:
    """Progress of a running run; ``total_steps`` and ``eta_s`` are None before the first metrics line."""

    step: int
    total_steps: int | None
    eta_s: float | None
    silent_s: float | None  # since its last step, where a heartbeat tells

    @property
    def share(self) -> float | None:
        """Done, from 0 to 1."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else None

    @property
    def stalled(self) -> bool:
        """True if its process beats and no step was finished for a minute and five steps' time."""
        return self.silent_s is not None and self.silent_s > SILENT_S


def progress(run: Run) -> Progress:
    """Compute the progress of a running run from its last sign of life and last training line."""
    reached = run.last_step()
    last = (run.entries.get("train") or [{}])[-1]
    logged, eta, step_time = (
        int(last.get("step", 0)),
        number(last.get("eta_s")),
        number(last.get("step_time_s")),
    )
    step = max(logged, reached[0] if reached else 0)
    planned = number((run.record.get("config") or {}).get("max_steps"))
    total = int(planned) if planned and planned > 0 else None
    if total is None and eta is not None and step_time:
        total = logged + round(eta / step_time)
    if eta is not None and step_time:
        eta = max(0.0, eta - (step - logged) * step_time)
    silent = None
    if (
        reached and run.status == "running" and step > 0 and step != total
    ):  # after its last step a run saves, and may answer
        silent = max(0.0, time.time() - reached[1] - run.patience_s())
    return Progress(step, total, eta, silent)
