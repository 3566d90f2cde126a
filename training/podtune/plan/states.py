"""Bytes of a whole model's weights, gradients and optimizer, before anything is divided.

Sources: Rajbhandari et al. 2019 (ZeRO), section 3.1: with K = 12 for Adam in mixed precision, 16 bytes a
parameter; Dettmers et al. 2021 and 2023 for 8-bit moments and QLoRA; Shazeer and Stern 2018 for Adafactor.
"""

from __future__ import annotations

from typing import NamedTuple

from podtune.plan.setup import TrainingSetup
from podtune.plan.shapes import Transformer
from podtune.run.errors import unknown

# Bytes a parameter: weights, gradients, and of the optimizer the fp32 copy of the weights and each of Adam's
# two moments. "mixed" is the ZeRO paper's: 16-bit weights with an fp32 copy. "autocast" is PyTorch's: fp32
# weights, 16-bit products; the same 16 bytes, differently spread. Plain bf16 keeps everything in bf16.
_BYTES: dict[str, tuple[float, float, float, float]] = {
    "fp32": (4, 4, 0, 4),
    "bf16": (2, 2, 0, 2),
    "bf16-mixed": (2, 2, 4, 4),
    **dict.fromkeys(("bf16-autocast", "fp16-autocast", "fp8-autocast"), (4.0, 4.0, 0.0, 4.0)),
    "fp16-mixed": (2, 2, 4, 4),
    "fp8-mixed": (2, 2, 4, 4),
}
PRECISIONS = tuple(_BYTES)
# How many moments, and their bytes where these are not the precision's. 8-bit ones come with a 4-byte scale
# for each block of 256; Adafactor keeps rows' and columns' sums.
_MOMENTS: dict[str, tuple[int, float | None]] = {
    "adamw": (2, None),
    "adamw-8bit": (2, 1 + 4 / 256),
    "adafactor": (0, None),
    "sgd": (1, None),
}
OPTIMIZERS = tuple(_MOMENTS)
# QLoRA: four bits a weight of the linear maps and a 4-byte scale for each 64 of them.
_QUANTIZED = 0.5 + 4 / 64


class States(NamedTuple):
    """Bytes of weights, gradients and optimizer state."""

    weights: float
    gradients: float
    optimizer: float


def state_bytes(precision: str, optimizer: str = "adamw") -> States:
    """Bytes a trained parameter; mixed precision's fp32 copy of the weights counts to the optimizer.

    Raises:
        UserError: unknown precision or optimizer.
    """
    for flag, name, known in (("--precision", precision, _BYTES), ("--optimizer", optimizer, _MOMENTS)):
        if name not in known:
            raise unknown(flag[2:], name, known, where=flag)
    weights, gradients, copy, moment = _BYTES[precision]
    count, width = _MOMENTS[optimizer]
    return States(weights, gradients, copy + count * (moment if width is None else width))


def whole_states(setup: TrainingSetup) -> States:
    """Bytes of all weights, of their gradients and of the optimizer's states, before anything is divided."""
    shape, optimizer = setup.shape, setup.optimizer
    each = state_bytes(setup.precision, optimizer)
    moments, width = _MOMENTS[optimizer]
    if setup.lora_r is not None:
        # adapters of 16-bit weights are kept in 32 bits (PEFT), those of quantised ones in 16 (TRL)
        adapter_width = 2.0 if setup.quantized else 4.0
        frozen = shape.parameters * each.weights
        if setup.quantized:
            frozen -= shape.divisible * (each.weights - _QUANTIZED)
        adapters = setup.trained * adapter_width
        return States(frozen + adapters, adapters, setup.trained * (width or adapter_width) * moments)
    states = shape.parameters * each.optimizer
    if isinstance(shape, Transformer):
        if optimizer == "adamw-8bit":  # bitsandbytes keeps an embedding's moments in 32 bits
            states += shape.vocabulary * shape.hidden * 2 * (4 - (width or 0))
        if optimizer == "adafactor":
            states += 4.0 * (shape.lora_parameters(1) + shape.vocabulary + shape.hidden)
    return States(shape.parameters * each.weights, shape.parameters * each.gradients, states)
