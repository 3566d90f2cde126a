"""One start of a fine-tune, from the first lines of its log to the last line of its record."""

from __future__ import annotations

import contextlib
import functools
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from podtune.run import output_volume
from podtune.run.checkpoint import Checkpoint
from podtune.run.collect import emit_record
from podtune.run.distributed import on_main
from podtune.run.errors import OK, PREEMPTED, PeerLost, UserError, exit_code, out_of_memory, warn, working
from podtune.run.exit import peer_failure
from podtune.run.files import open_new
from podtune.run.follow import read_record
from podtune.run.lock import Lock
from podtune.run.log_lines import head_line
from podtune.run.record import (
    CUDA_PEAK,
    RESIDENT_PEAK_SINCE_START,
    MemoryPeaks,
    Status,
    end_record,
    now,
    write_json,
)
from podtune.run.summary import summary_lines
from podtune.run.world import World, in_pod
from podtune.sft.config.memory import MemoryEstimate, estimate_memory
from podtune.sft.config.resolve import Arguments
from podtune.sft.data.rows import TokenRows
from podtune.sft.train.meter import (
    Meter,
    multiplies_in_tf32,
    peak_memory_gib,
    product_precision,
    utilisation,
)
from podtune.sft.train.parameters import adapter_layers, estimated_checkpoint_bytes, trained_parameters
from podtune.sft.train.progress import Progress, repeated_rows
from podtune.sft.train.publish import model_card, push_to_hub, write_final
from podtune.sft.train.saving import CheckpointWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from podtune.sft.source.model import Origin
    from podtune.sft.train.trainer import PodtuneTrainer

# space on the volume for the record of how the run ended, also when nothing else is left
RESERVE_FILE, RESERVED = ".reserve", 2**17
FAILED_WAIT_S = 30.0  # for the uploads, after an error: the other ranks are waiting for this one to end
LEAVING_S = 5.0  # for a save in flight when another rank is lost


def not_published(output_dir: Path, reason: str) -> PeerLost:
    """Make the error of a run that is finished, and not published: its volume may go with the pod."""
    return PeerLost(
        f"the model is trained and saved in {output_dir / 'final'}, but not all of it is published: "
        f"{reason}; the same command publishes it"
    )


