"""Progress in the status of a TrainJob: transformers' callback, which must not hold up the training."""

from __future__ import annotations

from typing import Any

from transformers.integrations import KubeflowCallback

from podtune.run.errors import warn

FAILURES = 3  # in a row; each holds a step for up to 5 s


class JobStatus(KubeflowCallback):  # type: ignore[misc]
    """Takes the place of the callback that transformers adds in a TrainJob whose controller offers it."""

    # a controller that a NetworkPolicy closes off would else cost every rank 5 of each 10 seconds
    _failures = 0

    def _update_status(self, *args: Any, **kwargs: Any) -> bool:
        before = self._last_update_time
        sent: bool = super()._update_status(*args, **kwargs)
        if sent or self._last_update_time != before:  # it was tried, not held back to be one of few
            self._failures = 0 if sent else self._failures + 1
        if self._failures == FAILURES:
            self._initialized = False  # transformers' own way to say nothing
            warn(
                "report_to kubeflow: the job's status is not kept up to date, because the controller cannot "
                "be reached (networkPolicy.extraEgress)"
            )
        return sent
