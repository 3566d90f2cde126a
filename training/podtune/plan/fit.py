"""The cheapest changes that would make a training fit its card. Needs no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
    fields: dict[str, Any] = field(hash=False)


def cheapest_fits(setup: TrainingSetup, memory_gib: float, *, count: int = 3) -> list[Change]:
    """The ``count`` cheapest changes to ``setup`` whose plan fits ``memory_gib`` on each card, or fewer.

    Of changes of the same kind only the cheapest is named, and none together with one that fits without it.
    """
    singles = list(_singles(setup))
    together = [group for size in (1, 2, 3) for group in itertools.combinations(singles, size)]
    fits: list[Change] = []
    named: list[set[str]] = []
    for group in sorted(together, key=lambda group: sum(single.cost for single in group)):
        subjects = {single.subject for single in group}
        if len(subjects) < len(group) or any(subjects >= smaller for smaller in named):
            continue
        changed = setup
        for single in group:
            changed = replace(changed, **single.fields)
        # the same rows a rank, whatever the ranks
        changed = replace(changed, batch_size=setup.batch_size // setup.world_size * changed.world_size)
        try:
            plan = estimate(changed)
        except UserError:
            continue
        if plan.total_gib <= USABLE * memory_gib:
            named.append(subjects)
            fits.append(Change(", ".join(single.text for single in group), changed, plan))
            if len(fits) == count:
                break
    return fits


def _singles(setup: TrainingSetup) -> Iterator[_Single]:
    levels = {"every-second": "second layer (a sixth more work)", "full": "layer (a third more work)"}
    known = ("none", *levels)
    if (level := setup.activation_checkpointing) in known:
        for cost, how in enumerate(known[known.index(level) + 1 :], 1):
            fields = {"activation_checkpointing": how}
            yield _Single(cost, "checkpointing", f"checkpoint every {levels[how]}", fields)
    rows = setup.batch_size // (setup.world_size * setup.accumulation)
    for times in (each for each in range(2, rows + 1) if rows % each == 0):
        fewer, steps = rows // times, setup.accumulation * times
        text = f"{fewer} row{'s' * (fewer > 1)} a batch and {steps} accumulation steps"
        yield _Single(1 + 0.4 * math.log2(times), "batch", text, {"accumulation": steps})
    if setup.lora_r is None:
        if setup.optimizer == "adamw":
            yield _Single(3, "optimizer", "an 8-bit optimizer (adamw_8bit)", {"optimizer": "adamw-8bit"})
        lora = {"lora_r": 16, "precision": "bf16"}
        yield _Single(6, "weights", "LoRA of rank 16 on bf16 weights", lora)
    elif not setup.quantized:
        if setup.precision != "bf16":
            text = "the frozen weights in bf16 (dtype: bfloat16)"
            yield _Single(1, "weights", text, {"precision": "bf16"})
        quantized = {"quantized": True, "precision": "bf16"}
        yield _Single(7, "weights", "QLoRA: the frozen weights in 4 bits (load_in_4bit)", quantized)
    for index, many in enumerate(each for each in MANY_RANKS if each >= max(2, setup.world_size)):
        if (setup.strategy, setup.world_size) != ("fsdp", many):
            cost = 4 if many == setup.world_size else 8 + index
            spread = {"strategy": "fsdp", "world_size": many}
            yield _Single(cost, "cards", f"strategy fsdp over {many} GPUs", spread)
