"""This machine's GPUs and driver, torch's build, CPUs and memory, asked in one way by all. Needs no torch."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podtune.run.world import World

GIB = 2**30
#: smallest driver for a CUDA version (NVIDIA's CUDA Toolkit release notes, minor version compatibility)
DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
#: NCCL and data loaders of several processes share memory; a container's own 64 MiB are too little
LEAST_SHM = 512 * 2**20
CORES = "PODTUNE_CORES"  # this pod's share of its node's cores, where pods of its job share the node
NVML_S = 20.0  # a call into a dead driver never comes back


@dataclass(frozen=True)
class Gpus:
    """NVIDIA GPUs by NVML. ``error`` if that does not answer, though there are ``devices``."""

    devices: int = 0  # of this container, by /dev
    names: tuple[str, ...] = ()
    driver: str = ""
    error: str = ""

    @property
    def count(self) -> int:
        """GPUs that work; where NVML is not installed, the devices that are there."""
        return len(self.names) if self.driver or self.error else self.devices


def gpus(timeout_s: float = NVML_S) -> Gpus:
    """Ask NVML for this machine's GPUs. A driver that does not answer within ``timeout_s`` is an error."""
    answer: list[Gpus] = []
    thread = threading.Thread(target=lambda: answer.append(_ask_nvml()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    silent = f"the driver does not answer within {timeout_s:g} s"
    return answer[0] if answer else Gpus(_devices(), error=silent)


def _devices() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _ask_nvml() -> Gpus:
    devices = _devices()
    try:
        import pynvml
    except ImportError:  # the extra train brings it
        return Gpus(devices)
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        names = tuple(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
        return Gpus(devices, names, str(pynvml.nvmlSystemGetDriverVersion()))
    except pynvml.NVMLError as error:
        # without its library nothing but the devices can be told: some nodes bring the driver alone
        silent = isinstance(error, pynvml.NVMLError_LibraryNotFound) or not devices
        return Gpus(devices, error="" if silent else f"NVML does not answer: {error}")


def visible_gpus() -> int:
    """Count the GPUs that this process may use, by device files and CUDA_VISIBLE_DEVICES alone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return _devices()
    return min(_devices(), len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def too_old(driver: str, cuda: str) -> str:
    """The least driver for torch's ``cuda`` if ``driver`` is older; else an empty string."""
    least = DRIVERS.get(int(cuda.partition(".")[0])) if cuda else None
    version = tuple(int(part) for part in driver.split(".")[:2] if part.isdigit())
    return ".".join(map(str, least)) if least and version and version < least else ""


def nvml_handle(uuid: str) -> Any:
    """NVML's handle of the GPU that torch names by ``uuid``; None without an answer (MIG, containers)."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        pynvml.nvmlDeviceGetUtilizationRates(handle)
    except pynvml.NVMLError:
        return None
    return handle


def nvml_reading(handle: Any) -> dict[str, float]:
    """NVML's metrics of a GPU now; one that it does not tell is absent."""
    import pynvml

    asked: dict[str, Callable[[], float]] = {
        "gpu_utilisation_percent": lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        "gpu_memory_gib": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB,
        "gpu_power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    }
    reading = {}
    for name, ask in asked.items():
        with contextlib.suppress(pynvml.NVMLError):  # a missing metric is no reason to end a run
            reading[name] = ask()
    return reading


@dataclass(frozen=True)
class TorchBuild:
    """torch's version, and the CUDA or ROCm version that it was built for (empty: none)."""

    version: str
    cuda: str
    rocm: str

    def text(self) -> str:
        """For people: ``torch 2.13.0 for CUDA 13.0``."""
        target = f"CUDA {self.cuda}" if self.cuda else f"ROCm {self.rocm}" if self.rocm else "the CPU"
        return f"torch {self.version} for {target}"


def torch_build() -> TorchBuild | None:
    """Read ``torch/version.py`` (a millisecond; importing torch takes seconds). None if not installed."""
    try:
        distribution = importlib.metadata.distribution("torch")
        text = Path(str(distribution.locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None
    values = dict(re.findall(r"^(\w+)\b[^=\n]*=\s*'([^']*)'", text, re.MULTILINE))
    version = values.get("__version__", distribution.version)
    return TorchBuild(version, values.get("cuda", ""), values.get("hip", ""))


def host_info() -> dict[str, str | int | float | None]:
    """The record's ``provenance.hardware``: CPU, and the GPUs of a torch that is loaded already."""
    cpu: dict[str, str | int | float | None] = {"cpu": _cpu_model(), "cpu_count": usable_cpus()}
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return cpu
    first = torch.cuda.get_device_properties(0)
    gpu = {"gpu": first.name, "gpu_count": torch.cuda.device_count()}
    return cpu | gpu | {"gpu_memory_gib": round(first.total_memory / GIB, 1), "cuda": torch.version.cuda}


def _cpu_model() -> str:
    import platform

    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cgroup(*names: str) -> str:
    """The first of these files of this process's cgroup that can be read: version 2's, version 1's."""
    for name in names:
        with contextlib.suppress(OSError):
            return Path("/sys/fs/cgroup", name).read_text().strip()
    return ""


def usable_cpus() -> int:
    """Cores that this process may use: its affinity, cut by the cgroup's CPU limit and by CORES."""
    limit = cores = machine_cores()
    with contextlib.suppress(ValueError):  # "max", -1 or nothing: no limit
        quota = _cgroup("cpu.max", "cpu/cpu.cfs_quota_us"), _cgroup("cpu/cpu.cfs_period_us")
        used, period = map(int, " ".join(quota).split())
        limit = used // period if used > 0 else cores
    return max(1, min(cores, limit, int(os.environ.get(CORES) or cores)))


def machine_cores() -> int:
    """Cores that this process may be put on, whatever limit there is on their time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_threads(world: World, env: Mapping[str, str] = os.environ) -> int:
    """This process's share of the pod's CPUs, at least 1; the user's OMP_NUM_THREADS where that is set.

    Where pods share a node (CORES) the share bounds that, too: the chart's is of a limit that not all of them
    can have at once.

    More threads than cores wait for each other and can halve the speed. torchrun sets OMP_NUM_THREADS to 1 by
    itself when it starts several processes, which nobody chose: that is not taken for the user's word.
    """
    chosen, share = env.get("OMP_NUM_THREADS", ""), max(1, usable_cpus() // world.local_world_size)
    if chosen.isdigit() and int(chosen) > 0 and not (chosen == "1" and world.local_world_size > 1):
        return min(int(chosen), share) if CORES in env else int(chosen)
    return share


def memory_limit() -> float:
    """The cgroup's memory limit in bytes; infinity without one."""
    text = _cgroup("memory.max", "memory/memory.limit_in_bytes")
    return float(text) if text.isdigit() else math.inf


def memory() -> int:
    """Main memory in bytes, cut by the cgroup's limit."""
    import psutil

    return int(min(psutil.virtual_memory().total, memory_limit()))


def free_memory() -> int:
    """Main memory in bytes that is free: the machine's, cut by what the cgroup's limit leaves."""
    import psutil

    free = psutil.virtual_memory().available
    with contextlib.suppress(ValueError):  # no cgroup
        taken = int(_cgroup("memory.current", "memory/memory.usage_in_bytes"))
        stat = dict(line.split() for line in _cgroup("memory.stat", "memory/memory.stat").splitlines())
        cache = int(stat.get("total_inactive_file") or stat["inactive_file"])
        return int(min(free, memory_limit() - taken + cache))
    return int(free)


def shared_memory(folder: Path = Path("/dev/shm")) -> int | None:
    """Size of the memory that processes share, in bytes; None without such a folder."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).total
    return None
