"""The record of a fine-tune while it happens: run.json, the tracker, the heartbeat, and what resumes what."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podtune.run import checkpoint
from podtune.run.checkpoint import Checkpoint
from podtune.run.collect import emit_record
from podtune.run.distributed import World, in_pod
from podtune.run.errors import ConfigError, UserError, exit_code, out_of_memory, warn
from podtune.run.files import open_new
from podtune.run.heartbeat import Heartbeat
from podtune.run.lock import Lock
from podtune.run.log_lines import head_line
from podtune.run.notify import summary_lines
from podtune.run.record import (
    CUDA_PEAK,
    RESIDENT_PEAK_SINCE_START,
    MemoryPeaks,
    Status,
    end_record,
    now,
    write_json,
)
from podtune.sft.train.bucket import Bucket
from podtune.sft.train.meter import Meter
from podtune.sft.train.progress import Progress, repeated_rows
from podtune.sft.train.publish import model_card

# space on the volume for the record of how the run ended, also when nothing else is left
RESERVE_FILE, RESERVED = ".reserve", 2**17

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from podtune.sft.config.memory import Foresight
    from podtune.sft.data.rows import TokenRows
    from podtune.sft.source.model import Origin
    from podtune.sft.train.trainer import PodtuneTrainer


def find_checkpoint(
    output_dir: Path,
    facts: dict[str, Any],
    *,
    named: str | None = None,
    auto_resume: bool = True,
    allow_change: bool = False,
    bucket: Bucket | None = None,
) -> Checkpoint | None:
    """The checkpoint to go on from: the one named, else the newest complete one in output_dir or where the
    run is published, else none. Rank 0.

    Raises:
        UserError: the one named is damaged, all are, or they belong to a run that differs from this one.
    """
    resume: Checkpoint | None = None
    word = str(named).lower()
    if word == "false":
        auto_resume = False
    if named and word not in ("true", "false"):
        path = Path(named)
        try:
            resume = checkpoint.read(path)
        except checkpoint.Damaged as reason:
            resume = checkpoint.foreign(path) if allow_change else None
            if resume is None:
                why = reason if path.is_dir() else "there is no such folder"
                raise ConfigError(
                    f"cannot be resumed: {why}",
                    where=str(path),
                    fix="name a complete checkpoint, or none; "
                    "one that TRL wrote is taken with --allow_resume_change",
                ) from None
            warn(f"{path} has no manifest: that it is whole, and of this run, is your word")
    elif auto_resume:
        resume, warnings = checkpoint.newest_complete(output_dir)
        for warning in warnings:
            warn(warning)
        if bucket and (resume is None or not bucket.shared):  # what a pod has alone the others cannot load
            resume = bucket.newest(lambda there: checkpoint.check_resume(there, facts, allowed=allow_change))
    elif checkpoint.checkpoints(output_dir):
        raise ConfigError(
            "holds checkpoints of an earlier run, and auto_resume is off",
            where=str(output_dir),
            fix="use another output_dir, or resume",
        )
    elif bucket:
        bucket.refuse_others()
    if resume is None and word == "true":
        warn(f"resume_from_checkpoint: there is none in {output_dir}, so the run begins at step 0")
    if resume is not None:
        for change in checkpoint.check_resume(resume, facts, allowed=allow_change):
            warn(f"resuming although {change}")
    return resume


def is_finished(output_dir: Path, resume: Checkpoint, max_steps: int, num_train_epochs: float) -> bool:
    """True if the run in output_dir ended well and this start asks for no step beyond its last checkpoint."""
    try:
        record = json.loads((output_dir / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    ended = (
        record.get("status") == "ok"
        and (output_dir / "final").is_dir()
        and record["measurements"].get("steps") == resume.step
    )
    asked = {"max_steps": max_steps, "num_train_epochs": num_train_epochs}
    return bool(ended and all(record["config"].get(key) == value for key, value in asked.items()))


class FineTune:
    """What one start of a fine-tune leaves behind. Every rank has one; only rank 0's writes.

    Args:
        record: of the run as it begins, see :func:`podtune.run.record.new_record`.
        resume: the checkpoint that it goes on from.
        claims: on rank 0, the right to write in ``output_dir``.
        notes: what was chosen for this hardware, for the start line.
        memory: what was estimated of a GPU's memory.
        aim_repo: the Aim repository that mirrors the metrics.
    """

    def __init__(
        self,
        record: dict[str, Any],
        output_dir: Path,
        world: World,
        rows: TokenRows,
        *,
        resume: Checkpoint | None,
        claims: list[Lock],
        notes: Sequence[str] = (),
        memory: Foresight | None = None,
        aim_repo: str | None = None,
    ) -> None:
        self.record, self.output_dir, self.world, self.rows = record, output_dir, world, rows
        self._claims, self._notes, self._memory = claims, notes, memory
        self.tokens_before = int(resume.facts.get("tokens", 0)) if resume else 0
        self.resume_path = str(resume.path) if resume else None
        self.step = resume.step if resume else 0
        self.meter = Meter(world, record["strategy"])
        self.progress = Progress(
            output_dir,
            self.meter,
            is_main=world.is_main,
            nproc_per_node=world.local_world_size,
            from_step=self.step,
            tokens_before=self.tokens_before,
            rows=rows.count,
        )
        self._tracker: Any = None
        self._heartbeat: Heartbeat | None = None
        if not world.is_main:
            return
        earlier = self._earlier()
        record["started_at"] = earlier.get("started_at", record["started_at"])
        record["attempts"] = [*earlier.get("attempts", []), {"started_at": now(), "from_step": self.step}]
        self._write()
        self._reserve(output_dir / RESERVE_FILE)
        self._heartbeat = Heartbeat(output_dir)
        self.progress.on_step = self._heartbeat.step
        if aim_repo:
            from podtune.run.aim.tracking import start_tracker

            self._tracker = start_tracker(output_dir, aim_repo)

    def _earlier(self) -> dict[str, Any]:
        """The record of the earlier start that this one goes on from: from its checkpoint, or because it was
        broken off before there was one.
        """
        with contextlib.suppress(OSError, ValueError):
            earlier = json.loads((self.output_dir / "run.json").read_text(encoding="utf-8"))
            if isinstance(earlier, dict) and (self.step or earlier.get("status") != "ok"):
                return earlier
        return {}

    def _reserve(self, file: Path) -> None:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
            with open_new(file) as stream:
                stream.write(secrets.token_hex(RESERVED // 2))

    def _write(self) -> None:
        write_json(self.output_dir / "run.json", self.record)

    def announce(self, trainer: PodtuneTrainer) -> None:
        """The start lines: what runs where, with which choices. Rank 0."""
        if not self.world.is_main:
            return
        world, record = self.world, self.record
        trained = trainer.trained_parameters()
        why, plural = trainer.why_not_lean, "es" if world.world_size > 1 else ""
        notes = [*self._notes, *trainer.adapter_note(), *trainer.how_it_saves()]
        if trainer.even:
            notes.append(f"batches filled up to a multiple of {trainer.even} tokens")
        data = record["data"]
        print(
            head_line(
                record["name"],
                record["strategy"],
                world.world_size,
                world.device_type,
                world.nnodes,
                trained,
                data.get("rows"),
                data.get("tokens"),
            )
        )
        print(
            f"batch {record['global_batch_size']} = {trainer.args.per_device_train_batch_size} a device x "
            f"{world.world_size} process{plural} "
            f"x {trainer.args.gradient_accumulation_steps} accumulated; {', '.join(notes)}"
            + (f"; TRL's loss ({why})" if why else ""),
            flush=True,
        )
        rows = self.rows.count or 0
        if (repeated := repeated_rows(trainer.args, rows)) > rows // 100:
            warn(
                f"each epoch repeats rows {repeated} times (of {rows} rows), so that all ranks have full "
                "batches; smaller batches repeat fewer, dataloader_drop_last none"
            )
        for warning in self.rows.warnings:
            warn(warning)
        if self.resume_path:
            print(f"resuming from {self.resume_path}", flush=True)

    def card(self) -> str:
        """The README of the trained model."""
        return model_card({**self.record, "measurements": self.progress.measurements().to_json()})

    def measure(self, trainer: PodtuneTrainer) -> None:
        """Fill in the measurements; a collective call, because memory is asked of every rank."""
        peaks, tokens = trainer.peak_memory_gib(), trainer.global_tokens()
        self.step = trainer.state.global_step
        if not self.world.is_main:
            return
        measurements = self.progress.measurements()
        info = self.rows.info  # of a stream the mean is known of what was trained
        length = (info.tokens or 0) // info.rows if info.rows else tokens // (measurements.samples or 1)
        kind = CUDA_PEAK if self.world.device_type == "cuda" else RESIDENT_PEAK_SINCE_START
        self.record["measurements"] = replace(
            measurements,
            steps=self.step,
            tokens=tokens,
            peak_memory_gib=MemoryPeaks(max(peaks), tuple(peaks), kind),
            saves=trainer.save_times(),
            memory_estimate=self._memory.for_record(max(peaks)) if self._memory else None,
            **trainer.utilisation(measurements.tokens_per_s, max(1, length)),
        ).to_json()

    def end(self, status: Status, code: int, reason: str = "") -> None:
        """Close the record, let go of the folder, say how it went. Rank 0.

        The weights are safe by now: a volume that is full, or a picture that cannot be drawn, is a warning.
        """
        if status == "preempted":
            reason = f"SIGTERM; saved at step {self.step}, the same command goes on from there"
        end_record(self.record, status, code, reason)
        try:
            (self.output_dir / RESERVE_FILE).unlink(missing_ok=True)
            self._write()
        except OSError as error:
            warn(f"run.json cannot be written: {error}; the log has the record, podtune collect reads it")
        finally:
            self._release()
        if status in ("ok", "preempted"):
            self._draw()
        print("\n".join(summary_lines(self.record, self.output_dir)), flush=True)
        if in_pod():
            emit_record(self.record, sys.stdout)

    def _release(self) -> None:
        """Stop the heartbeat and the tracker and give the claim back, whatever becomes of the others."""
        with contextlib.ExitStack() as stack:
            for claim in self._claims:
                stack.callback(claim.release)
            if self._tracker:
                stack.callback(self._tracker.finish)
            if self._heartbeat:
                stack.callback(self._heartbeat.stop)

    def _draw(self) -> None:
        from podtune.report.draw.plots import loss_curve_png

        try:
            loss_curve_png(self.output_dir, self.output_dir / "loss.png")
        except Exception as error:  # a picture less is no reason to fail a finished run
            warn(f"loss.png cannot be drawn: {error}")

    def failed(self, error: BaseException) -> None:
        """Close the record after ``error``; whatever was measured until then stays in it."""
        if self.world.is_main and self.record["status"] == "running":
            estimate = self._memory.for_record() if self._memory else None
            measured = replace(self.progress.measurements(), memory_estimate=estimate)
            self.record["measurements"] = measured.to_json()
            self.end("oom" if out_of_memory(error) else "error", exit_code(error), str(error)[:2000])

    def answer(
        self,
        base: Origin,
        tokenizer: PreTrainedTokenizerBase,
        *,
        count: int,
        max_new_tokens: int,
        trust_remote_code: bool,
    ) -> None:
        """Base and tuned model side by side on ``count`` held-out rows: answers, exact match, perplexity.
        Rank 0, group closed.
        """
        if not count or self.rows.eval_rows is None:
            return
        from podtune.sft.generate.evaluate import compare_with_base

        try:
            self.record["measurements"]["answers"] = compare_with_base(
                base,
                self.output_dir / "final",
                tokenizer,
                list(self.rows.eval_rows.select(range(min(count, len(self.rows.eval_rows))))),
                max_new_tokens=max_new_tokens,
                trust_remote_code=trust_remote_code,
            )
        except (UserError, RuntimeError, MemoryError) as error:  # the model is trained and saved: that stands
            warn(f"base and tuned model could not be compared: {error}")
