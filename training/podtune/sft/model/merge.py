"""Merge a LoRA adapter into its base model: one folder that serves without PEFT."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from podtune.run.errors import DataError, UsageError
from podtune.sft.data.tokenizer import load_tokenizer
from podtune.sft.model.build import new_folder
from podtune.sft.model.load import load_model
from podtune.sft.source.model import locate_model


def merge_adapter(adapter: str | os.PathLike[str], output: Path, *, trust_remote_code: bool = False) -> None:
    """Write base and adapter as one model with its tokenizer to ``output``. Raises :class:`UserError`."""
    origin = locate_model(adapter)
    if not origin.is_adapter:
        raise UsageError(
            "is not an adapter: there is no adapter_config.json in it",
            where=origin.name,
            fix="give the folder of a LoRA run, RUN_DIR/final",
        )
    tokenizer = load_tokenizer(origin, trust_remote_code=trust_remote_code)
    model = load_model(origin, trust_remote_code=trust_remote_code)
    with new_folder(output) as part:
        try:
            # a safe merge refuses weights that are not finite
            merged = model.merge_and_unload(safe_merge=True)
        except ValueError as error:
            raise DataError(f"cannot be merged: {error}", where=origin.name) from None
        # this imports deepspeed where it is installed, which prints
        with contextlib.redirect_stdout(sys.stderr):
            merged.save_pretrained(part)
        tokenizer.save_pretrained(part)
