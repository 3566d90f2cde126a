"""Progress of a run: one line a logging step, metrics.jsonl, and the measurements of run.json. Rank 0."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from podtune.run.log_lines import eval_line, start_line, train_line
from podtune.run.metrics_log import MetricsLog
from podtune.run.record import Losses, Measurements, Summary, number
from podtune.run.start_phases import durations, first_step_line, phase_ended
from podtune.run.world import World
from podtune.sft.train.meter import Meter, evaluation_of, system_metrics


class Progress(TrainerCallback):  # type: ignore[misc]
    """Times every step on every rank; on rank 0 also writes and prints.

    Args:
        rows: length of the training set; None of a stream.
        on_step: called with every step that is done.
    """

    def __init__(
        self,
        output_dir: Path,
        meter: Meter,
        world: World,
        *,
        from_step: int,
        rows: int | None,
        on_step: Callable[[int], object] | None = None,
    ) -> None:
        self.step_times: list[float] = []
        self.time_to_first_step_s: float | None = None
        self.losses: dict[str, float] = {}
        # and the last step: samples are computed from them at the end
        self._seen: tuple[TrainingArguments, int] | None = None
        self._log = MetricsLog(output_dir / "metrics.jsonl", from_step=from_step) if world.is_main else None
        for entry in self._log.kept if self._log else []:  # of the starts before, killed ones included
            if (loss := number(entry.get("loss"))) is not None:
                self._note_loss(entry["split"], loss)
        self._meter, self._tokens, self._on_step = meter, meter.tokens, on_step
        # real tokens and seconds of training between two logging steps
        self._windows: list[tuple[int, float]] = []
        self._window_steps = 0
        self._from_step, self._rows, self._nproc_per_node = from_step, rows, world.local_world_size

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._seen = args, state.global_step
        if self._log:
            print(start_line(self._from_step, state.max_steps), flush=True)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.step_times.append(time.monotonic() - self._meter.step_began)  # the wait for its data included
        self._window_steps += 1
        self._seen = args, state.global_step
        if state.global_step == state.max_steps and args.logging_strategy == "steps":
            # a run shorter than logging_steps has a loss too, and every run its last one
            control.should_log = True
        if self.time_to_first_step_s is None:
            self.time_to_first_step_s = time.time() - psutil.Process().create_time()
            phase_ended("step")
            if self._log and (phases := durations()):
                print(first_step_line(phases), flush=True)
        if self._log and sys.stdout.isatty():  # the next line is written over it
            print(f"step {state.global_step:,} of {state.max_steps:,}", end="\r", flush=True)
        if self._on_step:
            self._on_step(state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if not self._log or not logs:
            return
        if "loss" in logs:
            self._train_line(state, dict(logs))
        elif split := evaluation_of(logs):
            self._eval_line(state, split, dict(logs))

    def _train_line(self, state: TrainerState, logs: dict[str, Any]) -> None:
        assert self._log
        seconds = sum(self.step_times[-self._window_steps :]) if self._window_steps else 0.0
        tokens = int(logs["tokens"])
        if seconds:
            self._windows.append((tokens - self._tokens, seconds))
            logs["tokens_per_s"] = (tokens - self._tokens) / seconds
            logs["step_time_s"] = seconds / self._window_steps
            logs["eta_s"] = (state.max_steps - state.global_step) * logs["step_time_s"]
        self._tokens, self._window_steps = tokens, 0
        self._note_loss("train", logs["loss"])
        logs.pop("num_tokens", None)  # TRL's count, of this attempt only
        logs.pop("epoch", None)
        self._log.write("train", state.global_step, self._epoch(state) | logs)
        system = system_metrics(self._meter.ranks, logs.get("step_time_s"))
        self._log.write("system", state.global_step, self._epoch(state) | {"tokens": tokens} | system)
        line = train_line(state.global_step, state.max_steps, logs, system, self._nproc_per_node)
        print(line, flush=True)

    def _eval_line(self, state: TrainerState, split: str, logs: dict[str, Any]) -> None:
        assert self._log
        # TRL's own metrics have no set's name
        metrics = {key.removeprefix(f"{split}_").removeprefix("eval_"): logs[key] for key in logs}
        metrics.pop("epoch", None)
        metrics.pop("num_tokens", None)
        loss = metrics["loss"]
        metrics["perplexity"] = math.exp(min(loss, 700.0)) if math.isfinite(loss) else loss
        self._note_loss(split, loss)
        self._log.write(split, state.global_step, self._epoch(state) | {"tokens": self._tokens} | metrics)
        name = split.removeprefix("eval").replace("_", " of ", 1)
        print(eval_line(state.global_step, metrics) + name, flush=True)

    def _epoch(self, state: TrainerState) -> dict[str, float | None]:
        # a stream has none: transformers' is the share of max_steps that this start has done
        return {} if self._rows is None else {"epoch": state.epoch}

    def _note_loss(self, split: str, loss: float) -> None:
        names = {"train": ("first", "last"), "eval": ("eval_first", "eval")}
        if split not in names:  # one of several sets
            return
        first, last = names[split]
        self.losses.setdefault(first, loss)
        self.losses[last] = loss

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._log:
            self._log.close()

    def measurements(self) -> Measurements:
        """Measure what this process can know alone.

        Step times leave out the first two steps, speed the first logging step.
        """
        times = self.step_times[2:] or self.step_times
        windows = self._windows[1:] or self._windows
        return Measurements(
            steps=self._from_step + len(self.step_times),
            tokens=self._tokens,
            loss=Losses(**self.losses) if self.losses else None,
            samples=samples_seen(*self._seen, self._rows) if self._seen else None,
            tokens_per_s=sum(tokens for tokens, _ in windows) / sum(seconds for _, seconds in windows)
            if windows
            else None,
            step_time_s=Summary.of(times) if times else None,
            speeds_since_step=self._from_step or None,
            time_to_first_step_s=self.time_to_first_step_s,
            start_s=durations() or None,
        )


def samples_seen(args: TrainingArguments, steps: int, rows: int | None) -> int:
    """Count the rows of all ranks in the first ``steps`` steps; ``rows`` is None for a stream.

    The last step of an epoch may be a smaller one. Several ranks get equally many rows (see
    :func:`repeated_rows`).
    """
    micro_batch: int = args.train_batch_size * args.world_size
    batch: int = micro_batch * args.gradient_accumulation_steps
    if rows is None:
        return steps * batch
    if args.dataloader_drop_last:
        rows = rows // micro_batch * micro_batch
    rows += repeated_rows(args, rows)
    epochs, further = divmod(steps, math.ceil(rows / batch))
    return epochs * rows + min(further * batch, rows)


def repeated_rows(args: TrainingArguments, rows: int) -> int:
    """Count the rows that accelerate repeats in each epoch, so that all ranks have full batches."""
    alone = args.world_size == 1 or args.dataloader_drop_last
    return 0 if alone else -rows % (args.train_batch_size * args.world_size)
