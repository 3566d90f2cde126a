"""Checks of this machine: a line for each thing that podtune needs of it, with the fix. Needs no torch.

Packages are left to ``pip check``, the GPUs' load to ``nvidia-smi``, their driver to torch, whether they
compute to ``podtune preflight``, and the Hugging Face hub to whatever asks it: that says within seconds what
to do offline.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from podtune.machine import facts
from podtune.machine.building import c_compiler
from podtune.machine.checks import Check, Result
from podtune.machine.facts import GIB
from podtune.run.errors import PeerLost, UserError
from podtune.run.output_volume import check_writable

SMALL_DISK_GIB, NO_DISK_GIB = 20.0, 1.0
TRAIN = "podtune[train]"
GPU_S = 60.0  # importing torch takes seconds
HUNG_DRIVER = "nvidia-smi hangs too: restart the driver or the node"
PROBE = """
import torch
from podtune.run.distributed import why_no_cuda
usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(usable, torch.__version__ if usable else why_no_cuda())
"""


def machine_checks(output_dir: Path) -> list[Check]:
    """List the checks of this machine; a run would write to ``output_dir``."""
    hung = "the volume hangs: look at its server and its mount"
    return [
        Check("gpu", gpu, HUNG_DRIVER, GPU_S + 5),
        Check("/dev/shm", shared_memory),
        Check("output", lambda: output(output_dir), hung),
        Check("compiler", compiler),
    ]


def gpu() -> Result:
    """The GPUs that torch can use, or its reason, from a process that may hang in a dead driver."""
    # the device of AMD's driver
    if not (facts.visible_gpus() or Path("/dev/kfd").exists()):
        return Result("gpu", "ok", "no GPU; the demo, the tests and the dry run need none")
    if importlib.util.find_spec("torch") is None:
        return Result("gpu", "ok", f"there are GPUs; they are not tried without torch, which {TRAIN} brings")
    words = [sys.executable, "-c", PROBE]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=GPU_S)
    except subprocess.TimeoutExpired:
        return Result("gpu", "fail", f"torch does not open them within {GPU_S:.0f} s", HUNG_DRIVER)
    usable, _, said = (done.stdout or f"0 {done.stderr}").strip().partition(" ")
    if usable == "0":
        fix = "update the driver or install a torch built for it; in a container NVIDIA_DRIVER_CAPABILITIES "
        fix += "must contain compute,utility (the image sets it)"
        return Result("gpu", "fail", f"there are GPUs, and torch can use none: {said[-300:]}", fix)
    return Result("gpu", "ok", f"{usable}, torch {said}")


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


def compiler() -> Result:
    """Triton builds a piece of C on every GPU, torch.compile C++ on the CPU."""
    if facts.visible_gpus() and c_compiler() is None:
        fix = "install gcc, or set CC: Triton builds a piece of the loss with it"
        return Result("compiler", "fail", "no C compiler: no run on a GPU would survive its first step", fix)
    if cxx := next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None):
        return Result("compiler", "ok", cxx)
    return Result("compiler", "warn", "no C++ compiler: torch.compile fails on the CPU", "install g++")
