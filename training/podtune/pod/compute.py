"""A test of this pod's GPUs: CUDA opens them, and each computes and reaches its neighbour. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator

from podtune.run.distributed import why_no_cuda

SIDE, COPIED = 512, 4 * 2**20  # of a matrix, and elements of a copy


def try_gpus() -> tuple[int, str, str]:
    """Multiply on each GPU and copy from each to the next; how many CUDA opens, their name, what is wrong.

    nvidia-smi answers also where CUDA cannot start: a driver older than torch's CUDA, a board whose fabric
    manager does not run (error 802), a device node without rights.
    """
    import torch

    if not torch.cuda.is_available():
        return 0, "", why_no_cuda()
    count = torch.cuda.device_count()
    wrong = "; ".join(faults([f"cuda:{index}" for index in range(count)]))[:300]
    return count, torch.cuda.get_device_name(0), wrong


def faults(devices: list[str]) -> Iterator[str]:
    """Yield what is wrong with ``devices``."""
    import torch

    for device, following in zip(devices, devices[1:] + devices[:1], strict=True):
        try:
            ones = torch.ones(SIDE, SIDE, device=device)
            if not bool((ones @ ones == SIDE).all()):
                yield f"{device} multiplies wrongly"
            # card to card: what hangs or garbles on boards whose PCIe isolates devices (ACS, IOMMU)
            sent = torch.arange(COPIED, device=device)
            if not bool((sent.to(following).cpu() == sent.cpu()).all()):
                yield f"what is copied from {device} to {following} arrives changed"
        except RuntimeError as error:
            yield f"{device}: {' '.join(str(error).split())[:200]}"
