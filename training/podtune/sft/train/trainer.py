"""SFTTrainer with what a cluster needs: complete checkpoints, one stop for all ranks, real token counts, a
lean loss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import resource
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import DistributedDataParallelKwargs, DistributedType, PartialState
from datasets import Dataset, IterableDataset
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import KubeflowCallback
from trl import SFTConfig, SFTTrainer

from podtune.machine.facts import GIB, free_memory
from podtune.run import background_save, checkpoint
from podtune.run.background_save import BackgroundSave
from podtune.run.distributed import World, forced_gpu_path
from podtune.run.errors import ConfigError, DataError, Unavailable, UserError, warn
from podtune.run.record import SaveTimes
from podtune.sft.cpu.padded_batches import REAL_TOKENS, PaddedBatches, automatic_multiple
from podtune.sft.cpu.rms_norm import patch_rms_norm
from podtune.sft.data.batching import ROW, LengthGrouped, NumberedBatches, balance, row_lengths
from podtune.sft.train.bucket import Bucket
from podtune.sft.train.early import EarlyStopping
from podtune.sft.train.job_status import JobStatus
from podtune.sft.train.loss import lean_loss, logs_next, score_as_on_a_gpu, why_not_lean
from podtune.sft.train.meter import Meter
from podtune.sft.train.publish import Publisher

_RUNNING, _STOP, _NONFINITE = 0, 1, 2
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclasses.dataclass
class Save:
    """One save of a checkpoint: when it ``began``, how long the ranks stopped for it, and how long it took to
    be complete on the volume (None until it is).
    """

    step: int
    began: float = dataclasses.field(default_factory=time.monotonic)
    stall_s: float = 0.0
    write_s: float | None = None
    logged: bool = False


class PodtuneTrainer(SFTTrainer):  # type: ignore[misc]
    """TRL's trainer, with five hooks of transformers' Trainer filled in.

    ``facts`` describes the run in every checkpoint's manifest (see
    :func:`podtune.run.checkpoint.check_resume`).
    """

    model: Any
    _signature_columns: list[str] | None
    data_collator: Any

    def __init__(
        self,
        *,
        args: SFTConfig,
        world: World,
        meter: Meter,
        facts: dict[str, Any],
        tokens_before: int,
        lean: bool,
        async_save: bool = False,
        bucket: Bucket | None = None,
        **kwargs: Any,
    ) -> None:
        # The rows come tokenised, cut, masked and packed (podtune.sft.data.inputs). TRL has nothing left to
        # prepare, and refuses a max_length that it would not enforce on rows laid end to end, and masks for
        # rows that are no messages.
        args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
        # rows of a stream bear their places, and a resumed one begins behind those that were trained
        self.streamed = isinstance(kwargs.get("train_dataset"), IterableDataset)
        args.ignore_data_skip = self.streamed
        self._position = 0
        asked = args.max_length, args.assistant_only_loss
        args.max_length, args.assistant_only_loss = None, False
        try:
            super().__init__(args=args, **kwargs)
        except (
            ValueError,
            ImportError,
        ) as error:  # what TRL, transformers and PEFT say of arguments that do not fit the model
            raise ConfigError(
                f"the trainer cannot be made: {' '.join(str(error).split())[:400]}", where="configuration"
            ) from error
        except ConnectionError as error:
            raise Unavailable(
                f"the hub cannot be reached: {' '.join(str(error).split())[:300]}",
                where="push_to_hub",
                fix="leave it off and upload final/ afterwards, or give the pod a network and HF_TOKEN",
            ) from error
        args.max_length, args.assistant_only_loss = asked
        if not self.trained_parameters():
            raise ConfigError(
                "no parameter of the model is trained: it is an adapter, which loads frozen",
                where="model_name_or_path",
                fix="name the base model with --use_peft, or merge the adapter first (podtune model merge)",
            )
        if forced_gpu_path():
            score_as_on_a_gpu()
        self.why_not_lean = why_not_lean(self) if lean else "as asked"
        self.even = self._even_tokens()
        if self.even:
            self.data_collator.pad_to_multiple_of = None
            self.data_collator = PaddedBatches(self.data_collator, self.even)
        if self.streamed:
            self.data_collator = NumberedBatches(self.data_collator)
        self._leave_casts_to_autocast()
        self.remove_callback(PrinterCallback)  # podtune.sft.train.progress says it in one tidy line
        if self.pop_callback(KubeflowCallback):
            self.add_callback(JobStatus)
        self.world, self.meter, self.facts = world, meter, facts
        self.publisher, self.bucket = Publisher(args, self.hub_model_id), bucket
        self.tokens = (
            tokens_before  # real tokens of all ranks since the very first start, as of the last logging step
        )
        self._local_tokens = torch.zeros((), dtype=torch.long)
        self._evaluated = torch.zeros(
            2, dtype=torch.double
        )  # summed loss and scored tokens of this evaluation
        self._nonfinite = torch.zeros((), dtype=torch.bool)
        self._verdict: tuple[torch.Tensor, torch.cuda.Event | None] = (
            torch.zeros((), dtype=torch.bool),
            None,
        )
        self.saves: list[Save] = []  # on rank 0, of this attempt
        self._async_save, self._staged_bytes = async_save, 0
        self._stage = background_save.stage_of(Path(args.output_dir), world.node_rank)
        if world.local_rank == 0:
            shutil.rmtree(self._stage, ignore_errors=True)  # of a start that was killed
        self._saving_in: Path | None = None  # where libraries write a checkpoint, if not in output_dir
        self._beside: ThreadPoolExecutor | None = None  # during a save, for its weights
        self._saved_weights: Future[None] | None = None
        self._said_no_room = False
        self._in_flight = False  # on every rank, while a save may be unfinished
        self._writer: BackgroundSave | None = None  # of this pod, on its first rank

    def _even_tokens(self) -> int:
        """The tokens that the length of a batch of rows end to end is a multiple of; 0 if of any length."""
        if not self.padding_free:
            return 0
        if self.args.pad_to_multiple_of:
            return int(self.args.pad_to_multiple_of)
        if self.why_not_lean:
            return 0
        return automatic_multiple(
            self.args.device.type, bf16=self.args.bf16, trained_parameters=self.trained_parameters()
        )

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        columns = self._signature_columns or []
        if self.streamed and ROW not in columns:
            self._signature_columns = [*columns, ROW]

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        rows = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "group_by_length" or not isinstance(rows, Dataset):
            return super()._get_train_sampler(train_dataset)
        batch = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return LengthGrouped(
            row_lengths(rows),
            batch,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            epoch=lambda: int((self.state.epoch or 0.0) + 1e-6),
        )

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        if isinstance(self.train_dataset, Dataset) and not len(loader):
            raise DataError(
                f"{len(self.train_dataset)} rows fill no batch of {self.args.train_batch_size} for each of "
                f"{self.world.world_size} "
                "processes, and what does not is dropped",
                where="dataloader_drop_last",
                fix="leave it off, lower per_device_train_batch_size, or give more rows",
            )
        if self.world.world_size > 1 and isinstance(self.train_dataset, Dataset):
            balance(
                loader, row_lengths(self.train_dataset)
            )  # the same rows in every step, dealt out by length
        return loader

    def create_accelerator_and_postprocess(self) -> None:
        """Make sure that what was asked for is what runs: accelerate trains plain DDP on a CPU that is
        told to use FSDP.
        """
        wanted = self.args.fsdp_plugin_args is not None
        if wanted and PartialState().distributed_type == DistributedType.MULTI_CPU:
            # accelerate turns only a GPU's kind of world into FSDP; fully_shard itself works on gloo
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()
        if wanted and not self.is_fsdp_enabled:
            raise ConfigError(
                "accelerate did not take FSDP up",
                where="strategy",
                fix="--strategy ddp, or start it under torchrun",
            )
        if wanted and (plugin := self.accelerator.state.fsdp_plugin).mixed_precision_policy is not None:
            # accelerate would round the fp32 loss, and the gradients' sum over ranks, to the 8 bits of bf16
            plugin.mixed_precision_policy = dataclasses.replace(
                plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None
            )

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # without it DDP keeps a second copy of all gradients
        settings: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        for handler in settings["kwargs_handlers"]:
            if isinstance(handler, DistributedDataParallelKwargs):
                handler.gradient_as_bucket_view = True
        return settings

    def _leave_casts_to_autocast(self) -> None:
        """Under autocast LoRA's own cast of each layer's input to fp32 is undone at once: the same bits for
        half of an adapter's memory traffic. On a CPU the norms have their result in bf16 at once.
        """
        if not self.accelerator.native_amp:
            return
        for module in self.model.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False
        if self.args.device.type == "cpu" and self.args.bf16 and not self.args.torch_compile:
            patch_rms_norm(self.model)

    # ---- loss and what is counted ----
    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs.pop(REAL_TOKENS, None)
        if not self.why_not_lean and self.model.training and not return_outputs:
            return lean_loss(self, model, inputs, num_items_in_batch, multiple=self.even or 1)
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not self.model.training:
            mean = (result[0] if return_outputs else result).detach().double().cpu()
            scored = (inputs["labels"][:, 1:] != -100).sum().cpu()
            self._evaluated += torch.stack((mean * scored, scored))
        return result

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        return super().get_batch_samples(self.meter.batches(epoch_iterator), num_batches, device)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Begun at the last step (its checkpoint was saved, ``final`` was not), transformers would train one
        more.
        """
        if self.state.global_step >= self.state.max_steps or self.stopped_early():
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        places = inputs.pop(ROW, None)
        if places:
            self._position = max(places) + 1
        # counted where the batch lies and read when a line is logged: no synchronisation
        mask = inputs.get("attention_mask")
        whole = inputs.get(REAL_TOKENS, torch.tensor(inputs["input_ids"].numel()))
        counted = whole if mask is None else mask.sum()
        self._local_tokens = self._local_tokens.to(counted.device) + counted
        with self.meter.forward_of(model, logs_next=logs_next(self)):
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._nonfinite = self._nonfinite.to(loss.device) | ~torch.isfinite(loss)
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if (
            norm is not None and not self.args.fp16
        ):  # fp16's scaler meets infinite gradients and skips the step
            self._nonfinite = (
                self._nonfinite | ~torch.isfinite(torch.as_tensor(norm, device=self._nonfinite.device)).all()
            )
        return norm

    def global_tokens(self) -> int:
        """Real tokens of all ranks so far. A collective call."""
        counted = self._local_tokens.cpu().clone()
        if self.world.world_size > 1:
            dist.all_reduce(counted)
        self.tokens += int(counted)
        self._local_tokens.zero_()
        return self.tokens

    def position(self) -> dict[str, int]:
        """For the manifest of a checkpoint of a stream: how many of its rows lie behind. A collective
        call.
        """
        if not self.streamed:
            return {}
        last = torch.tensor(self._position)
        if self.world.world_size > 1:
            dist.all_reduce(last, op=dist.ReduceOp.MAX)
        return {"position": int(last)}

    def agree(self, stop: bool, *, certain: bool) -> int:
        """What all ranks do after this step: go on, stop and save, or give up on a loss that is not finite.

        A GPU is not waited for unless ``certain``: its verdict on this step is read after the next one.
        """
        if self._writer is not None:
            self._writer.check()
        decision = _NONFINITE if self._saw_nonfinite(certain) else _STOP if stop else _RUNNING
        writes = self._writer is not None and self._writer.writes
        state = torch.tensor((decision, int(writes)))
        if self.world.world_size > 1:
            dist.all_reduce(state, op=dist.ReduceOp.MAX)
        if self._writer is not None and not state[1]:
            self._writer.release()
        return int(state[0])

    def refuse_nonfinite(self) -> None:
        """Before anything is saved, evaluated or called finished: no step so far had a loss or gradient that
        is not finite. A collective call.

        Raises:
            UserError: one had.
        """
        if self.agree(False, certain=True) == _NONFINITE:
            raise _nonfinite_error(self.state.global_step)

    def _saw_nonfinite(self, certain: bool) -> bool:
        if certain or not self.world.gpu_path:
            return bool(self._nonfinite)
        before, copied = self._verdict
        if copied is not None:
            copied.synchronize()
        seen = bool(before)
        event = torch.cuda.Event() if self._nonfinite.is_cuda else None  # type: ignore[no-untyped-call]
        self._verdict = (self._nonfinite.to("cpu", non_blocking=True), event)
        if event is not None:
            event.record()
        return seen

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            self.tokens += self.meter.exchange(int(self._local_tokens))
            self._local_tokens.zero_()
            logs["tokens"] = self.tokens
            for save in self.saves:
                if save.write_s is not None and not save.logged:
                    save.logged = True
                    logs |= {"save_stall_s": save.stall_s, "save_write_s": save.write_s}
        elif "eval_loss" in logs:
            # transformers averages the batches' means, which depends on how rows fall into batches: weigh by
            # tokens
            if self.world.world_size > 1:
                dist.all_reduce(self._evaluated)
            if self._evaluated[1] > 0:
                logs["eval_loss"] = float(self._evaluated[0] / self._evaluated[1])
            self._evaluated.zero_()
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self.refuse_nonfinite()
        return super().evaluate(*args, **kwargs)

    # ---- checkpoints ----
    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # A tied weight is saved once: that its second name is missing from a checkpoint is as it should be.
        if load_result.unexpected_keys or set(load_result.missing_keys) - set(
            self.model.all_tied_weights_keys
        ):
            super()._issue_warnings_after_load(load_result)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._saving_in or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        save = Save(self.state.global_step)
        self.refuse_nonfinite()
        self.finish_save()  # one at a time
        output, limit = Path(self.args.output_dir), self.args.save_total_limit
        name = f"checkpoint-{save.step}"
        aside = output / checkpoint.SAVING / name
        facts = self.facts | {"tokens": self.global_tokens(), **self.position()}
        stage = self._room_to_stage()
        folder = (stage or aside.parent) / name
        if self.world.is_main or (self.bucket and self.bucket.uploads):
            shutil.rmtree(aside.parent, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        # rotation is ours: it must not see the folder aside
        self._saving_in, self.args.save_total_limit = folder.parent, None
        # the manifest has a hash of each file; torch's checksums took half of the time that ranks stop
        checksums = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            with ThreadPoolExecutor(1) as self._beside:
                super()._save_checkpoint(model, trial)
            if self._saved_weights is not None:
                self._saved_weights.result()
        finally:
            self._beside = self._saved_weights = None
            self._saving_in, self.args.save_total_limit = None, limit
            torch.serialization.set_crc32_options(checksums)
        self.accelerator.wait_for_everyone()  # every rank's random state is in the folder
        if self.state.best_model_checkpoint == str(folder):
            self.state.best_model_checkpoint = str(output / name)
        best = Path(self.state.best_model_checkpoint) if self.state.best_model_checkpoint else None
        if self.world.is_main:
            self.state.save_to_json(str(folder / "trainer_state.json"))
            (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle with every key, tokens included

        last = self._is_last_save()

        def publish() -> None:
            assert self.bucket
            self.bucket.saved(name, aside, best.name if best else "", last=last)

        def seal() -> None:
            checkpoint.seal(aside, output / name, save.step, facts)
            checkpoint.rotate(output, limit, best, self.bucket.busy if self.bucket else ())
            self.publisher.saved(output / name)
            if self.bucket and self.bucket.shared:
                publish()
            save.write_s = time.monotonic() - save.began

        if self.world.is_main:
            self.saves.append(save)
        if stage is None:
            if self.world.is_main:
                seal()
            if self.bucket and not self.bucket.shared:
                publish()
            self.accelerator.wait_for_everyone()
        else:
            self._in_flight = True
            if self.world.local_rank == 0:
                self._staged_bytes = background_save.staged_bytes(folder)
                self._writer = BackgroundSave(
                    folder, aside, seal if self.world.is_main else None, alone=self.world.nnodes == 1
                )
        save.stall_s = time.monotonic() - save.began

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Write weights and tokenizer; those of a checkpoint beside its optimizer's state, for two threads
        fill memory in less time than one.
        """
        if self._beside is None or output_dir is None or state_dict is not None:  # gathered from shards
            super()._save(output_dir, state_dict)
        elif self.args.should_save:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            self._saved_weights = self._beside.submit(super()._save, output_dir)

    def _is_last_save(self) -> bool:
        return bool(self.control.should_training_stop or self.state.global_step >= self.state.max_steps)

    def _room_to_stage(self) -> Path | None:
        """This pod's folder in memory for the next checkpoint; None if training is to wait for this save: the
        last one, one whose parts go to a bucket from each pod, or one that the memory of some pod does not
        hold. A collective call.
        """
        apart = self.bucket is not None and not self.bucket.shared
        if not self._async_save or apart or self._is_last_save():
            return None
        lack = self.why_no_stage() if self.world.local_rank == 0 else ""
        if not lack and self.world.local_rank == 0 and not background_save.clear(self._stage):
            lack = f"{self._stage} cannot be made"
        all_can = torch.tensor(int(not lack))
        if self.world.world_size > 1:
            dist.all_reduce(all_can, op=dist.ReduceOp.MIN)
        if not all_can and self.world.is_main and not self._said_no_room:
            warn(f"training waits for its saves: {lack or 'another pod has no memory for them'}")
            self._said_no_room = True
        return self._stage if all_can else None

    def why_no_stage(self) -> str:
        """What this pod lacks to hold a checkpoint in memory while it is written; empty if nothing."""
        needed = self._staged_bytes or self.checkpoint_bytes()
        needed = int(1.1 * needed) + 2**26  # tokenizer, random states
        try:
            shared = shutil.disk_usage(background_save.SHARED_MEMORY).free
        except OSError:
            return f"there is no {background_save.SHARED_MEMORY}"
        if shared < needed:
            return (
                f"{background_save.SHARED_MEMORY} has {shared / GIB:.2f} GiB free and a checkpoint takes "
                f"{needed / GIB:.2f} (shm.sizeLimit in the chart, --shm-size in Docker)"
            )
        free = free_memory()
        if free < 1.5 * needed:
            return f"{free / GIB:.2f} GiB of memory are free and a checkpoint takes {needed / GIB:.2f}"
        return ""

    def how_it_saves(self) -> list[str]:
        """A word for the start line, on rank 0, as far as its own pod can tell."""
        if not self._async_save or self.args.save_strategy == "no":
            return []
        lack = self.why_no_stage()
        return [f"training waits for its saves ({lack})" if lack else "saves beside the next steps"]

    def finish_save(self) -> None:
        """Wait until the save in flight, if there is one, is a checkpoint. A collective call.

        Raises:
            OSError: it could not be written.
        """
        if not self._in_flight:
            return
        if self._writer is not None:
            self._writer.wait_written()
        self.accelerator.wait_for_everyone()
        if self._writer is not None:
            self._writer.release()
            self._writer.join()
            self._writer.check()
        self.accelerator.wait_for_everyone()
        self._in_flight, self._writer = False, None

    def leave_save(self, timeout_s: float) -> None:
        """Give the save in flight so long to become a checkpoint, for a run that failed: its peers may be
        gone.
        """
        if self._writer is not None and self._writer.join(timeout_s):
            shutil.rmtree(self._stage, ignore_errors=True)

    def _load_best_model(self) -> None:
        self.finish_save()
        super()._load_best_model()

    def finished(self, stopped: bool) -> bool:
        """True after the last step or an early stop, False after a stop that all ranks agreed on.

        Raises:
            UserError: neither; the data ended, or the last step gave no finite loss.
        """
        self.finish_save()
        self.refuse_nonfinite()
        state, early = self.state, bool(self.stopped_early())
        if state.global_step < state.max_steps and not stopped and not early:
            raise DataError(
                f"the data ended at step {state.global_step} of {state.max_steps}",
                where="dataset_name",
                fix="lower max_steps, or give more rows",
            )
        return bool(state.global_step >= state.max_steps or early)

    def stopped_early(self) -> str:
        """Why the run ended before its last step although nobody stopped it; empty if it did not."""
        callbacks = self.callback_handler.callbacks  # a resumed run has made the callback anew
        early = next((each for each in callbacks if isinstance(each, EarlyStopping)), None)
        return (
            early.reason if early and early.stopped and self.state.global_step < self.state.max_steps else ""
        )

    def save_final(self, target: Path, card: str, beside: Sequence[Path] = ()) -> None:
        """Write the servable model (weights or adapter, tokenizer, template, ``card``, copies of the files
        ``beside``) aside and rename it to ``target``.

        A collective call: sharded weights are gathered.
        """
        aside = target.parent / checkpoint.SAVING / target.name
        if self.world.is_main:
            shutil.rmtree(aside, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.save_model(str(aside), _internal_call=True)
        if self.world.is_main:
            # a pickle, which nobody who serves the model should load
            (aside / "training_args.bin").unlink(missing_ok=True)
            (aside / "README.md").write_text(card, encoding="utf-8")
            for file in beside:
                shutil.copy(file, aside / file.name)
            shutil.rmtree(target, ignore_errors=True)
            aside.rename(target)
            shutil.rmtree(aside.parent, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """The card is ours, see :func:`podtune.sft.train.publish.model_card`."""

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """transformers would upload the folder of the run with what is being saved in it; see Publisher."""

    # ---- measurements ----
    def save_times(self) -> SaveTimes | None:
        """What this attempt's complete checkpoints took. Rank 0."""
        stalls = [save.stall_s for save in self.saves if save.write_s is not None]
        writes = [save.write_s for save in self.saves if save.write_s is not None]
        return SaveTimes(len(stalls), sum(stalls), max(stalls), sum(writes)) if stalls else None

    def trained_parameters(self) -> int:
        """Parameters that the optimizer changes, those of all ranks where they are sharded."""
        return sum(each.numel() for each in self.model.parameters() if each.requires_grad)

    def adapter_note(self) -> list[str]:
        """For the start line: on which layers there are adapters. PEFT has a choice of its own for many
        architectures, which is not all of them.
        """
        configs = getattr(self.model, "peft_config", {}).values()
        names = [each.target_modules for each in configs if isinstance(each.target_modules, set | list)]
        return [f"LoRA on {' '.join(sorted(layers))}" for layers in names if layers]

    def checkpoint_bytes(self) -> int:
        """About what one checkpoint takes."""
        size = max((each.element_size() for each in self.model.parameters() if each.requires_grad), default=0)
        weights = self.trained_parameters() * size
        each = checkpoint.checkpoint_bytes(weights, self.args.optim, model_only=self.args.save_only_model)
        # accelerate keeps FSDP's own copy of the weights beside the model's
        return each + (weights if self.is_fsdp_enabled and not self.args.save_only_model else 0)

    def peak_memory_gib(self) -> list[float]:
        """Peak memory of every rank in GiB: the CUDA allocator's, or the process's resident peak. A
        collective call.
        """
        if self.world.device_type == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**30
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
        peaks: list[Any] = [peak]
        if self.world.world_size > 1:
            peaks = [None] * self.world.world_size
            dist.all_gather_object(peaks, peak)
        return peaks

    def utilisation(self, tokens_per_s: float | None, mean_length: int) -> dict[str, Any]:
        """``flops_per_token`` at rows of ``mean_length`` tokens and, where the hardware's peak is known,
        ``mfu``.
        """
        from peft import PeftModel

        from podtune.plan.hardware import peak_flops
        from podtune.sft.model.flops import flops_per_token

        # an adapter's own work is small beside the frozen model's forward pass and its activations' gradients
        trained_share = 0.0 if isinstance(self.model, PeftModel) else 1.0
        try:
            flops = flops_per_token(self.model.config, mean_length, trained_share=trained_share)
        except Exception:  # an architecture without heads, or one that cannot say: a figure less, not a run
            return {}
        figures = {"flops_per_token": flops}
        name = torch.cuda.get_device_name() if self.world.device_type == "cuda" else "cpu"
        peak = peak_flops(name, "bf16" if self.args.bf16 else "fp16" if self.args.fp16 else "fp32")
        if peak and tokens_per_s:
            figures["mfu"] = figures["flops_per_token"] * tokens_per_s / (peak * self.world.world_size)
        return figures

    def release(self) -> None:
        """Let go of model and optimizer, so that the process group can be closed (gloo's threads end badly
        otherwise).
        """
        if self.world.local_rank == 0:
            shutil.rmtree(self._stage, ignore_errors=True)
        self.accelerator.free_memory()
        self.model = self.model_wrapped = self.optimizer = self.lr_scheduler = None
        handler = self.callback_handler
        handler.model = handler.optimizer = handler.lr_scheduler = handler.train_dataloader = (
            handler.eval_dataloader
        ) = None
        gc.collect()


def _nonfinite_error(step: int) -> UserError:
    return DataError(
        f"the loss or its gradient is not finite at step {step}; nothing was saved after it",
        where="training",
        fix="lower learning_rate, check max_grad_norm and the data, or use bf16 or fp32 instead of fp16; "
        "the last checkpoint is from before",
    )


class Stopped(Exception):
    """A signal asked this process to end; what it was doing can be left."""


class StopTogether(TrainerCallback):  # type: ignore[misc]
    """SIGTERM, SIGINT or SIGHUP to any rank: all ranks finish the same step, save, and stop. A loss that
    is not finite: all ranks stop, unsaved.
    """

    def __init__(self) -> None:
        self.requested = False  # of this rank
        self.agreed = False  # by all
        self.trainer: PodtuneTrainer | None = None
        self._at_once = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopTogether:
        self._before = {each: signal.signal(each, self._request) for each in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, _frame: object) -> None:
        if self.requested and number != signal.SIGTERM:  # Ctrl-C once more: without saving
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.requested = True
        if self._at_once:
            raise Stopped

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """In the block, whose work can be left, a signal raises :class:`Stopped`, also one that came
        before.
        """
        self._at_once = True
        try:
            if self.requested:
                raise Stopped
            yield
        finally:
            self._at_once = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        assert self.trainer is not None
        decision = self.trainer.agree(self.requested, certain=control.should_save or control.should_evaluate)
        if decision == _NONFINITE:
            raise _nonfinite_error(state.global_step)
        if decision == _STOP:
            self.agreed = True
            control.should_training_stop = True
            control.should_save = True
