"""The training loss of TRL's SFTTrainer for less work: the same value and gradient.

TRL computes entropy and accuracy on every forward pass, gathers three counters over the ranks for every
micro-batch, and (off a GPU) scores padding and prompt too, and projects to the vocabulary once more in the
backward pass. Here the model is asked for logits at scored positions only, and accuracy is measured at
logging steps.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn import functional as F

from podtune.run.world import forced_gpu_path
from podtune.sft.cpu.cross_entropy import summed_cross_entropy

IGNORED = -100  # label of a token that is not trained
_PLAIN_LOGITS_BYTES = 2**30  # beyond it, scoring in chunks (TRL's fused head) is worth a second projection


def fused_loss(
    trainer: Any,
    model: Any,
    inputs: dict[str, Any],
    num_items_in_batch: torch.Tensor | int | None,
    *,
    multiple: int = 1,
) -> torch.Tensor:
    """Compute the training loss of ``SFTTrainer.compute_loss`` for a micro-batch, without its side effects.

    Sum of the cross-entropy of the scored tokens, divided by ``num_items_in_batch`` (all ranks' and
    micro-batches' scored tokens of the step), times the data-parallel ranks, since DDP, FSDP and ZeRO
    average gradients. Equal to TRL's to rounding wherever :func:`fused_loss_unsupported_reason` is silent,
    padded or padding-free, and a differentiable zero where nothing is scored. ``model`` is called as usual,
    so autocast, DDP, FSDP and LoRA see an ordinary forward pass.

    The number of columns that are scored is filled up to a ``multiple`` (see
    :class:`podtune.sft.cpu.padded_batches.PaddedBatches`).

    ``mean_token_accuracy`` is put among TRL's metrics at logging steps only (one reduction over the ranks);
    ``entropy`` and ``num_tokens`` are not kept.
    """
    inputs, accuracy = {**inputs, "use_cache": False}, logs_next(trainer)
    if _score_in_chunks(trainer, inputs["labels"]):
        total, correct, scored = _fused(model, inputs)
    else:
        total, correct, scored = _plain(model, inputs, accuracy=accuracy, multiple=multiple)
    if num_items_in_batch is None:
        num_items_in_batch = scored
    loss = total / torch.as_tensor(num_items_in_batch, device=total.device).clamp(min=1)
    if trainer.args.average_tokens_across_devices:
        loss = loss * trainer.accelerator.num_processes
    if correct is not None and accuracy:
        counts = trainer.accelerator.reduce(torch.stack((correct, scored)), "sum")
        if counts[1] > 0:
            trainer._metrics["train"]["mean_token_accuracy"].append((counts[0] / counts[1]).item())
    return loss


def fused_loss_unsupported_reason(trainer: Any) -> str:
    """Name the reason why this trainer needs TRL's own loss; empty where :func:`fused_loss` is exact.

    Call it once, after ``SFTTrainer.__init__``.
    """
    args, accelerator, model = trainer.args, trainer.accelerator, trainer.model
    parallel = accelerator.parallelism_config
    peft = getattr(model, "active_peft_config", None)
    forward = type(model.get_base_model() if peft is not None else model).forward
    reasons = {
        f"loss_type is {args.loss_type}": args.loss_type != "nll",
        "label smoothing needs all logits": trainer.label_smoother is not None,
        "a loss function of the user's own": trainer.compute_loss_func is not None,
        "the experts' balancing loss is added": trainer.aux_loss_enabled,
        "images are in the data": getattr(trainer, "_is_vision_dataset", False),
        "prompt learning lengthens the rows": peft is not None and peft.is_prompt_learning,
        "rows are split over ranks": parallel is not None
        and bool(parallel.sp_enabled or parallel.cp_enabled or parallel.tp_enabled),
        "the model cannot leave out logits": "logits_to_keep" not in inspect.signature(forward).parameters,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _plain(
    model: Any, inputs: dict[str, Any], *, accuracy: bool, multiple: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Compute summed cross-entropy, correct and scored tokens from logits at the scored columns alone.

    A column counts if some row is scored there; the first one is repeated up to a ``multiple``.
    """
    labels = inputs["labels"][:, 1:]
    columns = (labels != IGNORED).any(0).nonzero().flatten()
    more = (0, -len(columns) % multiple)
    kept = F.pad(columns, more)
    logits = model(**{k: v for k, v in inputs.items() if k != "labels"}, logits_to_keep=kept).logits
    targets = F.pad(labels[:, columns], more, value=IGNORED).flatten()
    logits = logits.flatten(0, 1)
    total = summed_cross_entropy(logits, targets, IGNORED)
    correct = None
    if accuracy:  # the places of max are argmax's, in a quarter of the time for bf16 on a CPU
        correct = (logits.detach().max(-1).indices == targets).sum()
    return total, correct, (targets != IGNORED).sum()


def _fused(model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Compute the same by SFTTrainer's fused head: never all logits at once, and Triton on a GPU."""
    outputs = model(**inputs, fused_lm_head=True)
    return -outputs.log_probs.sum(), outputs.is_top1.sum(), outputs.label_mask.sum()


def score_as_on_a_gpu() -> None:
    """Have TRL's fused head take the scored rows alone on a CPU too, as on a GPU.

    A patch of TRL's module, for tests (PODTUNE_FORCE_GPU_PATH); its kernels keep their torch form on the CPU.
    """
    import trl.trainer.utils

    trl.trainer.utils._use_triton = lambda device: True


def _score_in_chunks(trainer: Any, labels: torch.Tensor) -> bool:
    """True to take TRL's fused head: always on a GPU, elsewhere when the logits would fill memory.

    Sharded weights are gathered differently by the two, so ranks must not choose by what their own batch
    holds.
    """
    if labels.device.type != "cpu" or forced_gpu_path():
        return True
    if trainer.is_fsdp_enabled:
        return False
    scored = int((labels[:, 1:] != IGNORED).any(0).sum()) * len(labels)
    vocabulary: int = trainer.model.config.get_text_config().vocab_size
    return scored * vocabulary * 4 > _PLAIN_LOGITS_BYTES


def logs_next(trainer: Any) -> bool:
    """True in the micro-batches of a step after which the trainer logs."""
    every, step = int(trainer.state.logging_steps), int(trainer.state.global_step) + 1
    # podtune.sft.train.progress logs it whatever logging_steps is
    last = step == int(trainer.state.max_steps)
    due = (every > 0 and step % every == 0) or last or (step == 1 and bool(trainer.args.logging_first_step))
    return due and str(trainer.args.logging_strategy.value) == "steps"
