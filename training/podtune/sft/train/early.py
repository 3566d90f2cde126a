"""Early stopping: the run ends well when its evaluation has not improved for a while."""

from __future__ import annotations

from typing import Any

from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy


class EarlyStopping(EarlyStoppingCallback):  # type: ignore[misc]
    """transformers' callback, with a checkpoint where it stops. Every rank sees the same evaluation."""

    @property
    def stopped(self) -> bool:
        """True once ``early_stopping_patience`` evaluations in a row have not improved."""
        return bool(self.early_stopping_patience_counter >= self.early_stopping_patience)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float],
        **kwargs: Any,
    ) -> None:
        super().on_evaluate(args, state, control, metrics, **kwargs)
        if self.stopped and args.save_strategy != SaveStrategy.NO:
            # a pod that starts again finds the run finished
            control.should_save = True


def stopped_early(trainer: Any) -> str:
    """Reason why ``trainer`` ended before its last step although nobody stopped it; empty if it did not."""
    state, callbacks = trainer.state, trainer.callback_handler.callbacks
    # a resumed run has made the callback anew
    early = next((each for each in callbacks if isinstance(each, EarlyStopping)), None)
    if early is None or not early.stopped or state.global_step >= state.max_steps:
        return ""
    patience = early.early_stopping_patience
    reason = f"stopped early: {patience} evaluation{'s' * (patience != 1)} in a row brought no better value"
    best = state.best_global_step
    if best is None:
        return reason
    kept = best if trainer.args.load_best_model_at_end else state.global_step
    return f"{reason}; step {best} was the best, final/ is step {kept}"
