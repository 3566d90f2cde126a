"""SFTTrainer with what a cluster needs: complete checkpoints, one stop for all ranks, real token counts, a lean loss."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import SFTTrainer

from training.run import checkpoint
from training.run.distributed import World
from training.run.errors import DATA, UserError
from training.sft.loss import lean_loss

_RUNNING, _STOP, _NONFINITE = 0, 1, 2


class PodtuneTrainer(SFTTrainer):  # type: ignore[misc]
    """TRL's trainer, with five hooks of transformers' Trainer filled in.

    ``facts`` describes the run in every checkpoint's manifest (see :func:`training.run.checkpoint.check_resume`).
    """

    def __init__(self, *args: Any, world: World, facts: dict[str, Any], lean: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.world, self.facts, self.lean = world, facts, lean
        self.tokens = 0  # real tokens of all ranks since the very first start, as of the last logging step
        self._local_tokens = torch.zeros((), dtype=torch.long)
        self._nonfinite = torch.zeros((), dtype=torch.bool)
        self._saving = False

    # ---- loss and what is counted ----
    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        if self.lean and self.model.training and not return_outputs:
            return lean_loss(self, model, inputs, num_items_in_batch)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        # Counted where the batch lies, before it goes to the device: no synchronisation.
        mask = inputs.get("attention_mask")
        self._local_tokens += inputs["input_ids"].numel() if mask is None else mask.sum().cpu()
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._nonfinite = self._nonfinite.to(loss.device) | ~torch.isfinite(loss)
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None and not self.args.fp16:  # fp16's scaler meets infinite gradients and skips the step
            self._nonfinite = self._nonfinite | ~torch.isfinite(torch.as_tensor(norm, device=self._nonfinite.device)).all()
        return norm

    def global_tokens(self) -> int:
        """Real tokens of all ranks so far. A collective call."""
        counted = self._local_tokens.clone()
        if self.world.world_size > 1:
            dist.all_reduce(counted)
        self.tokens += int(counted)
        self._local_tokens.zero_()
        return self.tokens

    def agree(self, stop: bool) -> int:
        """What all ranks do after this step: go on, stop and save, or give up on a loss that is not finite."""
        state = torch.tensor(_NONFINITE if bool(self._nonfinite) else _STOP if stop else _RUNNING)
        if self.world.world_size > 1:
            dist.all_reduce(state, op=dist.ReduceOp.MAX)
        return int(state)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs["tokens"] = self.global_tokens()
        super().log(logs, start_time)

    # ---- checkpoints ----
    def _get_output_dir(self, trial: Any) -> str:
        output = super()._get_output_dir(trial)
        return str(Path(output) / checkpoint.SAVING) if self._saving else str(output)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        output, limit = Path(self.args.output_dir), self.args.save_total_limit
        name = f"checkpoint-{self.state.global_step}"
        aside = output / checkpoint.SAVING / name
        tokens = self.global_tokens()
        if self.world.is_main:
            shutil.rmtree(aside.parent, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._saving, self.args.save_total_limit = True, None  # rotation is ours: it must not see the folder aside
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saving, self.args.save_total_limit = False, limit
        self.accelerator.wait_for_everyone()  # every rank's random state is in the folder
        if self.state.best_model_checkpoint == str(aside):
            self.state.best_model_checkpoint = str(output / name)
        if self.world.is_main:
            self.state.save_to_json(str(aside / "trainer_state.json"))
            checkpoint.seal(aside, output / name, self.state.global_step, self.facts | {"tokens": tokens})
            best = self.state.best_model_checkpoint
            checkpoint.rotate(output, limit, Path(best) if best else None)
        self.accelerator.wait_for_everyone()


class StopTogether(TrainerCallback):  # type: ignore[misc]
    """SIGTERM to any rank: all ranks finish the same step, save, and stop. A loss that is not finite: all ranks stop, unsaved."""

    def __init__(self) -> None:
        self.requested = False
        self.trainer: PodtuneTrainer | None = None
        self._before: Any = None

    def __enter__(self) -> StopTogether:
        self._before = signal.signal(signal.SIGTERM, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _request(self, *_: object) -> None:
        self.requested = True

    @property
    def stopped(self) -> bool:
        """True once the ranks have agreed to stop."""
        return self._agreed

    _agreed = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        assert self.trainer is not None
        decision = self.trainer.agree(self.requested)
        if decision == _NONFINITE:
            raise UserError(
                f"the loss or its gradient is not finite at step {state.global_step}; nothing was saved after it",
                where="training",
                fix="lower learning_rate, check max_grad_norm and the data, or use bf16 or fp32 instead of fp16; "
                "the last checkpoint is from before",
                code=DATA,
            )
        if decision == _STOP:
            self._agreed = True
            control.should_training_stop = True
            control.should_save = True


@contextlib.contextmanager
def stopwatch(seconds: dict[str, float], name: str) -> Any:
    """Add the duration of the block to ``seconds[name]``."""
    started = time.monotonic()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.monotonic() - started
