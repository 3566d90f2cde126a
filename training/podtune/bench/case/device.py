"""Limits of this machine's device, checked before the model is built."""

from __future__ import annotations

import torch

from podtune.bench.options import Options
from podtune.run.errors import Unavailable
from podtune.run.world import World


def refuse_what_the_device_lacks(options: Options, world: World) -> None:
    """Check choices that depend on the device, and set threads and arithmetic alike for every strategy.

    Raises:
        UserError: fp8 without Ada, Hopper or newer; overlap without a GPU.
    """
    cuda = world.device_type == "cuda"
    if options.precision == "fp8" and not (cuda and torch.cuda.get_device_capability() >= (8, 9)):
        device = torch.cuda.get_device_name() if cuda else "the CPU"
        raise Unavailable(
            f"{device} does not multiply in fp8",
            where="--precision",
            fix="use bf16; fp8 needs an L40S, H100 or newer",
        )
    if options.overlap and not cuda:
        raise Unavailable("on the CPU nothing overlaps", where="--overlap", fix="leave it out")
    if not cuda:
        torch.set_num_threads(options.threads)
    # fp32 means fp32: TF32 would be another precision under the same name.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True  # every step has the same shapes: try each convolution's algorithms
