"""A step that leaves no trace: forward and backward on gradients that are thrown away."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from trl import SFTTrainer


@contextlib.contextmanager
def trial_step(trainer: Any, batch: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Train ``batch`` forward and backward; yield its loss while the gradients are there.

    Random numbers, TRL's figures and the weights are those of a run without it. A collective call.
    """
    metrics, tokens = copy.deepcopy(trainer._metrics), trainer._total_train_tokens
    device = trainer.args.device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            items = trainer._get_num_items_in_batch([batch], device)
            loss = SFTTrainer.training_step(trainer, trainer.model_wrapped, dict(batch), items)
        yield loss
    finally:
        trainer.model_wrapped.zero_grad()
        trainer._metrics, trainer._total_train_tokens = metrics, tokens
