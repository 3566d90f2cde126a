"""Merge a LoRA adapter into its base model: one folder that serves without PEFT, checked by its logits."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from podtune.run.errors import SoftwareError, UsageError
from podtune.sft.data.tokenizer import load_tokenizer
from podtune.sft.model.build import new_folder
from podtune.sft.model.load import load_model
from podtune.sft.source.model import locate_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

PROBE_ROWS, PROBE_TOKENS = 4, 32
# by bytes an element, relative: adding the product to the weights rounds once to their type
TOLERANCE = {4: 1e-3, 2: 5e-2}


def merge_adapter(adapter: str | os.PathLike[str], output: Path, *, trust_remote_code: bool = False) -> float:
    """Write base and adapter as one model with its tokenizer to ``output``, and compare their logits.

    Returns:
        The largest difference between the adapter on its base and the folder read back, relative to the
        largest logit.

    Raises:
        UserError: not an adapter, an output that exists, or merged logits that differ by more than the
        weights' rounding.
    """
    origin = locate_model(adapter)
    if not origin.is_adapter:
        raise UsageError(
            "is not an adapter: there is no adapter_config.json in it",
            where=origin.name,
            fix="give the folder of a LoRA run, RUN_DIR/final",
        )
    tokenizer = load_tokenizer(origin, trust_remote_code=trust_remote_code)
    model = load_model(origin, trust_remote_code=trust_remote_code)
    expected = probe(model)
    with new_folder(output) as part:
        merged: PreTrainedModel = model.merge_and_unload()
        element = next(merged.parameters()).element_size()
        # this imports deepspeed where it is installed, which prints
        with contextlib.redirect_stdout(sys.stderr):
            merged.save_pretrained(part)
        tokenizer.save_pretrained(part)
        del model, merged
        gc.collect()
        probed = probe(load_model(locate_model(part), trust_remote_code=trust_remote_code))
        difference = ((probed - expected).abs().max() / expected.abs().max()).item()
        tolerance = TOLERANCE.get(element, TOLERANCE[2])
        if not difference <= tolerance:
            raise SoftwareError(
                f"the merged model's logits differ by {difference:.1e} of the largest, more than rounding "
                f"explains ({tolerance:.0e}); nothing was written",
                where=str(output),
                fix="serve the adapter on its base instead",
            )
    return difference


def probe(model: PreTrainedModel) -> torch.Tensor:
    """Compute logits (rows, tokens, vocabulary) in fp32 for fixed random ids."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        model.config.get_text_config().vocab_size, (PROBE_ROWS, PROBE_TOKENS), generator=generator
    )
    model.eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids.to(model.device), use_cache=False).logits
    return logits.float().cpu()
