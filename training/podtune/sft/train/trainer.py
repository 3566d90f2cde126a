"""TRL's SFTTrainer for a cluster: its hooks hand over to the writer of checkpoints, the meter and the stop.

Every collaborator is given to the constructor and none knows the trainer: :class:`CheckpointWriter` saves,
:class:`CoordinatedStop` ends training on all ranks at one step, :class:`Meter` counts and measures.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from typing import Any

import torch
from accelerate import DistributedDataParallelKwargs, DistributedType, PartialState
from datasets import Dataset, IterableDataset
from peft import PeftModel
from torch.utils.data import DataLoader, Sampler
from transformers import PrinterCallback
from transformers.integrations import KubeflowCallback
from trl import SFTConfig, SFTTrainer

from podtune.run.checkpoint import ResumeKey
from podtune.run.errors import ConfigError, DataError
from podtune.run.world import World, forced_gpu_path
from podtune.sft.cpu.padded_batches import REAL_TOKENS, PaddedBatches, automatic_multiple
from podtune.sft.cpu.rms_norm import patch_rms_norm
from podtune.sft.data.batching import ROW, LengthGrouped, NumberedBatches, balance, row_lengths
from podtune.sft.train.early import stopped_early
from podtune.sft.train.fullest_batch import try_fullest_batch
from podtune.sft.train.job_status import JobStatus
from podtune.sft.train.liger import LigerKernels, kernels_can_run, take_liger_kernels
from podtune.sft.train.lora import fuse_adapters
from podtune.sft.train.loss import fused_loss, fused_loss_unsupported_reason, score_as_on_a_gpu
from podtune.sft.train.meter import EvaluationLoss, Meter, evaluation_of
from podtune.sft.train.parameters import (
    estimated_checkpoint_bytes,
    freeze_unreached,
    leave_casts_to_autocast,
    trained_parameters,
)
from podtune.sft.train.refusals import refusals_as_sentences
from podtune.sft.train.saving import CheckpointWriter
from podtune.sft.train.sharded_state import ShardedCheckpoints
from podtune.sft.train.stop import CoordinatedStop


def _left_to_podtune(*_: Any, **__: Any) -> None:
    """Do nothing: the card and the uploads are :mod:`podtune.sft.train.publish`'s."""


def _pad_to_multiple_of(trainer: PodtuneTrainer) -> int:
    """Multiple of tokens that batches of rows end to end are filled up to; 0 for none."""
    args = trainer.args
    if not trainer.padding_free:
        return 0
    if args.pad_to_multiple_of or trainer.trls_loss_reason:
        return int(args.pad_to_multiple_of or 0)
    return automatic_multiple(
        args.device.type, bf16=args.bf16, trained_parameters=trained_parameters(trainer.model)
    )


