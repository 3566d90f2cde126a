"""Instruments, all off the clock: memory, host-to-device copies, FLOPs, the machine's own counters."""

from __future__ import annotations

import statistics
import threading
import time

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from podtune.bench.strategies.contract import Batch, BuildModel
from podtune.machine.facts import gpu_reading

GIB = 2**30
COPIES = 10


def memory_gib(device: str) -> dict[str, float]:
    """GiB when memory ran out, of a GPU: the allocator's peaks, and the device."""
    if not device.startswith("cuda"):
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        "device_free_gib": free / GIB,
        "device_total_gib": total / GIB,
    }


def synchronise(device: str) -> None:
    """Wait until the device has done everything that was asked of it."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def held_gib(model: nn.Module) -> float:
    """GiB of the model's weights on this rank; of a sharded weight, its shard."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(p.numel() * p.element_size() for p in local) / GIB


def host_to_device_gb_per_s(batch: Batch, device: str) -> float | None:
    """GB/s of copying the pinned batch, the median of ten; None on the CPU, where nothing is copied."""
    if not device.startswith("cuda"):
        return None
    size = batch.inputs.nbytes + batch.targets.nbytes
    seconds = []
    for _ in range(COPIES + 1):
        synchronise(device)
        start = time.perf_counter()
        batch.to(device)
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return size / statistics.median(seconds[1:]) / 1e9  # the first copy sets up what the others use


def flops_per_row(build_model: BuildModel, sequence_length: int) -> int:
    """FLOPs of forward and backward over one row, counted by torch on the meta device.

    These are the model's: what activation checkpointing computes again is not counted, and attention counts
    as the whole square (PaLM, Chowdhery et al. 2022, appendix B), so that utilisation means the same for
    every strategy.
    """
    with torch.device("meta"):
        model = build_model()
        counter = FlopCounterMode(display=False)
        with counter:
            torch.autograd.backward(model(model.example_row(sequence_length)).sum())
    return int(counter.get_total_flops())


class Telemetry:
    """A thread that samples GPU (utilisation, memory, power) and host (CPU, memory) twice a second."""

    PERIOD_S = 0.5

    def __init__(self, device: str) -> None:
        import psutil

        self._process = psutil.Process()
        self._gpu = device if device.startswith("cuda") else ""
        self._samples: list[dict[str, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Telemetry:
        self._process.cpu_percent()  # the first call starts its clock
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:  # once at least, however short the run
            over = self._over.wait(self.PERIOD_S)
            seen = {
                "host_cpu_percent": self._process.cpu_percent(),
                "host_rss_gib": self._process.memory_info().rss / GIB,
            }
            self._samples.append(seen | (gpu_reading(self._gpu) if self._gpu else {}))
            if over:
                return

    def means(self) -> dict[str, float]:
        return {name: statistics.fmean(one[name] for one in self._samples) for name in self._samples[0]}
