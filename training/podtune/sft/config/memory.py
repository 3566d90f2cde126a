"""Estimate of a fine-tune's memory on a GPU before weights are read, and the checkpointing that fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from podtune.plan.fit import cheapest_fits
from podtune.plan.models import shape_of
from podtune.plan.plan import USABLE, Plan, estimate
from podtune.plan.setup import TrainingSetup
from podtune.plan.shapes import Checkpointing, Shape
from podtune.run.errors import OutOfMemory, UserError, warn
from podtune.run.world import World
from podtune.sft.source.model import Origin, base_of

if TYPE_CHECKING:
    from podtune.sft.config.resolve import Arguments

CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "every-second", "full")  # from fastest to leanest
#: the planner's names of optimizers, by a part of transformers' name; others are taken for AdamW
OPTIMIZERS = {"8bit": "adamw-8bit", "adafactor": "adafactor", "sgd": "sgd"}
GIB = 2**30


@dataclass(frozen=True)
class MemoryEstimate:
    """The estimated peak memory of a fine-tune on a card that has ``card_gib`` free."""

    plan: Plan
    checkpointing: str
    card_gib: float
    card: str
    reason: str  # of the checkpointing

    def parts(self) -> dict[str, float]:
        """GiB of each part, as far as it is planned."""
        names = ("weights", "gradients", "optimizer", "activations", "head", "buffers")
        sizes = {name: getattr(self.plan, f"{name}_gib") for name in names}
        return {name: size for name, size in sizes.items() if size is not None}

    def line(self) -> str:
        """Format each part, and the sum against the card, for people."""
        listed = ", ".join(f"{name} {size:.1f}" for name, size in self.parts().items() if size >= 0.05)
        total = self.plan.total_gib
        return (
            f"memory a GPU, estimated in GiB: {listed}: {total:.1f} of {self.card_gib:.1f} free "
            f"({self.card}); activation checkpointing: {self.checkpointing} ({self.reason})"
        )

    def for_record(self, peak_gib: float | None = None) -> dict[str, float]:
        """Return the estimate by parts and, once measured, its error against the allocator's peak."""
        total = self.plan.total_gib
        sizes = self.parts() | {"total": total, "card": self.card_gib}
        figures = {f"{name}_gib": round(size, 3) for name, size in sizes.items()}
        if peak_gib:
            figures |= {"peak_gib": round(peak_gib, 3), "error": round(total / peak_gib - 1, 4)}
        return figures


def estimate_memory(
    arguments: Arguments, origin: Origin, world: World, lengths: Sequence[int]
) -> MemoryEstimate | None:
    """Estimate memory for the GPU of the job that has least free; set the activation checkpointing that fits.

    Where the user chose none, ``arguments.training`` gets the least that fits. None on the CPU, and where
    the planner's formulas do not cover model or strategy. ``lengths`` are the tokens of every row. A
    collective call.

    Raises:
        UserError: nothing fits, and memory_check is on; names the cheapest changes that would.
    """
    if world.device_type != "cuda":
        return None
    import torch
    from accelerate.utils import gather_object

    training = arguments.training
    tokens = longest_mean(
        lengths, training.per_device_train_batch_size, padding_free=bool(training.padding_free)
    )
    free_to_choose = arguments.checkpointing_open
    asked: Checkpointing = "full" if training.activation_checkpointing else "none"
    levels = CHECKPOINTING if free_to_choose else (asked,)
    try:
        config = (base_of(origin) if origin.is_adapter else origin).file("config.json")
        setup = training_setup(shape_of(str(config), tokens), arguments, world)
        setups = {level: replace(setup, activation_checkpointing=level) for level in levels}
        plans = {level: estimate(each) for level, each in setups.items()}
    except UserError:
        return None
    # ranks that recomputed differently would wait for each other's weights for ever
    card, name = min(gather_object([torch.cuda.mem_get_info()[0]])) / GIB, torch.cuda.get_device_name()
    level = next((each for each, plan in plans.items() if plan.total_gib <= USABLE * card), None)
    if level is None:
        level = list(plans)[-1]
        error = _too_large(setups[level], plans[level], card, name)
        if arguments.run.memory_check:
            raise error
        warn(f"{error.what}; memory_check is off")
    reason = "as asked" if not free_to_choose else "not needed" if level == "none" else "the least that fits"
    if free_to_choose:
        # TRL reads the deprecated name
        training.activation_checkpointing = training.gradient_checkpointing = level != "none"
        if level == "every-second":
            given = training.activation_checkpointing_kwargs or {}
            training.activation_checkpointing_kwargs = {**given, "every_n_layers": 2}
    return MemoryEstimate(plans[level], level, card, name, reason)


def longest_mean(lengths: Sequence[int], batch_size: int, *, padding_free: bool) -> int:
    """Compute the tokens a row of the fullest batch of an epoch.

    Padded: the longest row. End to end: the mean of the fullest batch of one shuffled epoch.
    """
    import numpy as np

    if not padding_free or len(lengths) <= batch_size:
        return max(lengths, default=1)
    shuffled = np.random.default_rng(0).permutation(np.asarray(lengths))
    whole = len(shuffled) // batch_size * batch_size
    return math.ceil(int(shuffled[:whole].reshape(-1, batch_size).sum(1).max()) / batch_size)


def training_setup(shape: Shape, arguments: Arguments, world: World) -> TrainingSetup:
    """Make the planner's setup of a fine-tune on GPUs, but for its checkpointing."""
    training, model = arguments.training, arguments.model
    half = bool(training.bf16 or training.fp16)
    if model.dtype in ("bfloat16", "float16"):
        precision = "bf16"
    elif half:
        precision = "bf16-autocast"
    else:
        precision = "fp32"
    groups = world.nnodes if world.nnodes > 1 else 2  # copies of the weights under hsdp
    optimizer = next((plan for part, plan in OPTIMIZERS.items() if part in str(training.optim)), "adamw")
    return TrainingSetup(
        shape,
        arguments.strategy,
        world.world_size,
        precision=precision,
        batch_size=arguments.global_batch_size,
        nodes=world.nnodes,
        accumulation=training.gradient_accumulation_steps,
        optimizer=optimizer,
        lora_r=model.lora_r if model.use_peft else None,
        lora_dropout=model.lora_dropout if model.use_peft else 0.0,
        quantized=bool(model.load_in_4bit),
        fused_head=True,
        shard_size=world.world_size // groups if arguments.strategy == "hsdp" else None,
    )


def _too_large(setup: TrainingSetup, plan: Plan, card: float, name: str) -> UserError:
    changes = cheapest_fits(setup, card)
    ways = "; or ".join(f"{change.text} ({change.plan.total_gib:.0f} GiB)" for change in changes)
    return OutOfMemory(
        f"the training does not fit: about {plan.total_gib:.1f} GiB a GPU (weights {plan.weights_gib:.1f}, "
        f"gradients {plan.gradients_gib:.1f}, optimizer {plan.optimizer_gib:.1f}, activations and head "
        f"{(plan.activations_gib or 0) + (plan.head_gib or 0):.1f}), and {name} has {card:.1f} GiB free",
        where="memory",
        fix=ways or "a smaller model, or shorter rows (max_length)",
    )
