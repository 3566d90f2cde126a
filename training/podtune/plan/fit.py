"""The cheapest changes that would make a training fit its card. Needs no torch."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

from podtune.plan.plan import USABLE, Plan, estimate
from podtune.plan.setup import TrainingSetup
from podtune.run.errors import UserError

MANY_RANKS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Change:
    """One or more changes that belong together, and the plan with them."""

    text: str
    setup: TrainingSetup
    plan: Plan


@dataclass(frozen=True)
class _Single:
    """A change of fields. ``cost`` is what a user gives up: time first, then the result, then more GPUs."""

    cost: float
    subject: str  # two changes of one subject exclude each other
    text: str
    fields: dict[str, Any]


def cheapest_fits(setup: TrainingSetup, memory_gib: float, *, count: int = 3) -> list[Change]:
    """The ``count`` cheapest changes to ``setup`` whose plan fits ``memory_gib`` on each card, or fewer.

    Of changes of the same kind only the cheapest is named, and none together with one that fits without it.
    """
    singles = _singles(setup)
    together = [group for size in (1, 2, 3) for group in itertools.combinations(singles, size)]
    fits: list[tuple[set[str], Change]] = []
    for group in sorted(together, key=lambda group: sum(single.cost for single in group)):
        subjects = {single.subject for single in group}
        if len(subjects) < len(group) or any(subjects >= smaller for smaller, _ in fits):
            continue
        fields: dict[str, Any] = {}
        for single in group:
            fields |= single.fields
        changed = replace(setup, **fields)
        # the same rows a rank, whatever the ranks
        rows = setup.batch_size // setup.world_size
        changed = replace(changed, batch_size=rows * changed.world_size)
        try:
            plan = estimate(changed)
        except UserError:
            continue
        if plan.total_gib <= USABLE * memory_gib:
            fits.append((subjects, Change(", ".join(single.text for single in group), changed, plan)))
            if len(fits) == count:
                break
    return [change for _, change in fits]


def _singles(setup: TrainingSetup) -> list[_Single]:
    changes = []
    if setup.activation_checkpointing in ("none", "every-second"):
        if setup.activation_checkpointing == "none":
            text = "checkpoint every second layer (a sixth more work)"
            changes.append(_Single(1, "checkpointing", text, {"activation_checkpointing": "every-second"}))
        text = "checkpoint every layer (a third more work)"
        changes.append(_Single(2, "checkpointing", text, {"activation_checkpointing": "full"}))
    rows = setup.batch_size // (setup.world_size * setup.accumulation)
    for times in range(2, rows + 1):
        if rows % times == 0:
            fewer, steps = rows // times, setup.accumulation * times
            text = f"{fewer} row{'s' * (fewer > 1)} a batch and {steps} accumulation steps"
            changes.append(_Single(1 + 0.4 * math.log2(times), "batch", text, {"accumulation": steps}))
    if setup.lora_r is None:
        if setup.optimizer == "adamw":
            text = "an 8-bit optimizer (adamw_8bit)"
            changes.append(_Single(3, "optimizer", text, {"optimizer": "adamw-8bit"}))
        lora = {"lora_r": 16, "precision": "bf16"}
        changes.append(_Single(6, "weights", "LoRA of rank 16 on bf16 weights", lora))
    elif setup.precision in ("fp32", "bf16-autocast"):
        text = "the frozen weights in bf16 (dtype: bfloat16)"
        changes.append(_Single(1, "weights", text, {"precision": "bf16"}))
    if setup.lora_r is not None and not setup.quantized:
        quantized = {"quantized": True, "precision": "bf16"}
        changes.append(_Single(7, "weights", "QLoRA: the frozen weights in 4 bits (load_in_4bit)", quantized))
    ranks = [many for many in MANY_RANKS if many >= max(2, setup.world_size)]
    for many in ranks:
        if (setup.strategy, setup.world_size) != ("fsdp", many):
            text = f"strategy fsdp over {many} GPUs"
            cost = 4 if many == setup.world_size else 8 + ranks.index(many)
            changes.append(_Single(cost, "cards", text, {"strategy": "fsdp", "world_size": many}))
    return changes
