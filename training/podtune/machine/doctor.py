"""Checks of this machine: a line for each thing that podtune needs of it, with the fix. Needs no torch.

Packages are left to ``pip check`` and the GPUs' load to ``nvidia-smi``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from podtune.machine import facts
from podtune.machine.building import c_compiler
from podtune.machine.checks import DEADLINE_S, Check, Result
from podtune.machine.facts import TorchBuild, torch_build, usable_cpus
from podtune.run.errors import UserError
from podtune.run.output_volume import check_writable

GIB, MIB = 2**30, 2**20
SMALL_DISK_GIB, NO_DISK_GIB = 20.0, 1.0
SLOW_MB_PER_S = 50.0
WRITE_MIB, WRITE_S = 64, 1.5
TRAIN = "podtune[train]"


def machine_checks(output_dir: Path) -> list[Check]:
    """List the checks of this machine; a run would write to ``output_dir``."""
    offline = "set HF_HUB_OFFLINE=1 and use local paths or a filled HF_HOME; or mend DNS and the proxy"
    hung = "the volume hangs: look at its server and its mount"
    return [
        Check("gpu", gpu, "nvidia-smi hangs too: restart the driver or the node"),
        Check("cpu", cpu),
        Check("memory", memory),
        Check("/dev/shm", shared_memory),
        Check("disk", lambda: disk(output_dir)),
        Check("output", lambda: write_speed(output_dir), hung),
        Check("hub", hub, offline),
        Check("helm", helm),
        Check("kubectl", kubectl),
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
        fix = (
            "NVIDIA_DRIVER_CAPABILITIES must contain compute,utility (the image sets it); or reinstall the "
            "driver"
        )
        reason = seen.error or "no library to ask them"
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


def cpu() -> Result:
    """Cores of the machine, and how many of them this process may use."""
    cores, usable = os.cpu_count() or 1, usable_cpus()
    limited = (
        f"{usable} of {cores} cores usable (affinity, or the CPU limit)"
        if usable < cores
        else f"{cores} cores"
    )
    return Result("cpu", "ok", limited)


def memory() -> Result:
    """Main memory, cut by the cgroup's limit."""
    total = facts.memory()
    if total < 4 * GIB:
        fix = "raise the memory limit: loading torch and a small model takes 2 to 4 GiB"
        return Result("memory", "warn", f"{total / GIB:.1f} GiB", fix)
    return Result("memory", "ok", f"{total / GIB:.0f} GiB")


def shared_memory(path: Path = Path("/dev/shm")) -> Result:
    """Size of what NCCL and data loaders of several processes share."""
    size = facts.shared_memory(path)
    if size is None:
        return Result("/dev/shm", "warn", "absent", "mount a tmpfs there")
    if size < facts.LEAST_SHM:
        fix = "in the chart shm.sizeLimit, in Docker --shm-size=8g"
        return Result("/dev/shm", "warn", f"{size / GIB:.2f} GiB, too little for NCCL and data loaders", fix)
    return Result("/dev/shm", "ok", f"{size / GIB:.1f} GiB")


def disk(output_dir: Path) -> Result:
    """Room for checkpoints."""
    free = shutil.disk_usage(_existing(output_dir)).free / GIB
    fix = "a checkpoint takes three times the weights and more: free some, or name another --output-dir"
    if free < SMALL_DISK_GIB:
        return Result(
            "disk", "fail" if free < NO_DISK_GIB else "warn", f"{free:.1f} GiB free for {output_dir}", fix
        )
    return Result("disk", "ok", f"{free:.0f} GiB free for {output_dir}")


def write_speed(output_dir: Path) -> Result:
    """Writes at most 64 MiB and at most 1.5 s there, flushed to the volume block by block, and removes it."""
    try:
        check_writable(output_dir)
    except UserError as error:
        return Result("output", "fail", f"{output_dir} {error.what}", error.fix)
    block, written, started = os.urandom(4 * MIB), 0, time.monotonic()
    with tempfile.NamedTemporaryFile(dir=_existing(output_dir), prefix=".podtune-doctor-") as file:
        while written < WRITE_MIB * MIB and time.monotonic() - started < WRITE_S:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written += len(block)
    speed = written / 1e6 / (time.monotonic() - started)
    text = f"{speed:,.0f} MB/s written to {output_dir}"
    if speed < SLOW_MB_PER_S:
        # a 3B model: 6 GB of weights in bf16, or 36 GB in fp32 with Adam's two states
        minutes = 36e9 / (speed * 1e6) / 60
        fix = "a faster volume, fewer checkpoints (save_steps), or LoRA, which saves megabytes"
        return Result(
            "output",
            "warn",
            f"{text}: a checkpoint of a 3B model trained in fp32 takes {minutes:.0f} minutes",
            fix,
        )
    return Result("output", "ok", text)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())


