"""What the machines can do at best: memory, peak FLOP/s, memory bandwidth and links. Needs no torch.

Peaks are **dense** (datasheets print twice as much "with sparsity") at the boost clock, for the form factor
named in the row. ``memory_gib`` is what the driver offers to one process, as CUDA's out-of-memory messages
print it, which is less than the name of the card says: 48 GB of an L40S with ECC are 44.4 GiB.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from podtune.run.errors import UsageError, near

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8")


@dataclass(frozen=True)
class Hardware:
    """One GPU.

    Args:
        name: the row's name.
        memory_gib: memory that a process can use.
        flops: dense peak in FLOP/s by precision; a precision that the device lacks is absent. ``fp32`` is
            true fp32 (PyTorch's default), ``tf32`` what ``torch.set_float32_matmul_precision("high")`` uses.
        memory_bandwidth: bytes/s.
        link: the row of :data:`LINKS` that joins devices of one machine.
        source: where the figures are from.
    """

    name: str
    memory_gib: float
    flops: dict[str, float] = field(hash=False)
    memory_bandwidth: float
    link: str
    source: str

    def peak(self, precision: str) -> float | None:
        """Peak FLOP/s for matrix products in ``precision``; ``bf16-mixed`` and ``bf16-autocast`` are bf16's.
        None if the device lacks it.
        """
        return self.flops.get(precision.removesuffix("-mixed").removesuffix("-autocast"))


@dataclass(frozen=True)
class Link:
    """A connection between two ranks.

    Args:
        bandwidth: bytes/s in one direction at one device, as the standard or datasheet says.
        efficiency: the share of it that nccl-tests shows as bus bandwidth for large messages.
        latency_s: of one message.
    """

    name: str
    bandwidth: float
    efficiency: float
    latency_s: float
    source: str

    @property
    def bus_bandwidth(self) -> float:
        """Bytes/s to reckon with."""
        return self.bandwidth * self.efficiency


def _tera(**flops: float) -> dict[str, float]:
    return {precision: value * 1e12 for precision, value in flops.items()}


_H100_SXM = _tera(fp32=66.9, tf32=494.7, fp16=989.4, bf16=989.4, fp8=1978.9)
ROWS: dict[str, Hardware] = {
    row.name: row
    for row in (
        Hardware(
            "A10",
            22.0,
            _tera(fp32=31.2, tf32=62.5, fp16=125, bf16=125),
            600e9,
            "pcie4",
            "NVIDIA A10 datasheet, 2022",
        ),
        Hardware(
            "L40S",
            44.4,
            _tera(fp32=91.6, tf32=183, fp16=362, bf16=362, fp8=733),
            864e9,
            "pcie4",
            "NVIDIA L40S datasheet, 2023",
        ),
        Hardware(
            "A100-40",
            39.4,
            _tera(fp32=19.5, tf32=156, fp16=312, bf16=312),
            1555e9,
            "nvlink3",
            "NVIDIA A100 datasheet, 2021 (SXM 40GB)",
        ),
        Hardware(
            "A100-80",
            79.1,
            _tera(fp32=19.5, tf32=156, fp16=312, bf16=312),
            2039e9,
            "nvlink3",
            "NVIDIA A100 datasheet, 2021 (SXM 80GB)",
        ),
        Hardware(
            "H100",
            79.1,
            _H100_SXM,
            3350e9,
            "nvlink4",
            "NVIDIA H100 datasheet and architecture whitepaper, 2023 (SXM5)",
        ),
        Hardware(
            "H100-PCIe",
            79.1,
            _tera(fp32=51.2, tf32=378, fp16=756, bf16=756, fp8=1513),
            2000e9,
            "pcie5",
            "NVIDIA H100 PCIe product brief, 2022",
        ),
        Hardware(
            "H100-NVL",
            93.1,
            _tera(fp32=60, tf32=417.5, fp16=835.5, bf16=835.5, fp8=1670.5),
            3900e9,
            "pcie5",
            "NVIDIA H100 datasheet, 2024 (NVL)",
        ),
        Hardware("T4", 14.6, _tera(fp32=8.1, fp16=65), 320e9, "pcie3", "NVIDIA T4 datasheet, 2019"),
        Hardware(
            "A10G",
            22.0,
            _tera(fp32=31.5, tf32=35, fp16=70, bf16=70),
            600e9,
            "pcie4",
            "NVIDIA A10G data sheet for AWS G5, 2022: of an A10's 125 in bf16 it has 70",
        ),
        Hardware(
            "L4",
            22.0,
            _tera(fp32=30.3, tf32=60, fp16=121, bf16=121, fp8=242.5),
            300e9,
            "pcie4",
            "NVIDIA L4 datasheet, 2023 (its 242 in bf16 and 485 in fp8 are with sparsity)",
        ),
        Hardware(
            "RTX-6000-Ada",
            47.5,
            _tera(fp32=91.1, tf32=182.1, fp16=364.2, bf16=364.2, fp8=728.5),
            960e9,
            "pcie4",
            "NVIDIA Ada architecture whitepaper, 2022 (RTX 6000 Ada)",
        ),
        Hardware(
            "RTX-PRO-6000",
            94.9,
            _tera(fp32=126, tf32=251.9, fp16=503.8, bf16=503.8, fp8=1007.6),
            1792e9,
            "pcie5",
            "NVIDIA RTX Blackwell PRO architecture whitepaper, 2025 (Workstation Edition)",
        ),
        Hardware(
            "RTX-PRO-6000-Server",
            94.9,
            _tera(fp32=120, tf32=240, fp16=480, bf16=480, fp8=960),
            1597e9,
            "pcie5",
            "NVIDIA RTX PRO 6000 Server Edition datasheet, 2025: 120 in fp32; tensor cores have 4 times "
            "that in bf16, as in the Workstation Edition",
        ),
        Hardware(
            "GH200",
            94.5,
            _H100_SXM,
            4000e9,
            "nvlink4",
            "NVIDIA GH200 datasheet, 2023 (96 GB HBM3; the peaks of an H100 SXM)",
        ),
        Hardware(
            "B200",
            178.4,
            _tera(fp32=75, tf32=1100, fp16=2250, bf16=2250, fp8=4500),
            7700e9,
            "nvlink5",
            "NVIDIA Blackwell datasheet, 2025 (HGX B200: 2200 in tf32 and 4500 in bf16 with sparsity)",
        ),
        Hardware(
            "GB200",
            184.0,
            _tera(fp32=80, tf32=1250, fp16=2500, bf16=2500, fp8=5000),
            8000e9,
            "nvlink5",
            "NVIDIA Blackwell datasheet, 2025 (GB200: 2500 in tf32 and 5000 in bf16 with sparsity)",
        ),
        Hardware(
            "H200-NVL",
            139.8,
            _tera(fp32=60, tf32=417.5, fp16=835.5, bf16=835.5, fp8=1670.5),
            4800e9,
            "pcie5",
            "NVIDIA H200 datasheet, 2024 (NVL: 1671 in bf16 and 3341 in fp8 with sparsity)",
        ),
        Hardware("H200", 139.8, _H100_SXM, 4800e9, "nvlink4", "NVIDIA H200 datasheet, 2024 (SXM)"),
        Hardware(
            "MI300X",
            191.7,
            _tera(fp32=163.4, tf32=653.7, fp16=1307.4, bf16=1307.4, fp8=2614.9),
            5300e9,
            "infinity-fabric",
            "AMD Instinct MI300X data sheet, 2023",
        ),
    )
}

# Efficiencies: NVIDIA/nccl-tests doc/PERFORMANCE.md explains bus bandwidth; the shares are round figures for
# what its all_reduce_perf shows on such machines at 256 MiB and above.
LINKS: dict[str, Link] = {
    row.name: row
    for row in (
        Link("pcie3", 15.75e9, 0.75, 10e-6, "PCI Express 3.0, 16 lanes of 8 GT/s, 128b/130b"),
        Link("pcie4", 31.5e9, 0.75, 10e-6, "PCI Express 4.0, 16 lanes of 16 GT/s, 128b/130b"),
        Link("pcie5", 63.0e9, 0.75, 10e-6, "PCI Express 5.0, 16 lanes of 32 GT/s, 128b/130b"),
        Link("nvlink2", 150e9, 0.8, 5e-6, "NVIDIA V100 datasheet: 300 GB/s both directions"),
        Link("nvlink3", 300e9, 0.8, 5e-6, "NVIDIA A100 datasheet: 600 GB/s both directions"),
        Link("nvlink4", 450e9, 0.8, 5e-6, "NVIDIA H100 datasheet: 900 GB/s both directions"),
        Link("nvlink5", 900e9, 0.8, 5e-6, "NVIDIA HGX B200 datasheet: 1800 GB/s both directions"),
        Link(
            "infinity-fabric",
            448e9,
            0.7,
            8e-6,
            "AMD MI300X data sheet: 7 links of 128 GB/s both directions",
        ),
        Link("ethernet-25g", 3.125e9, 0.9, 30e-6, "IEEE 802.3by, one port a machine"),
        Link("ethernet-100g", 12.5e9, 0.9, 25e-6, "IEEE 802.3bj, one port a machine"),
        Link("ethernet-400g", 50e9, 0.9, 20e-6, "IEEE 802.3bs, one port a machine"),
        Link("ib-100g", 12.5e9, 0.92, 5e-6, "InfiniBand EDR, one port a machine"),
        Link("ib-400g", 50e9, 0.92, 5e-6, "InfiniBand NDR, one port a machine"),
        Link(
            "ib-400g-per-gpu",
            400e9,
            0.92,
            5e-6,
            "InfiniBand NDR, eight ports a machine (DGX H100 user guide)",
        ),
        Link("gloo", 1e9, 1.0, 100e-6, "gloo over loopback on two cores, measured to within a factor of two"),
    )
}
_ALIASES = {
    "25g": "ethernet-25g",
    "100g": "ethernet-100g",
    "400g": "ib-400g",
    "pcie": "pcie4",
    "nvlink": "nvlink4",
}


def hardware_row(name: str) -> Hardware:
    """The row called ``name``, in any case, or as ``torch.cuda.get_device_name`` gives it.

    Raises:
        UserError: no such row; names the nearest.
    """
    for row in ROWS.values():
        if row.name.lower() == name.lower():
            return row
    if (gpu := _match(name)) is not None:
        return ROWS[gpu]
    raise UsageError(
        f"unknown hardware '{name}'{near(name.upper(), tuple(ROWS))}",
        where="--hardware",
        fix=f"one of {', '.join(ROWS)}",
    )


def link_row(name: str) -> Link:
    """The link called ``name``; ``25g``, ``100g``, ``400g``, ``pcie`` and ``nvlink`` are short for the usual
    ones.

    Raises:
        UserError: no such link; names the nearest.
    """
    key = _ALIASES.get(name.lower(), name.lower())
    if key not in LINKS:
        raise UsageError(
            f"unknown interconnect '{name}'{near(key, tuple(LINKS))}",
            where="--interconnect",
            fix=f"one of {', '.join(LINKS)}",
        )
    return LINKS[key]


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak FLOP/s of the device that ``torch.cuda.get_device_name`` calls ``device_name``.

    None for a device or precision without a row (a MIG slice too: its share of the peak is not the card's),
    so that no utilisation is ever reckoned against a guess.
    """
    gpu = _match(device_name)
    return ROWS[gpu].peak(precision) if gpu else None


# Words that a device's name must have for the row; the first that fits counts.
_NAMES = (
    ("H100-PCIe", {"H100", "PCIE"}),
    ("H100-NVL", {"H100", "NVL"}),
    ("H100", {"H100"}),
    ("H200-NVL", {"H200", "NVL"}),
    ("A100-80", {"A100", "80GB"}),
    ("A100-40", {"A100", "40GB"}),
    ("A100-40", {"A100", "SXM4"}),
    ("RTX-6000-Ada", {"RTX", "6000", "ADA"}),
    ("RTX-PRO-6000-Server", {"RTX", "PRO", "6000", "SERVER"}),
    ("RTX-PRO-6000", {"RTX", "PRO", "6000", "WORKSTATION"}),
    *((name, {name}) for name in ("H200", "GH200", "B200", "GB200", "MI300X")),
    *((name, {name}) for name in ("L40S", "L4", "A10", "A10G", "T4")),
)


def _match(device_name: str) -> str | None:
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if "MIG" in words or {"MAX", "Q"} <= words:  # a slice, or a card held to less power: other peaks
        return None
    return next((name for name, needed in _NAMES if needed <= words), None)
