"""The record of a fine-tune while it happens: run.json, the tracker, the heartbeat, and what resumes what."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podtune.machine.provenance import provenance
from podtune.run import checkpoint
from podtune.run.checkpoint import Checkpoint
from podtune.run.collect import emit_record
from podtune.run.distributed import World
from podtune.run.errors import UserError, exit_code, out_of_memory, warn
from podtune.run.heartbeat import Heartbeat
from podtune.run.lock import Lock
from podtune.run.log_lines import head_line
from podtune.run.record import (
    CUDA_PEAK,
    RESIDENT_PEAK_SINCE_START,
    Measurements,
    MemoryPeaks,
    Status,
    end_record,
    new_record,
    now,
    write_json,
)
from podtune.sft.train.meter import Meter
from podtune.sft.train.progress import Progress, repeated_rows

if TYPE_CHECKING:
    from podtune.sft.config.resolve import Arguments
    from podtune.sft.data.inputs import Inputs
    from podtune.sft.train.trainer import PodtuneTrainer


def resume_facts(arguments: Arguments, world: World, inputs: Inputs) -> dict[str, Any]:
    """What must not change between a checkpoint and the run that resumes it: world, batch, schedule, data,
    model.
    """
    training = arguments.training
    return {
        "world_size": world.world_size,
        "strategy": arguments.strategy,
        "per_device_train_batch_size": training.per_device_train_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": str(getattr(training.lr_scheduler_type, "value", training.lr_scheduler_type)),
        "warmup_steps": training.warmup_steps,
        "num_train_epochs": training.num_train_epochs,
        "max_steps": training.max_steps,
        "seed": training.seed,
        "max_length": training.max_length,
        "packing": training.packing,
        "data": inputs.facts["fingerprint"],
        "model": str(arguments.model.model_name_or_path),
        "use_peft": arguments.model.use_peft,
    }


def find_checkpoint(arguments: Arguments, facts: dict[str, Any]) -> Checkpoint | None:
    """The checkpoint to go on from: the one named, else the newest complete one in output_dir, else none.
    Rank 0.

    Raises:
        UserError: the one named is damaged, all are, or they belong to a run that differs from this one.
    """
    named = arguments.training.resume_from_checkpoint
    output_dir = Path(arguments.training.output_dir)
    if named and named not in ("True", "true", True):
        path = Path(named)
        if reason := checkpoint.damage(path) if path.is_dir() else "there is no such folder":
            raise UserError(
                f"cannot be resumed: {reason}", where=str(path), fix="name a complete checkpoint, or none"
            )
        manifest = json.loads((path / checkpoint.MANIFEST).read_text(encoding="utf-8"))
        found: Checkpoint | None = Checkpoint(path, int(manifest["step"]), manifest["facts"])
    elif arguments.run.auto_resume:
        found, warnings = checkpoint.newest_complete(output_dir)
        for warning in warnings:
            warn(warning)
    elif checkpoint.checkpoints(output_dir):
        raise UserError(
            ("holds checkpoints of an earlier run, and auto_resume is off"),
            where=str(output_dir),
            fix="use another output_dir, or resume",
        )
    else:
        found = None
    if found is not None:
        for change in checkpoint.check_resume(found, facts, allowed=arguments.run.allow_resume_change):
            warn(f"resuming although {change}")
    return found


def is_finished(arguments: Arguments, resume: Checkpoint) -> bool:
    """True if the run in output_dir ended well and this start asks for no step beyond its last checkpoint."""
    output_dir = Path(arguments.training.output_dir)
    try:
        record = json.loads((output_dir / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    ended = (
        record.get("status") == "ok"
        and (output_dir / "final").is_dir()
        and record["measurements"].get("steps") == resume.step
    )
    asked = ("max_steps", "num_train_epochs")
    return bool(ended and all(record["config"].get(key) == getattr(arguments.training, key) for key in asked))


class Run:
    """What one start of a fine-tune leaves behind. Every rank has one; only rank 0's writes."""

    def __init__(
        self,
        arguments: Arguments,
        world: World,
        rows: Inputs,
        tokenizer: Any,
        resume: Checkpoint | None,
        held: list[Lock],
    ) -> None:
        training = arguments.training
        self.arguments, self.world, self.rows, self.tokenizer = arguments, world, rows, tokenizer
        self._claim = held  # on rank 0, the right to write in output_dir
        self.tokens_before = int(resume.facts["tokens"]) if resume else 0
        self.resume_path = str(resume.path) if resume else None
        self.output_dir = Path(training.output_dir)
        self.step = resume.step if resume else 0
        self.meter = Meter(world, arguments.strategy)
        self.progress = Progress(
            self.output_dir,
            self.meter,
            is_main=world.is_main,
            nproc_per_node=world.local_world_size,
            from_step=self.step,
            tokens_before=self.tokens_before,
            rows=len(rows.train),
        )
        self.record: dict[str, Any] = {}
        self._tracker: Any = None
        self._heartbeat: Heartbeat | None = None
        if not world.is_main:
            return
        self.record = new_record(
            mode="sft",
            name=arguments.name,
            config=arguments.resolved(),
            strategy=arguments.strategy,
            model=str(arguments.model.model_name_or_path),
            world_size=world.world_size,
            nnodes=world.nnodes,
            nproc_per_node=world.local_world_size,
            global_batch_size=training.per_device_train_batch_size
            * world.world_size
            * training.gradient_accumulation_steps,
            seed=training.seed,
            data=rows.facts,
            provenance=provenance(),
        )
        earlier = self._earlier()
        self.record["started_at"] = earlier.get("started_at", self.record["started_at"])
        self.record["attempts"] = [
            *earlier.get("attempts", []),
            {"started_at": now(), "from_step": self.step},
        ]
        if first := Measurements.read(earlier).loss:
            losses = {"first": first.first, "eval_first": first.eval_first}
            self.progress.losses |= {key: loss for key, loss in losses.items() if loss is not None}
        self._write()
        self._heartbeat = Heartbeat(self.output_dir)
        self.progress.on_step = self._heartbeat.step
        if arguments.run.aim_repo:
            from podtune.run.aim.tracking import start_tracker

            self._tracker = start_tracker(self.output_dir, arguments.run.aim_repo)

    def _earlier(self) -> dict[str, Any]:
        """The record that an earlier start left here, if this one goes on from it."""
        with contextlib.suppress(OSError, ValueError):
            earlier = json.loads((self.output_dir / "run.json").read_text(encoding="utf-8"))
            if self.step and isinstance(earlier, dict):
                return earlier
        return {}

    def _write(self) -> None:
        write_json(self.output_dir / "run.json", self.record)

    def announce(self, trainer: PodtuneTrainer) -> None:
        """The start lines: what runs where, with which choices. Rank 0."""
        if not self.world.is_main:
            return
        training, world, record = self.arguments.training, self.world, self.record
        trained = trainer.trained_parameters()
        why, plural = trainer.why_not_lean, "es" if world.world_size > 1 else ""
        data = record["data"]
        print(
            head_line(
                record["name"],
                self.arguments.strategy,
                world.world_size,
                world.device_type,
                world.nnodes,
                trained,
                data["rows"],
                data["tokens"],
            )
        )
        print(
            f"batch {record['global_batch_size']} = {training.per_device_train_batch_size} a device x "
            f"{world.world_size} process{plural} "
            f"x {training.gradient_accumulation_steps} accumulated; {', '.join(self.arguments.notes)}"
            + (f"; TRL's loss ({why})" if why else ""),
            flush=True,
        )
        rows = len(self.rows.train)
        if (repeated := repeated_rows(trainer.args, rows)) > rows // 100:
            warn(
                f"each epoch repeats rows {repeated} times (of {rows} rows), so that all ranks have full "
                "batches; smaller batches repeat fewer, dataloader_drop_last none"
            )
        for warning in self.rows.warnings:
            warn(warning)
        if self.resume_path:
            print(f"resuming from {self.resume_path}", flush=True)

    def measure(self, trainer: PodtuneTrainer) -> None:
        """Fill in the measurements; a collective call, because memory is asked of every rank."""
        peaks, tokens = trainer.peak_memory_gib(), trainer.global_tokens()
        self.step = trainer.state.global_step
        if not self.world.is_main:
            return
        measurements = self.progress.measurements()
        rows = self.rows.facts
        kind = CUDA_PEAK if self.world.device_type == "cuda" else RESIDENT_PEAK_SINCE_START
        self.record["measurements"] = replace(
            measurements,
            steps=self.step,
            tokens=tokens,
            peak_memory_gib=MemoryPeaks(max(peaks), tuple(peaks), kind),
            **trainer.utilisation(measurements.tokens_per_s, max(1, rows["tokens"] // rows["rows"])),
        ).to_json()

    def end(self, status: Status, code: int, reason: str = "") -> None:
        """Close the record on the volume, in Aim and on stdout, and say how it went. Rank 0."""
        if status == "preempted":
            reason = f"SIGTERM; saved at step {self.step}, the same command goes on from there"
        end_record(self.record, status, code, reason)
        self._write()
        if status in ("ok", "preempted"):
            from podtune.report.draw.plots import loss_curve_png

            loss_curve_png(self.output_dir, self.output_dir / "loss.png")
        if self._heartbeat:
            self._heartbeat.stop()
        if self._tracker:
            self._tracker.finish()
        for claimed in self._claim:
            claimed.release()
        print("\n".join(self.summary()), flush=True)
        if not sys.stdout.isatty():
            emit_record(self.record, sys.stdout)

    def failed(self, error: BaseException) -> None:
        """Close the record after ``error``; whatever was measured until then stays in it."""
        if self.record and self.record["status"] == "running":
            self.record["measurements"] = self.progress.measurements().to_json()
            self.end("oom" if out_of_memory(error) else "error", exit_code(error), str(error)[:2000])

    def answer(self) -> None:
        """Base and tuned model side by side on held-out rows: answers, exact match, perplexity. Rank 0, group
        closed.
        """
        count = self.arguments.run.answer_rows
        if not count or self.rows.eval_rows is None:
            return
        from podtune.sft.answer.evaluate import compare_with_base

        try:
            self.record["measurements"]["answers"] = compare_with_base(
                str(self.arguments.model.model_name_or_path),
                str(self.output_dir / "final"),
                self.tokenizer,
                list(self.rows.eval_rows.select(range(min(count, len(self.rows.eval_rows))))),
                max_new_tokens=self.arguments.run.answer_max_new_tokens,
                revision=self.arguments.model.model_revision,
                trust_remote_code=self.arguments.training.trust_remote_code,
            )
        except (UserError, RuntimeError, MemoryError) as error:  # the model is trained and saved: that stands
            warn(f"base and tuned model could not be compared: {error}")

    def summary(self) -> list[str]:
        """The closing lines for people."""
        measured, status = Measurements.read(self.record), self.record["status"]
        loss = measured.loss
        speed = f", {measured.tokens_per_s:,.0f} tokens/s" if measured.tokens_per_s is not None else ""
        lines = [f"{status}: {measured.steps or 0} steps, {measured.tokens or 0:,} tokens{speed}"]
        if self.record["reason"]:
            lines.append(self.record["reason"])
        if loss and loss.eval_first is not None and loss.eval is not None:
            lines.append(f"eval loss {loss.eval_first:.4f} -> {loss.eval:.4f}")
        if status == "ok":
            lines.append(f"model   {self.output_dir / 'final'}")
        lines.append(f"record  {self.output_dir / 'run.json'}, {self.output_dir / 'metrics.jsonl'}")
        return lines
