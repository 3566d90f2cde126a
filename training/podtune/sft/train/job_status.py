"""Progress in the status of a TrainJob: transformers' callback, which must not hold up the training."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerState
from transformers.integrations import KubeflowCallback

from podtune.run.errors import warn

FAILURES = 3  # in a row; each holds a step for up to 5 s


class JobStatus(KubeflowCallback):  # type: ignore[misc]
    """Takes the place of the callback that transformers adds in a TrainJob whose controller offers it.

    Of a run that goes on from a checkpoint, or is preempted, it says what is true.
    """

    # a controller that a NetworkPolicy closes off would else cost every rank 5 of each 10 seconds
    _failures = 0
    _begun_at, _began_s = 0, 0.0  # the step of this start, and its time

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._begun_at, self._began_s = state.global_step, time.monotonic()
        super().on_train_begin(args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:  # transformers would say 100 % of a run that was preempted
            super().on_train_end(args, state, control, **kwargs)

    def _update_status(
        self,
        progress_percent: int | None = None,
        estimated_time_remaining: float | None = None,
        metrics: dict[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        if metrics and "current_step" in metrics:
            # transformers divides the time of this attempt by the steps of all attempts
            step, last = metrics["current_step"], metrics["total_steps"]
            step_s = (time.monotonic() - self._began_s) / (step - self._begun_at)
            estimated_time_remaining = step_s * (last - step)
        before = self._last_update_time
        sent: bool = super()._update_status(progress_percent, estimated_time_remaining, metrics, force)
        if sent or self._last_update_time != before:  # it was tried, not held back to be one of few
            self._failures = 0 if sent else self._failures + 1
        if self._failures == FAILURES:
            self._initialized = False  # transformers' own way to say nothing
            warn(
                "report_to kubeflow: the job's status is not kept up to date, because the controller cannot "
                "be reached (networkPolicy.extraEgress)"
            )
        return sent
