"""Progress of a run: one line a logging step, metrics.jsonl, and the measurements of run.json. Rank 0."""

from __future__ import annotations

import math
import re
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
from podtune.sft.train.meter import Meter, system_metrics


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
        *,
        is_main: bool,
        nproc_per_node: int,
        from_step: int,
        tokens_before: int,
        rows: int | None,
        on_step: Callable[[int], object] | None = None,
    ) -> None:
        self.step_times: list[float] = []
        self.time_to_first_step_s: float | None = None
        self.losses: dict[str, float] = {}
        # and the last step: samples are reckoned from them at the end
        self._seen: tuple[TrainingArguments, int] | None = None
        self._log = MetricsLog(output_dir / "metrics.jsonl", from_step=from_step) if is_main else None
        for entry in self._log.kept if self._log else []:  # of the starts before, killed ones included
            if (loss := number(entry.get("loss"))) is not None:
                self._note_loss(entry["split"], loss)
        self._tokens, self._first_tokens = tokens_before, tokens_before
        # real tokens and seconds of training between two logging steps
        self._windows: list[tuple[int, float]] = []
        self._window_steps = 0
        self._meter, self._nproc_per_node, self._on_step = meter, nproc_per_node, on_step
        self._from_step, self._rows = from_step, rows
        self._display = _Terminal() if is_main and sys.stdout.isatty() else _Lines()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._seen = args, state.global_step
        if self._log:
            self._display.start(state.max_steps, self._from_step)

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
        if self._on_step:
            self._on_step(state.global_step)
        if self._log:
            self._display.advance(state.global_step)

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
        elif "eval_loss" in logs:
            self._eval_line(state, dict(logs))

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
        self._display.train(
            train_line(state.global_step, state.max_steps, logs, system, self._nproc_per_node)
        )

    def _eval_line(self, state: TrainerState, logs: dict[str, Any]) -> None:
        assert self._log
        metrics = {key.removeprefix("eval_"): value for key, value in logs.items() if key != "epoch"}
        metrics.pop("num_tokens", None)
        metrics["perplexity"] = (
            math.exp(min(metrics["loss"], 700.0)) if math.isfinite(metrics["loss"]) else metrics["loss"]
        )
        self._note_loss("eval", metrics["loss"])
        self._log.write("eval", state.global_step, self._epoch(state) | {"tokens": self._tokens} | metrics)
        self._display.evaluation(eval_line(state.global_step, metrics))

    def _epoch(self, state: TrainerState) -> dict[str, float | None]:
        # a stream has none: transformers' is the share of max_steps that this start has done
        return {} if self._rows is None else {"epoch": state.epoch}

    def _note_loss(self, split: str, loss: float) -> None:
        first, last = ("first", "last") if split == "train" else ("eval_first", "eval")
        self.losses.setdefault(first, loss)
        self.losses[last] = loss

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._log:
            self._display.stop()
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


class _Lines:
    """One line a logging step: for logs, files and pods."""

    def start(self, max_steps: int, done: int) -> None:
        print(start_line(done, max_steps), flush=True)

    def advance(self, step: int) -> None:
        """Nothing between the lines."""

    def train(self, line: str) -> None:
        print(line, flush=True)

    def evaluation(self, line: str) -> None:
        print(line, flush=True)

    def stop(self) -> None:
        """Nothing is open."""


class _Terminal(_Lines):
    """A progress bar with the last figures beside it; evaluations stay as lines above."""

    def start(self, max_steps: int, done: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("step"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
        )
        self._task = self._bar.add_task("", total=max_steps, completed=done)
        self._bar.start()

    def advance(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def train(self, line: str) -> None:
        self._bar.update(self._task, description=re.sub(r"^step +(\d+)/\d+  loss", r"loss (\1)", line))

    def evaluation(self, line: str) -> None:
        self._bar.console.print(line)

    def stop(self) -> None:
        self._bar.stop()
