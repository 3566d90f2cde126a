"""GPUs and links at their best: memory, peak FLOP/s, bandwidths. Needs no torch.

``hardware.csv`` and ``links.csv`` have the figures with their sources. Peaks are **dense** (datasheets print
twice as much "with sparsity") at the boost clock, for the form factor named in the row. ``memory_gib`` is
what the driver offers to one process, as CUDA's out-of-memory messages print it: 44.4 GiB of an L40S of
48 GB with ECC. A link's efficiency is a round figure for what nccl-tests' all_reduce_perf shows at 256 MiB
and above (doc/PERFORMANCE.md explains bus bandwidth).
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field
from pathlib import Path

from podtune.run.errors import unknown

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")


@dataclass(frozen=True)
class Hardware:
    """One GPU.

    Args:
        memory_gib: memory that a process can use.
        flops: dense peak in FLOP/s by precision; a precision that the device lacks is absent. ``fp32`` is
            true fp32 (PyTorch's default), ``tf32`` what ``torch.set_float32_matmul_precision("high")`` uses.
        memory_bandwidth: bytes/s.
        link: the row of :data:`LINKS` that joins devices of one machine.
        device_words: sets of words, one of which a device's name contains.
    """

    name: str
    memory_gib: float
    flops: dict[str, float] = field(hash=False)
    memory_bandwidth: float
    link: str
    source: str
    device_words: tuple[frozenset[str], ...]

    def peak(self, precision: str) -> float | None:
        """Peak FLOP/s of products in ``precision``, where ``bf16-mixed`` and ``-autocast`` are bf16's."""
        return self.flops.get(precision.removesuffix("-mixed").removesuffix("-autocast"))


@dataclass(frozen=True)
class Link:
    """A connection between two ranks: bytes/s in one direction to compute with, and a message's latency."""

    bus_bandwidth: float
    latency_s: float


def _table(name: str) -> list[dict[str, str]]:
    with Path(__file__).with_name(name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


ROWS = {
    row["name"]: Hardware(
        name=row["name"],
        memory_gib=float(row["memory_gib"]),
        flops={name: float(tera) * 1e12 for name in PRECISIONS if (tera := row[f"{name}_tflops"])},
        memory_bandwidth=float(row["memory_gb_per_s"]) * 1e9,
        link=row["link"],
        source=row["source"],
        device_words=tuple(frozenset(words.split()) for words in row["device_words"].split("|")),
    )
    for row in _table("hardware.csv")
}
LINKS = {
    row["name"]: Link(float(row["gb_per_s"]) * 1e9 * float(row["efficiency"]), float(row["latency_us"]) / 1e6)
    for row in _table("links.csv")
}


def hardware_row(name: str) -> Hardware:
    """The row called ``name``, in any case, or as ``torch.cuda.get_device_name`` gives it.

    Raises:
        UserError: no such row; names the nearest.
    """
    named = (row for row in ROWS.values() if row.name.lower() == name.lower())
    if (row := next(named, None) or of_device(name)) is not None:
        return row
    raise unknown("hardware", name.upper(), ROWS, where="--hardware")


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak FLOP/s of the device that ``torch.cuda.get_device_name`` calls ``device_name``.

    None for a device or precision without a row (a MIG slice too: its share of the peak is not the card's),
    so that no utilisation is ever computed against a guess.
    """
    row = of_device(device_name)
    return row.peak(precision) if row else None


def of_device(device_name: str) -> Hardware | None:
    """The row of the device that ``torch.cuda.get_device_name`` calls ``device_name``, if there is one."""
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if "MIG" in words or {"MAX", "Q"} <= words:  # a slice, or a card held to less power: other peaks
        return None
    # the first that fits counts, so that a row with more words stands above: H100-PCIe above H100
    rows = (row for row in ROWS.values() if any(needed <= words for needed in row.device_words))
    return next(rows, None)
