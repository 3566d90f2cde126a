"""Liger's kernels for norms, rotary positions and SwiGLU, taken where a trial shows that they agree.

One pass over memory each where the model's own code makes several: up to a quarter of a LoRA step on a GPU.
The loss stays podtune's or TRL's. https://github.com/linkedin/Liger-Kernel
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from podtune.run.world import World
from podtune.sft.train.meter import product_precision
from podtune.sft.train.trial import trial_step

KERNELS = ("rope", "rms_norm", "swiglu")  # as Liger's options name them
LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
#: largest relative difference of loss and gradient norm; kernels round less often than the model's own code
TOLERANCE, TOLERANCE_FP32 = 1e-3, 1e-5
_ABSENT = object()


class LigerKernels:
    """Liger's functions in the place of a model's own, in the one instance, and back.

    Bound to instances, they stay where they are when FSDP shards the modules. Positions are a function of the
    model's module, so that they change for every model of its class while the kernels are on.

    Args:
        model: a model that :func:`why_not_known` has no objection to.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []  # where, which name, the model's own

    def on(self) -> None:
        """Put Liger's functions in."""
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        code = vars(sys.modules[_module(self._model)])
        spaces = [code, *(vars(module) for module in self._model.modules())]
        before = [dict(space) for space in spaces]
        wanted = dict.fromkeys(KERNELS, True) | dict.fromkeys(LOSSES, False)
        try:
            _apply_liger_kernel_to_instance(model=self._model, **wanted)
        finally:
            self._replaced = [
                (space, name, own.get(name, _ABSENT))
                for space, own in zip(spaces, before, strict=True)
                for name, value in space.items()
                if own.get(name, _ABSENT) is not value
            ]
        for space, name, own in self._replaced:
            if isinstance(own, type):  # of models that are made later, which nobody has tried
                space[name] = own

    def off(self) -> None:
        """Give the model its own functions back."""
        for space, name, own in self._replaced:
            if own is _ABSENT:
                space.pop(name, None)
            else:
                space[name] = own
        self._replaced = []


def _module(model: Any) -> str:
    """Name of the module with the code of transformers' models of this type."""
    kind = model.config.model_type
    return f"transformers.models.{kind}.modeling_{kind}"


def kernels_can_run(world: World) -> bool:
    """True on a GPU, and on the CPU where Triton interprets its kernels (TRITON_INTERPRET), for tests."""
    return world.device_type == "cuda" or (world.gpu_path and os.environ.get("TRITON_INTERPRET") == "1")


def why_not_known(model: Any) -> str:
    """The reason why Liger has no kernels for ``model``; empty if it has all three."""
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = model.config.model_type
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)
    # code that came with the weights may share the type; FSDP derives a class of its own
    known = apply and any(each.__module__ == _module(model) for each in type(model).__mro__)
    lacking = set(KERNELS) - set(inspect.signature(apply).parameters) if known else KERNELS
    return f"Liger has no {' and no '.join(sorted(lacking))} for models of type {kind}" if lacking else ""


def take_liger_kernels(trainer: Any, batch: dict[str, Any]) -> tuple[LigerKernels | None, str]:
    """Leave Liger's kernels on where ``batch`` gives the same loss and gradient with them. A collective call.

    The batch goes forward and backward twice, on gradients that are thrown away; all ranks decide alike.

    Returns:
        The kernels, None where they are not taken; and the sentence for the log.

    Raises:
        torch.OutOfMemoryError: the batch does not fit.
    """
    model = trainer.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if reason := why_not_known(base):
        return None, f"Liger's kernels: not taken ({reason})"
    own, kernels, reason = _loss_and_norm(trainer, batch), LigerKernels(base), ""
    theirs = torch.full_like(own, torch.nan)
    try:
        kernels.on()
        theirs = _loss_and_norm(trainer, batch)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton may find no compiler, or not know the GPU
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    for sums in (own, theirs):
        if trainer.world.world_size > 1:
            dist.all_reduce(sums)
        sums[1:].sqrt_()
    difference = ((theirs - own).abs() / own.abs()).max().item()
    fp32 = product_precision(trainer.args, model) in ("fp32", "tf32")
    limit = TOLERANCE_FP32 if fp32 else TOLERANCE
    if difference <= limit:  # not so for a NaN
        agreed = f"loss and gradient norm agree to {max(difference, 1e-7):.0e}"
        return kernels, f"Liger's kernels: norm, rope, SwiGLU; {agreed}"
    kernels.off()
    if not reason:
        differs = f"differs by {difference:.0e}, more than {limit:.0e}"
        reason = f"loss or gradient norm {'is not finite' if math.isnan(difference) else differs}"
    return None, f"Liger's kernels: not taken ({reason})"


def _loss_and_norm(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """This rank's loss and the square of its part of the gradients' norm, ``(2,)``."""
    with trial_step(trainer, batch) as loss:
        gradients = [each.grad for each in trainer.model.parameters() if each.grad is not None]
        local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
        norms = torch.stack([torch.linalg.vector_norm(each, dtype=torch.float32) for each in local])
        return torch.stack((loss.float(), norms.square().sum()))
