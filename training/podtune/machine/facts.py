"""This machine's GPUs, CPUs and memory, asked in one way by all. Needs no torch."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from podtune.run.world import World

GIB = 2**30
#: NCCL and data loaders of several processes share memory; a container's own 64 MiB are too little
LEAST_SHM = 512 * 2**20
CORES = "PODTUNE_CORES"  # this pod's share of its node's cores, where pods of its job share the node


def gpu_devices() -> int:
    """Count the NVIDIA GPUs that this machine or container has, by their device files."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def visible_gpus() -> int:
    """Count the GPUs that this process may use, by device files and CUDA_VISIBLE_DEVICES alone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpu_devices()
    return min(gpu_devices(), len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def gpu_reading(device: str) -> dict[str, float]:
    """Metrics of torch's ``device`` as nvidia-smi or amd-smi has them; what it does not tell is absent."""
    torch = sys.modules["torch"]  # a process that has a GPU to read has it loaded
    asked: dict[str, Callable[[], float]] = {
        "gpu_utilisation_percent": lambda: float(torch.cuda.utilization(device)),
        "gpu_memory_gib": lambda: torch.cuda.device_memory_used(device) / GIB,
        "gpu_power_w": lambda: torch.cuda.power_draw(device) / 1000,
    }
    reading = {}
    for name, ask in asked.items():
        with contextlib.suppress(Exception):  # whatever the driver says: a missing metric ends no run
            reading[name] = ask()
    return reading


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
        # what files take of the limit is given back on demand
        cache = int(stat.get("total_inactive_file") or stat["inactive_file"])
        return int(min(free, memory_limit() - taken + cache))
    return int(free)


def shared_memory(folder: Path = Path("/dev/shm")) -> int | None:
    """Size of the memory that processes share, in bytes; None without such a folder."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).total
    return None
