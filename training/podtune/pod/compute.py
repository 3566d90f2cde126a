"""A test of this pod's GPUs: CUDA opens them, and each computes and reaches its neighbour. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from podtune.run.distributed import why_no_cuda

SIDE, COPIED = 512, 4 * 2**20  # of a matrix, and elements of a copy


@dataclass(frozen=True)
class GpuTest:
    """GPUs that CUDA opens, and the reason where one of them does not work."""

    usable: int
    error: str = ""


def try_gpus() -> GpuTest:
    """Multiply on each GPU and copy from each to the next.

    nvidia-smi answers also where CUDA cannot start: a driver older than torch's CUDA, a board whose fabric
    manager does not run (error 802), a device node without rights.
    """
    import torch

    if not torch.cuda.is_available():
        return GpuTest(0, why_no_cuda())
    count = torch.cuda.device_count()
    devices = [f"cuda:{index}" for index in range(count)]
    errors = [text for device in devices if (text := _computes(device))]
    # card to card: what hangs or garbles on boards whose PCIe isolates devices (ACS, IOMMU)
    pairs = zip(devices, devices[1:] + devices[:1], strict=True) if count > 1 and not errors else ()
    errors += [text for source, target in pairs if (text := _copies(source, target))]
    return GpuTest(count, "; ".join(errors)[:300])


def _computes(device: str) -> str:
    """Fault of a small matrix product on ``device``, empty for none."""
    import torch

    try:
        ones = torch.ones(SIDE, SIDE, device=device)
        right = bool((ones @ ones == SIDE).all())
    except RuntimeError as error:
        return f"{device}: {' '.join(str(error).split())[:200]}"
    return "" if right else f"{device} multiplies wrongly"


def _copies(source: str, target: str) -> str:
    """Fault of a copy from one device to another, empty for none."""
    import torch

    try:
        sent = torch.arange(COPIED, device=source)
        right = bool((sent.to(target).cpu() == sent.cpu()).all())
    except RuntimeError as error:
        return f"{source} to {target}: {' '.join(str(error).split())[:200]}"
    return "" if right else f"what is copied from {source} to {target} arrives changed"
