"""Compilers that libraries call while a program runs. Needs no torch."""

from __future__ import annotations

import importlib
import os
import shutil
from types import ModuleType


def c_compiler() -> str | None:
    """The C compiler that Triton takes (CC, gcc, clang), which every run on a GPU needs; None without."""
    named = os.environ.get("CC")
    return shutil.which(named.split()[0]) if named else shutil.which("gcc") or shutil.which("clang")


def deepspeed_that_builds_nothing() -> ModuleType:
    """The package deepspeed, which then compiles nothing on the CPU.

    It would build an all-reduce for inference through shared memory, which training never calls: a minute of
    a C++ compiler, and a lock for which every later start waits for ever if the build is killed.

    Raises:
        ImportError: it is not installed, or cannot be imported.
    """
    import deepspeed

    # by its name: the attribute of deepspeed.comm is torch itself
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    module: ModuleType = deepspeed
    return module