class PodtuneTrainer(ShardedCheckpoints, SFTTrainer):  # type: ignore[misc]
    """TRL's trainer with complete checkpoints, real token counts, a cheaper loss, one stop for all ranks."""

    trls_loss_reason: str  # why TRL's own loss is taken; empty where podtune's is
    frozen: int  # parameters for images and sound, which rows of text never reach
    multiple: int  # tokens that the length of a batch is a multiple of; 0 for any length
    model: Any
    _signature_columns: list[str] | None
    data_collator: Any

    def __init__(
        self,
        *,
        args: SFTConfig,
        world: World,
        meter: Meter,
        writer: CheckpointWriter,
        stop: CoordinatedStop,  # among the callbacks, too, where signals shall be heard
        resume_key: ResumeKey,  # for the manifest of every checkpoint
        fused: bool = True,  # take podtune's loss where it equals TRL's
        try_liger: bool = False,  # take Liger's kernels where they compute the same
        **kwargs: Any,
    ) -> None:
        self.world, self.meter, self.writer, self.stop = world, meter, writer, stop
        self._resume_key = resume_key
        # rows of a stream bear their places, and a resumed one begins behind those that were trained
        self._streamed = isinstance(kwargs.get("train_dataset"), IterableDataset)
        args.ignore_data_skip = self._streamed
        # The rows come tokenised, cut, masked and packed (podtune.sft.data). TRL has nothing left to
        # prepare, and refuses a max_length that it would not enforce on rows laid end to end, and masks for
        # rows that are no messages.
        args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
        # rotation is the writer's: transformers' would see the folder that is being written
        args.save_total_limit = None
        requested = args.max_length, args.assistant_only_loss
        args.max_length, args.assistant_only_loss = None, False
        with refusals_as_sentences():
            super().__init__(args=args, **kwargs)
        self.frozen = freeze_unreached(self.model)
        args.max_length, args.assistant_only_loss = requested
        if forced_gpu_path():
            score_as_on_a_gpu()
        self.trls_loss_reason = fused_loss_unsupported_reason(self) if fused else "as asked"
        self.multiple = _pad_to_multiple_of(self)
        if self.multiple:
            self.data_collator.pad_to_multiple_of = None
            self.data_collator = PaddedBatches(self.data_collator, self.multiple)
        if self._streamed:
            self.data_collator = NumberedBatches(self.data_collator)
        if self.accelerator.native_amp:
            leave_casts_to_autocast(self.model)
            if args.device.type == "cpu" and args.bf16 and not args.torch_compile:
                patch_rms_norm(self.model)
        if isinstance(self.model, PeftModel) and not args.torch_compile:  # which fuses by itself
            half = torch.bfloat16 if args.bf16 else torch.float16
            amp = half if self.accelerator.native_amp else None
            # FSDP shards weights of one dtype
            fuse_adapters(self.model, amp, cast_base=bool(amp) and not self.is_fsdp_enabled)
        self.remove_callback(PrinterCallback)  # podtune.sft.train.progress says it in one tidy line
        if self.pop_callback(KubeflowCallback):
            self.add_callback(JobStatus)
        self._evaluation = EvaluationLoss(world)
        self._liger: LigerKernels | None = None
        self._liger_untried = try_liger and kernels_can_run(world)
        self._fullest_untried = world.gpu_path and isinstance(self.train_dataset, Dataset)

    # ---- accelerate ----
    def create_accelerator_and_postprocess(self) -> None:
        """Make sure that FSDP runs where it was asked for: accelerate trains plain DDP on a CPU instead."""
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

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, object]:
        # without it DDP keeps a second copy of all gradients
        settings: dict[str, object] = super()._build_accelerator_args(**kwargs)
        handlers = settings["kwargs_handlers"]
        assert isinstance(handlers, list)
        for handler in handlers:
            if isinstance(handler, DistributedDataParallelKwargs):
                handler.gradient_as_bucket_view = True
        return settings

    # ---- rows ----
    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        # the trainer drops columns that the model's forward does not name
        columns = self._signature_columns or []
        if self._streamed and ROW not in columns:
            self._signature_columns = [*columns, ROW]

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        rows = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "group_by_length" or not isinstance(rows, Dataset):
            usual: Sampler[int] | None = super()._get_train_sampler(train_dataset)
            return usual
        batch = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return LengthGrouped(
            row_lengths(rows),
            batch,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            epoch=lambda: int((self.state.epoch or 0.0) + 1e-6),
        )

    def get_train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        loader: DataLoader[dict[str, torch.Tensor]] = super().get_train_dataloader()
        if not isinstance(self.train_dataset, Dataset):
            return loader
        if not len(loader):
            raise DataError(
                f"{len(self.train_dataset)} rows fill no batch of {self.args.train_batch_size} for each of "
                f"{self.world.world_size} "
                "processes, and what does not is dropped",
                where="dataloader_drop_last",
                fix="leave it off, lower per_device_train_batch_size, or give more rows",
            )
        if self.world.world_size > 1:
            # the same rows in every step, dealt out by length
            balance(loader, row_lengths(self.train_dataset))
        return loader

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor | int | None]:
        if self._fullest_untried and self.state.global_step:  # the optimizer has its state
            self._fullest_untried = False
            tried = try_fullest_batch(self)
            if self.world.rank == 0:
                print(tried, flush=True)
        timed = self.meter.batches(epoch_iterator)
        samples, num_items = super().get_batch_samples(timed, num_batches, device)
        if self._liger_untried and samples:
            self._liger_untried = False
            batch = {name: values for name, values in samples[0].items() if name != ROW}
            self._liger, tried = take_liger_kernels(self, batch)
            if self.world.rank == 0:
                print(tried, flush=True)
        return samples, num_items

    # ---- steps ----
    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # Begun at the last step (its checkpoint was saved, final/ was not), transformers would train one
        # more.
        if self.state.global_step >= self.state.max_steps or stopped_early(self):
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        places = inputs.pop(ROW, None)
        self.meter.count(inputs, places)
        self.meter.time_forward(model)
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        self.stop.watch(loss)
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor | tuple[torch.Tensor, object]:
        # a model refuses arguments that it does not know
        inputs.pop(REAL_TOKENS, None)
        training = self.model.training
        if not self.trls_loss_reason and training and not return_outputs:
            return fused_loss(self, model, inputs, num_items_in_batch, multiple=self.multiple or 1)
        result: torch.Tensor | tuple[torch.Tensor, object]
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not training:
            self._evaluation.add(result[0] if isinstance(result, tuple) else result, inputs["labels"])
        return result

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> torch.Tensor | float | None:
        norm: torch.Tensor | float | None = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None and not self.args.fp16:  # fp16's scaler skips steps with infinite gradients
            self.stop.watch(torch.as_tensor(norm, device=self.args.device))
        return norm

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.stop.refuse_nonfinite(self.state.global_step)
        metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            self.meter.exchange()
            logs |= {"tokens": self.meter.tokens, **self.writer.newly_complete()}
        elif (split := evaluation_of(logs)) and (loss := self._evaluation.take()) is not None:
            logs[f"{split}_loss"] = loss
        super().log(logs, start_time)

    # ---- checkpoints ----
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.stop.refuse_nonfinite(self.state.global_step)
        facts = self._resume_key.facts() | {"tokens": self.meter.global_tokens()}
        if self._streamed:
            facts["position"] = self.meter.stream_position()
        self.writer.save(
            functools.partial(super()._save_checkpoint, model, trial),
            self.state,
            facts,
            last=self.control.should_training_stop or self.state.global_step >= self.state.max_steps,
            estimated_bytes=estimated_checkpoint_bytes(self),
        )

    def _get_output_dir(self, trial: Any) -> str:
        folder = self.writer.folder
        return str(folder.parent) if folder else str(super()._get_output_dir(trial))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # A tied weight is saved once: that its second name is missing from a checkpoint is as it should be.
        if load_result.unexpected_keys or set(load_result.missing_keys) - set(
            self.model.all_tied_weights_keys
        ):
            super()._issue_warnings_after_load(load_result)

    def _load_best_model(self) -> None:
        # the best one may still be on its way to the volume
        self.writer.finish()
        super()._load_best_model()

    # transformers' would push the folder of the run, with what is being saved in it
    create_model_card = _push_from_checkpoint = _left_to_podtune

    # ---- the end ----
    def finish(self) -> bool:
        """Wait for the last save. True after the last step or an early stop, False after a signal.

        Raises:
            DataError: the data ended before, or the last step gave no finite loss.
        """
        self.writer.finish()
        self.stop.refuse_nonfinite(self.state.global_step)
        step, last = self.state.global_step, self.state.max_steps
        if step >= last or stopped_early(self):
            return True
        if not self.stop.stopped:
            raise DataError(
                f"the data ended at step {step} of {last}",
                where="dataset_name",
                fix="lower max_steps, or give more rows",
            )
        return False

    def release(self) -> None:
        """Drop model and optimizer before the process group is closed: gloo's threads end badly otherwise."""
        self.writer.close()
        if self._liger:
            self._liger.off()
        self.accelerator.free_memory()
        self.model = self.model_wrapped = self.optimizer = self.lr_scheduler = None
        for held in ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"):
            setattr(self.callback_handler, held, None)
        gc.collect()