def hub() -> Result:
    """Reach the Hugging Face hub, through the proxy that the environment names."""
    import urllib.error
    import urllib.request

    if importlib.util.find_spec("huggingface_hub") is None:
        return Result("hub", "ok", f"not asked: huggingface_hub comes with {TRAIN}")
    from huggingface_hub.constants import ENDPOINT, HF_HOME, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return Result(
            "hub", "ok", f"offline, as HF_HUB_OFFLINE says; models and data come from paths and {HF_HOME}"
        )
    try:
        urllib.request.urlopen(urllib.request.Request(ENDPOINT, method="HEAD"), timeout=3)
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            return Result(
                "hub",
                "warn",
                f"{ENDPOINT} answers {error.code}",
                "try again later, or set HF_HUB_OFFLINE=1",
            )
    except OSError as error:
        fix = (
            f"set HF_HUB_OFFLINE=1 and use local paths or what {HF_HOME} holds; or set HTTPS_PROXY or "
            "HF_ENDPOINT"
        )
        return Result("hub", "warn", f"{ENDPOINT} cannot be reached: {getattr(error, 'reason', error)}", fix)
    return Result("hub", "ok", f"{ENDPOINT} answers")


def helm() -> Result:
    """For ``helm install``; rendering has an engine of its own."""
    if (version := _said("helm", "version", "--template", "{{.Version}}")) is not None:
        return Result("helm", "ok", version)
    if importlib.util.find_spec("helm_python"):
        return Result("helm", "ok", "not on PATH; podtune render, lint, dry-run and submit work without it")
    return Result(
        "helm",
        "warn",
        "not on PATH, nor is helm-python-sdk installed",
        "install helm, or pip install 'podtune[render]'",
    )


def kubectl() -> Result:
    """For looking at pods by hand; podtune's own commands speak to the API themselves."""
    said = _said("kubectl", "version", "--client")
    if said is None:
        return Result("kubectl", "ok", "not on PATH; podtune submit, status and logs work without it")
    return Result("kubectl", "ok", said.splitlines()[0].removeprefix("Client Version: ") if said else "found")


def _said(*words: str) -> str | None:
    """A program's output; None without the program, empty if it fails to answer."""
    if shutil.which(words[0]) is None:
        return None
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def compiler() -> Result:
    """Triton builds a piece of C on every GPU, torch.compile C++ on the CPU."""
    if facts.visible_gpus() and c_compiler() is None:
        fix = "install gcc, or set CC: Triton builds a piece of the loss with it"
        return Result("compiler", "fail", "no C compiler: no run on a GPU would survive its first step", fix)
    if cxx := next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None):
        return Result("compiler", "ok", cxx)
    return Result(
        "compiler",
        "warn",
        "no C++ compiler: torch.compile will not work on the CPU",
        "install g++",
    )


WORKING = """
import json, torch
found = {"version": torch.__version__, "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0}
for index in range(found["gpus"]):
    square = torch.ones(256, 256, device=f"cuda:{index}")
    assert float((square @ square).sum()) == 256**3, f"GPU {index} computes wrongly"
print(json.dumps(found))
"""


def torch_works(timeout_s: float = 120.0) -> Result:
    """Import torch in a process of its own and multiply a matrix on every GPU."""
    if torch_build() is None:
        return Result("torch works", "fail", "torch is not installed", f"pip install '{TRAIN}'")
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", WORKING], capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return Result(
            "torch works", "fail", f"no answer within {timeout_s:.0f} s", "look at the driver (nvidia-smi)"
        )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Result(
            "torch works",
            "fail",
            why,
            "pip check names packages that do not fit; the line on the GPU, a driver",
        )
    torch = json.loads(done.stdout.splitlines()[-1])
    where = f"{torch['gpus']} GPUs compute" if torch["gpus"] else "on the CPU"
    return Result("torch works", "ok", f"{torch['version']}, {where} ({time.monotonic() - started:.1f} s)")
