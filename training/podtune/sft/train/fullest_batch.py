"""The fullest batch, tried once the optimizer has its state: memory that does not suffice is found early."""

from __future__ import annotations

from typing import Any

import torch

from podtune.machine.facts import GIB
from podtune.sft.data.batching import row_lengths
from podtune.sft.train.trial import trial_step


def try_fullest_batch(trainer: Any) -> str:
    """Train the longest rows forward and backward on gradients that are thrown away.

    In a world of several ranks each takes its share of the longest rows, as
    :class:`~podtune.sft.data.batching.BalancedBatches` deals them.

    Returns:
        What was tried, and the peak of the allocator on a GPU.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    args, world, rows = trainer.args, trainer.world, trainer.train_dataset
    lengths = row_lengths(rows)
    longest = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    longest = longest[: args.train_batch_size * world.world_size]
    longest = longest[world.rank :: world.world_size] or longest[:1]
    batch = trainer.data_collator(list(trainer._remove_unused_columns(rows.select(longest), "training")))
    with trial_step(trainer, batch):
        pass
    said = f"the fullest batch fits: {len(longest)} rows of up to {lengths[longest[0]]} tokens"
    if args.device.type == "cuda":
        said += f"; peak {torch.cuda.max_memory_allocated(args.device) / GIB:.1f} GiB"
    return said
