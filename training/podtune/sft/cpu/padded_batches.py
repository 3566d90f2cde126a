"""Padding-free batches padded to a multiple of tokens, for kernels that are built anew for each length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

REAL_TOKENS = "real_tokens"  # the key of a padded batch for how many of its tokens are of rows

# Building kernels takes a small model a third of its step; a model with more trained parameters than this
# loses more to the padding.
_MULTIPLE, _PAYS_BELOW = 64, 50_000_000


def automatic_multiple(device_type: str, *, bf16: bool, trained_parameters: int) -> int:
    """Multiple of tokens to which padding pays, or 0: oneDNN compiles bf16 kernels for each length."""
    return _MULTIPLE if device_type == "cpu" and bf16 and trained_parameters < _PAYS_BELOW else 0


class PaddedBatches:
    """Collator of padding-free batches that pads each to a multiple of tokens.

    The padding is one row more, which is not trained on and to which no other row attends: loss and gradient
    are those of the rows. TRL's own ``pad_to_multiple_of`` would make a row, and a call of the attention, of
    each padding token. A batch keeps its number of real tokens under :data:`REAL_TOKENS`.
    """

    def __init__(self, collate: Callable[[list[dict[str, Any]]], dict[str, Any]], multiple: int) -> None:
        self.collate, self.multiple = collate, multiple

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor | int]:
        batch = self.collate(rows)
        length = batch["input_ids"].shape[1]
        batch[REAL_TOKENS] = torch.tensor(length)
        if not (short := -length % self.multiple):
            return batch
        ends = batch["cu_seq_lens_q"]
        ends = torch.cat((ends, ends.new_tensor([length + short])))
        longest = max(batch["max_length_q"], short)
        return batch | {
            "input_ids": F.pad(batch["input_ids"], (0, short)),
            "labels": F.pad(batch["labels"], (0, short), value=-100),
            "position_ids": torch.cat((batch["position_ids"], torch.arange(short)[None]), 1),
            "seq_idx": F.pad(batch["seq_idx"], (0, short), value=len(ends) - 2),
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }
