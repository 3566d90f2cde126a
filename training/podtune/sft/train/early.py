"""Early stopping: the run ends well when its evaluation has not improved for a while."""

from __future__ import annotations

from typing import Any

from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from podtune.sft.config.arguments import RunArguments


class EarlyStopping(EarlyStoppingCallback):  # type: ignore[misc]
    """transformers' callback, with a checkpoint where it stops.

    A pod that starts again then finds the run finished. Every rank sees the same evaluation and so decides
    the same.
    """

    @property
    def stopped(self) -> bool:
        """True once ``early_stopping_patience`` evaluations in a row have not improved."""
        return bool(self.early_stopping_patience_counter >= self.early_stopping_patience)

    @property
    def reason(self) -> str:
        """Reason for the record why the run ended before max_steps."""
        times = self.early_stopping_patience
        return f"stopped early: {times} evaluation{'s' * (times != 1)} in a row brought no better value"

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
            control.should_save = True


def early_stopping(run: RunArguments) -> list[EarlyStopping]:
    """Make the callback, if ``early_stopping_patience`` asks for one."""
    patience = run.early_stopping_patience
    return [EarlyStopping(patience, run.early_stopping_threshold)] if patience else []


def stopped_early(trainer: Any) -> str:
    """Reason why ``trainer`` ended before its last step although nobody stopped it; empty if it did not."""
    if trainer.state.global_step >= trainer.state.max_steps:
        return ""
    callbacks = trainer.callback_handler.callbacks  # a resumed run has made the callback anew
    early = next((each for each in callbacks if isinstance(each, EarlyStopping)), None)
    if early is None or not early.stopped:
        return ""
    best, last = trainer.state.best_global_step, trainer.state.global_step
    kept = f"final/ is step {best if trainer.args.load_best_model_at_end else last}"
    return f"{early.reason}; step {best} was the best, {kept}" if best is not None else early.reason
