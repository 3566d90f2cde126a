"""One stop for all ranks: with a checkpoint after a signal to any of them, without one after a lost loss."""

from __future__ import annotations

import contextlib
import enum
import signal
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from podtune.run.errors import DataError, UserError
from podtune.run.world import World
from podtune.sft.train.saving import CheckpointWriter

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(Exception):
    """A signal arrived during work that may be abandoned."""


class StopSignals:
    """Requests to stop this process: SIGTERM, SIGINT or SIGHUP inside of the ``with`` block.

    A second SIGINT or SIGHUP ends the process at once, as without a handler.
    """

    def __init__(self) -> None:
        self.requested = False
        self._abandonable = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        self._before = {each: signal.signal(each, self._request) for each in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, _frame: object) -> None:
        if self.requested and number != signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.requested = True
        if self._abandonable:
            raise Interrupted

    @contextlib.contextmanager
    def abandonable(self) -> Iterator[None]:
        """Leave the block with :class:`Interrupted` on a signal, also on one that came before it."""
        self._abandonable = True
        try:
            if self.requested:
                raise Interrupted
            yield
        finally:
            self._abandonable = False


class Decision(enum.IntEnum):
    """The action of all ranks after a step; the largest of theirs wins."""

    CONTINUE = 0
    STOP = 1
    NONFINITE = 2


class CoordinatedStop(TrainerCallback):  # type: ignore[misc]
    """Ends training on all ranks after the same step; one all-reduce of two numbers a step.

    The same all-reduce tells when every pod has copied a checkpoint that is in flight, which is then
    committed.
    """

    def __init__(self, signals: StopSignals, world: World, writer: CheckpointWriter) -> None:
        self.stopped = False  # by a signal, on all ranks
        self._signals, self._world, self._writer = signals, world, writer
        self._nonfinite = torch.zeros((), dtype=torch.bool)
        # the verdict on the step before, on its way from a GPU
        self._late: tuple[torch.Tensor, torch.cuda.Event | None] = self._nonfinite.clone(), None

    def watch(self, value: torch.Tensor) -> None:
        """Note a loss or gradient norm, where it lies: a GPU is not waited for."""
        self._nonfinite = self._nonfinite.to(value.device) | ~torch.isfinite(value).all()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        certain = control.should_save or control.should_evaluate
        decision = self.all_reduce_decision(requested=self._signals.requested, certain=certain)
        if decision is Decision.NONFINITE:
            raise _nonfinite_error(state.global_step)
        if decision is Decision.STOP:
            self.stopped = control.should_training_stop = control.should_save = True

    def refuse_nonfinite(self, step: int) -> None:
        """Raise if a step had a loss or gradient that is not finite: before anything is saved or evaluated.

        A collective call.
        """
        if self.all_reduce_decision(requested=False, certain=True) is Decision.NONFINITE:
            raise _nonfinite_error(step)

    def all_reduce_decision(self, *, requested: bool, certain: bool) -> Decision:
        """Agree on the action after this step. A collective call.

        Unless ``certain``, a GPU is not waited for: its verdict on this step is read after the next one.
        """
        copying = self._writer.copying()
        nonfinite = self._saw_nonfinite(certain)
        decision = Decision.NONFINITE if nonfinite else Decision.STOP if requested else Decision.CONTINUE
        state = torch.tensor((decision, int(copying)))
        if self._world.world_size > 1:
            dist.all_reduce(state, op=dist.ReduceOp.MAX)
        if not state[1]:
            self._writer.allow_commit()
        return Decision(int(state[0]))

    def _saw_nonfinite(self, certain: bool) -> bool:
        if certain or not self._world.gpu_path:
            return bool(self._nonfinite)
        before, copied = self._late
        if copied is not None:
            copied.synchronize()
        seen = bool(before)
        event = torch.cuda.Event() if self._nonfinite.is_cuda else None  # type: ignore[no-untyped-call]
        self._late = (self._nonfinite.to("cpu", non_blocking=True), event)
        if event is not None:
            event.record()
        return seen


def _nonfinite_error(step: int) -> UserError:
    return DataError(
        f"the loss or its gradient is not finite at step {step}; nothing was saved after it",
        where="training",
        fix="lower learning_rate, check max_grad_norm and the data, or use bf16 or fp32 instead of fp16; "
        "the last checkpoint is from before",
    )
