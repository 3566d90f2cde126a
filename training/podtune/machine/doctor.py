"""Checks of this machine: a line for each thing that podtune needs of it, with the fix. Needs no torch.

Packages are left to ``pip check``, the GPUs' load to ``nvidia-smi``, whether they compute to ``podtune
preflight``, and the Hugging Face hub to whatever asks it: that says within seconds what to do offline.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from podtune.machine import facts
from podtune.machine.building import c_compiler
from podtune.machine.checks import DEADLINE_S, Check, Result
from podtune.machine.facts import GIB, TorchBuild, torch_build
from podtune.run.errors import PeerLost, UserError
from podtune.run.output_volume import check_writable

SMALL_DISK_GIB, NO_DISK_GIB = 20.0, 1.0
TRAIN = "podtune[train]"


def machine_checks(output_dir: Path) -> list[Check]:
    """List the checks of this machine; a run would write to ``output_dir``."""
    hung = "the volume hangs: look at its server and its mount"
    return [
        Check("gpu", gpu, "nvidia-smi hangs too: restart the driver or the node"),
        Check("memory", memory),
        Check("/dev/shm", shared_memory),
        Check("output", lambda: output(output_dir), hung),
        Check("helm", helm),
        Check("compiler", compiler),
    ]


def gpu() -> Result:
    """The GPUs' driver against the build of torch, which ``nvidia-smi`` does not know."""
    seen, build = facts.gpus(DEADLINE_S), torch_build()
    if seen.driver:
        return driver(seen.driver, seen.count, build)
    if seen.error or Path("/dev/nvidiactl").exists():
        if importlib.util.find_spec("pynvml") is None:
            text = f"{seen.devices} NVIDIA devices; the driver is not asked without pynvml"
            return Result("gpu", "ok", f"{text}, which {TRAIN} brings")
        fix = "NVIDIA_DRIVER_CAPABILITIES must contain compute,utility (the image sets it); or reinstall it"
        reason = seen.error or "no library to ask their driver"
        return Result("gpu", "fail", f"there are NVIDIA devices: {reason}", fix)
    if Path("/dev/kfd").exists() and not (build and build.rocm):
        return Result("gpu", "warn", "an AMD GPU, and torch is built without ROCm", "install a ROCm build")
    return Result("gpu", "ok", "no NVIDIA GPU; the demo, the tests and the dry run need none")


def driver(version: str, count: int, build: TorchBuild | None) -> Result:
    """``version`` against what torch's CUDA needs: within a major version every minor one runs."""
    if build and not build.cuda:
        text = f"driver {version} for {count} GPUs, and torch is built without CUDA: it will not use them"
        return Result("gpu", "warn", text, "install torch's CUDA build (requirements.txt has it)")
    if build and (least := facts.too_old(version, build.cuda)):
        text = f"driver {version} is too old for torch {build.version}, built for CUDA {build.cuda}"
        fix = f"update the driver to {least} or newer, or install a torch built for an older CUDA"
        return Result("gpu", "fail", text, fix)
    return Result("gpu", "ok", f"{count} by driver {version}, {build.text() if build else 'no torch'}")


def memory() -> Result:
    """Main memory, cut by the cgroup's limit."""
    total = facts.memory()
    if total < 4 * GIB:
        fix = "raise the memory limit: loading torch and a small model takes 2 to 4 GiB"
        return Result("memory", "warn", f"{total / GIB:.1f} GiB", fix)
    return Result("memory", "ok", f"{total / GIB:.0f} GiB")


def shared_memory() -> Result:
    """Size of what NCCL and data loaders of several processes share."""
    size = facts.shared_memory()
    if size is not None and size >= facts.LEAST_SHM:
        return Result("/dev/shm", "ok", f"{size / GIB:.1f} GiB")
    text = f"{(size or 0) / GIB:.2f} GiB, too little for NCCL and data loaders"
    return Result("/dev/shm", "warn", text, "in the chart shm.sizeLimit, in Docker --shm-size=8g")


def output(output_dir: Path) -> Result:
    """The folder can be written, and has room for checkpoints."""
    try:
        check_writable(output_dir)
    except UserError as error:
        return Result("output", "fail", f"{output_dir} {error.what}", error.fix)
    except PeerLost as error:
        return Result("output", "fail", str(error), "look at the volume's server and its mount")
    folder = output_dir.absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free / GIB
    if free >= SMALL_DISK_GIB:
        return Result("output", "ok", f"{free:.0f} GiB free for {output_dir}")
    fix = "a checkpoint takes three times the weights and more: free some, or name another --output-dir"
    text = f"{free:.1f} GiB free for {output_dir}"
    return Result("output", "fail" if free < NO_DISK_GIB else "warn", text, fix)


def helm() -> Result:
    """What renders the chart: helm, or its engine as a package."""
    if found := shutil.which("helm") or importlib.util.find_spec("helm_python"):
        return Result("helm", "ok", found if isinstance(found, str) else "helm-python-sdk")
    fix = "install helm, or pip install 'podtune[render]'"
    return Result("helm", "warn", "not on PATH, nor is helm-python-sdk installed", fix)


def compiler() -> Result:
    """Triton builds a piece of C on every GPU, torch.compile C++ on the CPU."""
    if facts.visible_gpus() and c_compiler() is None:
        fix = "install gcc, or set CC: Triton builds a piece of the loss with it"
        return Result("compiler", "fail", "no C compiler: no run on a GPU would survive its first step", fix)
    if cxx := next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None):
        return Result("compiler", "ok", cxx)
    return Result("compiler", "warn", "no C++ compiler: torch.compile fails on the CPU", "install g++")