class FineTune:
    """A fine-tune in a folder that :func:`open_run` opened. Every rank has one; only rank 0's writes."""

    def __init__(
        self,
        arguments: Arguments,
        rows: TokenRows,
        world: World,
        resume: Checkpoint | None,
        writer: CheckpointWriter,
        lock: Lock | None = None,  # rank 0's, told of every step
    ) -> None:
        self.world, self.rows, self.resume, self.writer = world, rows, resume, writer
        self.resume_path = str(resume.path) if resume else None
        self._arguments, self._folder, self._notes = arguments, arguments.folder, list(arguments.notes)
        self._record = arguments.record(world, rows.info.to_json())
        self._estimate: MemoryEstimate | None = None
        self._step = resume.step if resume else 0
        self.meter = Meter(world, arguments.strategy, tokens_before=resume.tokens if resume else 0)
        on_step = lock.step if lock else None
        self.progress = Progress(
            self._folder, self.meter, world, from_step=self._step, rows=rows.count, on_step=on_step
        )

    # ---- before training ----
    def begin(self) -> None:
        """Write run.json, with the attempts of earlier starts, and reserve space for its end. Rank 0."""
        record, earlier = self._record, read_record(self._folder) or {}
        # of the start that this one continues, or that ended before its first checkpoint
        if not self._step and earlier.get("status") == "ok":
            earlier = {}
        record["started_at"] = earlier.get("started_at", record["started_at"])
        record["attempts"] = [*earlier.get("attempts", []), {"started_at": now(), "from_step": self._step}]
        self._write()
        with contextlib.suppress(OSError), open_new(self._reserve()) as stream:
            stream.write(secrets.token_hex(RESERVED // 2))

    def _reserve(self) -> Path:
        """Free the space that is reserved, and return its file."""
        reserve = self._folder / RESERVE_FILE
        reserve.unlink(missing_ok=True)
        return reserve

    def _write(self) -> None:
        write_json(self._folder / "run.json", self._record)

    def check_memory(self, arguments: Arguments, origin: Origin) -> None:
        """Estimate the memory of a GPU, see :func:`estimate_memory`. A collective call."""
        lengths = self.rows.lengths(arguments.training.max_length)
        self._estimate = estimate_memory(arguments, origin, self.world, lengths)
        if not self._estimate or not self.world.is_main:
            return
        print(self._estimate.line(), flush=True)
        # the estimate has decided it, and says so in its own line
        self._notes = [note for note in self._notes if not note.startswith("activation check")]
        self._record["config"] = arguments.resolved()
        self._write()

    def announce(self, trainer: PodtuneTrainer) -> None:
        """Print the start lines: what runs where, with which choices. Rank 0."""
        if not self.world.is_main:
            return
        world, args, batch = self.world, trainer.args, self._arguments.global_batch_size
        info, count = self.rows.info, self.rows.count or 0
        trained = trained_parameters(trainer.model)
        where = self._arguments.strategy, world.world_size, world.device_type, world.nnodes
        print(head_line(self._arguments.name, *where, trained, info.rows, info.tokens))
        notes = [*self._notes, *(f"LoRA on {layers}" for layers in adapter_layers(trainer.model))]
        if trainer.frozen:
            notes.append(f"{trainer.frozen:,} parameters for images and sound frozen (rows are text)")
        if multiplies_in_tf32():
            notes.append("products of fp32 tensors in TF32")
        if trainer.multiple:
            notes.append(f"batches filled up to a multiple of {trainer.multiple} tokens")
        if reason := trainer.trls_loss_reason:
            notes.append(f"TRL's loss ({reason})")
        print(
            f"batch {batch} = {args.per_device_train_batch_size} a device x "
            f"{world.world_size} process{'es' * (world.world_size > 1)} "
            f"x {args.gradient_accumulation_steps} accumulated; {', '.join(notes)}",
            flush=True,
        )
        if (repeated := repeated_rows(args, count)) > count // 100:
            warn(
                f"each epoch repeats rows {repeated} times (of {count} rows), so that all ranks have full "
                "batches; smaller batches repeat fewer, dataloader_drop_last none"
            )
        for warning in self.rows.warnings:
            warn(warning)
        if self.resume_path:
            print(f"resuming from {self.resume_path}", flush=True)

    # ---- after training ----
    def save_final(self, trainer: PodtuneTrainer, files: Sequence[Path] = ()) -> None:
        """Write ``final/``, with ``files`` beside the model. A collective call."""
        card = model_card({**self._record, "measurements": self.progress.measurements().to_json()})
        # otherwise transformers would push the model to the hub by itself
        save_model = functools.partial(trainer.save_model, _internal_call=True)
        write_final(self._folder, save_model, card, files)

    def measure(self, trainer: PodtuneTrainer) -> None:
        """Fill in the measurements; a collective call, because memory is asked of every rank."""
        peaks, tokens = peak_memory_gib(self.world), self.meter.global_tokens()
        self._step = trainer.state.global_step
        if not self.world.is_main:
            return
        measured, info = self.progress.measurements(), self.rows.info
        # of a stream the mean is known of what was trained
        length = (info.tokens or 0) // info.rows if info.rows else tokens // (measured.samples or 1)
        speed, precision = measured.tokens_per_s, product_precision(trainer.args, trainer.model)
        flops_per_token, mfu = utilisation(
            trainer.model, self.world, precision, tokens_per_s=speed, mean_length=max(1, length)
        )
        kind = CUDA_PEAK if self.world.device_type == "cuda" else RESIDENT_PEAK_SINCE_START
        self._record["measurements"] = replace(
            measured,
            steps=self._step,
            tokens=tokens,
            peak_memory_gib=MemoryPeaks(max(peaks), tuple(peaks), kind),
            saves=self.writer.times(),
            memory_estimate=self._estimate.for_record(max(peaks)) if self._estimate else None,
            flops_per_token=flops_per_token,
            mfu=mfu,
        ).to_json()

    def compare_with_base(self, base: Origin, tokenizer: PreTrainedTokenizerBase) -> None:
        """Let base and tuned model answer held-out rows, if ``answer_rows`` asks for it. Rank 0 alone."""
        held_out, count = self.rows.eval_rows, self._arguments.run.answer_rows
        if not count or held_out is None or not self.world.is_main:
            return
        from podtune.sft.generate.evaluate import compare_with_base

        try:
            with working("base and tuned model answer held-out rows"):
                self._record["measurements"]["answers"] = compare_with_base(
                    base,
                    self._folder / "final",
                    tokenizer,
                    list(held_out.select(range(min(count, len(held_out))))),
                    max_new_tokens=self._arguments.run.answer_max_new_tokens,
                    trust_remote_code=self._arguments.training.trust_remote_code,
                ).to_json()
            card = self._folder / "final" / "README.md"
            card.write_text(model_card(self._record), encoding="utf-8")
        except (UserError, RuntimeError, MemoryError, OSError) as error:  # the model is saved: that stands
            warn(f"base and tuned model could not be compared: {error}")

    def publish(self, trainer: PodtuneTrainer, *, finished: bool) -> None:
        """Wait for the uploads, and upload the model of a run that has ``finished``; the group is closed."""
        if uploader := self.writer.uploader:
            uploader.finish(final=finished)
        if finished and self.world.is_main and trainer.args.push_to_hub:
            push_to_hub(trainer.args, trainer.hub_model_id, self._folder / "final")

    def end(self, *, finished: bool, early: str) -> None:
        """Close the record of a run that has ``finished``, ``early`` with a reason, or was stopped.

        Raises:
            PeerLost: the run is finished on its volume, and not all of it where it is published.
        """
        if finished:
            self._close("ok", OK, early)
        else:
            reason = f"SIGTERM; saved at step {self._step}, the same command resumes from there"
            self._close("preempted", PREEMPTED, reason)
        if (uploader := self.writer.uploader) and self.world.is_main:
            unpublished = uploader.close()
            if unpublished and finished:
                raise not_published(self._folder, unpublished)
            if finished:
                print(f"published {uploader.remote.url}", flush=True)

    def fail(self, error: Exception) -> None:
        """Close the record after ``error``; what was measured until then stays in it."""
        lost, uploader = peer_failure(error), self.writer.uploader
        # a peer that is gone has others wait for this process
        self.writer.abandon(LEAVING_S if lost else self._arguments.run.timeout_s)
        # the run had ended well, and an upload failed after it
        if self._record["status"] != "running":
            return
        reason = lost or error
        estimate = self._estimate.for_record() if self._estimate else None
        measured = replace(self.progress.measurements(), memory_estimate=estimate)
        self._record["measurements"] = measured.to_json()
        status: Status = "oom" if out_of_memory(reason) else "error"
        self._close(status, exit_code(reason), str(reason)[:2000])
        if uploader and self.world.is_main:
            uploader.finish(FAILED_WAIT_S)
            if problem := uploader.close():
                warn(f"not all of the run is published: {problem}")

    def _close(self, status: Status, code: int, reason: str) -> None:
        """Write how the run ended, and print it. On rank 0; elsewhere the record is closed in memory alone.

        The weights are safe by now: a volume that is full, or a picture that cannot be drawn, is a warning.
        """
        end_record(self._record, status, code, reason)
        if not self.world.is_main:
            return
        folder = self._folder
        try:
            self._reserve()
            self._write()
        except OSError as error:
            warn(f"run.json cannot be written: {error}; the log has the record, podtune collect reads it")
        if status in ("ok", "preempted"):
            from podtune.report.draw.loss_png import loss_curve_png

            try:
                loss_curve_png(folder, folder / "loss.png")
            except Exception as error:  # a picture less is no reason to fail a finished run
                warn(f"loss.png cannot be drawn: {error}")
        print("\n".join(summary_lines(self._record, folder)), flush=True)
        if in_pod():
            emit_record(self._record, sys.stdout)


def check_space(trainer: PodtuneTrainer, world: World) -> None:
    """Compare the volume's free space with the size of the checkpoints. A collective call."""
    if trainer.args.save_strategy != "no":
        size, limit = estimated_checkpoint_bytes(trainer), trainer.writer.limit
        on_main(world, lambda: output_volume.check_space(Path(trainer.args.output_dir), size, limit))
