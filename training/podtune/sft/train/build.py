"""The trainer of a run with its model, adapter, callbacks and collaborators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from podtune.sft.cpu.heap_trim import HeapTrimCallback
from podtune.sft.model.load import load_model
from podtune.sft.train.early import EarlyStopping
from podtune.sft.train.meter import multiplies_in_tf32
from podtune.sft.train.stop import CoordinatedStop, StopSignals
from podtune.sft.train.trainer import PodtuneTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from podtune.sft.config.resolve import Arguments
    from podtune.sft.source.model import Origin
    from podtune.sft.train.run import FineTune


def settle_tf32() -> None:
    """Say in torch's older words, too, that fp32 tensors multiply in TF32, where transformers turned it on.

    Asked in those, torch refuses to answer while the two differ, and Inductor's max-autotune asks.
    """
    if multiplies_in_tf32():
        torch.set_float32_matmul_precision("high")


def build_trainer(
    arguments: Arguments,
    origin: Origin,
    model_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    run: FineTune,
    signals: StopSignals,
) -> PodtuneTrainer:
    """Load the weights at ``origin`` and make the trainer of ``run``."""
    training, world, rows = arguments.training, run.world, run.rows
    model = load_model(origin, **arguments.model_options(), is_trainable=True)
    # applied here, SFTTrainer need not look again
    training.model_init_kwargs = training.chat_template_path = None
    settle_tf32()
    stop = CoordinatedStop(signals, world, run.writer)
    # progress first: it decides whether this step is logged
    callbacks = [run.progress, stop]
    if patience := arguments.run.early_stopping_patience:
        callbacks.append(EarlyStopping(patience, arguments.run.early_stopping_threshold))
    if world.device_type == "cpu":
        callbacks.append(HeapTrimCallback())
    return PodtuneTrainer(
        model=model,
        args=training,
        train_dataset=rows.dataset(run.resume.position if run.resume else 0),
        eval_dataset=rows.eval,
        processing_class=tokenizer,
        peft_config=None if origin.is_adapter else arguments.peft_config(model_config.model_type),
        callbacks=callbacks,
        world=world,
        meter=run.meter,
        writer=run.writer,
        stop=stop,
        resume_key=arguments.resume_key(rows.info.fingerprint),
        fused=arguments.run.loss == "lean",
        # torch.compile fuses the same passes by itself
        try_liger=arguments.liger_open and not training.torch_compile,
    )
