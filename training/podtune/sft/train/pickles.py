"""What a checkpoint's pickles would run when they are loaded; refused before DeepSpeed loads them."""

from __future__ import annotations

from pathlib import Path

from podtune.run.errors import DataError

# What DeepSpeed 0.19 itself writes into a checkpoint of ZeRO-2 and ZeRO-3, beside tensors and plain values.
DEEPSPEEDS_OWN = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}


def refuse_foreign_code(checkpoint: Path) -> None:
    """Look at the files that DeepSpeed loads without ``weights_only``. All others are loaded with it.

    Raises:
        UserError: a file names a function or class that is neither torch's nor DeepSpeed's own; nothing of it
            has run.
    """
    import torch

    for file in sorted(checkpoint.glob("global_step*/*.pt")):
        try:
            named = set(torch.serialization.get_unsafe_globals_in_checkpoint(str(file)))
        except (RuntimeError, ValueError, OSError, EOFError, KeyError) as error:
            raise DataError(f"cannot be examined before it is loaded: {error}", where=str(file)) from None
        if foreign := sorted(named - DEEPSPEEDS_OWN):
            raise DataError(
                f"loading it would call {', '.join(foreign[:3])}, which DeepSpeed does not write",
                where=str(file),
                fix="resume from a checkpoint that you trust; look who may write this folder",
            )
