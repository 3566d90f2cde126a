"""Where a run came from: code, versions, image, hardware, pod. Needs no torch (it asks only if torch is
loaded).
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import podtune
from podtune.machine.facts import cpu_model, usable_cpus

PACKAGES = ("podtune", "torch", "transformers", "trl", "accelerate", "datasets", "peft", "deepspeed", "aim")
COMMIT_FILE = Path(__file__).resolve().parents[1] / "commit.txt"  # only in a wheel: hatch_build.py writes it


def version_line() -> str:
    """``podtune 0.1.0 (b0ee28b, Python 3.11.7, torch 2.13.0)``; what is unknown or absent is left out."""
    installed = versions()
    sha, _, dirty = (git_sha() or "").partition("-")
    parts = [sha[:7] + (f"-{dirty}" if dirty else ""), f"Python {installed['python']}"]
    if "torch" in installed:
        parts.append(f"torch {installed['torch']}")
    return f"podtune {podtune.__version__} ({', '.join(part for part in parts if part)})"


def provenance() -> dict[str, Any]:
    """The record's ``provenance``: git sha, versions, image, hardware, job and pod names. Unknown things are
    absent.
    """
    facts = {
        "git_sha": git_sha(),
        "versions": versions(),
        "image": os.environ.get("PODTUNE_IMAGE"),
        "job": os.environ.get("PODTUNE_JOB_NAME"),
        "pod": os.environ.get("PODTUNE_POD_NAME") or socket.gethostname(),
        "hardware": hardware(),
        "command": [_program(sys.argv[0]), *without_secrets(sys.argv[1:])],
    }
    return {key: value for key, value in facts.items() if value}


def _program(path: str) -> str:
    """A module of podtune by its name, the same on every machine; anything else as it was started."""
    package = Path(__file__).resolve().parents[1]
    file = Path(path).resolve()
    if file.is_relative_to(package):
        return ".".join((package.name, *file.relative_to(package).with_suffix("").parts))
    return file.name


_SECRET = re.compile(r"-.*(token|passw(or)?d|secret|api_?key|credential|notify[_-]url)", re.IGNORECASE)
_NO_SECRET = re.compile(r".*(tokens|_token_id|(eos|pad|bos|unk)_token)$", re.IGNORECASE)
_USER_OF_URL = re.compile(r"(\w+://)[^/@\s]+@")


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line with what looks like a token, password or key blanked: records and logs are read by
    many.
    """
    blanked, is_value = [], False
    for word in words:
        name, separator, _ = word.partition("=")
        secret = bool(_SECRET.match(name)) and not _NO_SECRET.match(name.replace("-", "_"))
        if is_value and not word.startswith("--"):
            word = "***"
        elif secret and separator:
            word = f"{name}=***"
        is_value = secret and not separator
        blanked.append(_USER_OF_URL.sub(r"\1***@", word))
    return blanked


def git_sha() -> str | None:
    """The commit of the running code: of the image (PODTUNE_GIT_SHA), of the checkout, with ``-dirty`` if
    changed, or of what the wheel was built from.
    """
    if sha := os.environ.get("PODTUNE_GIT_SHA"):
        return sha
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return COMMIT_FILE.read_text().strip() if COMMIT_FILE.exists() else None

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10
        ).stdout.strip()

    try:
        sha = git("rev-parse", "HEAD")
        return (
            sha + ("-dirty" if sha and git("status", "--porcelain", "--untracked-files=no") else "") or None
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def versions() -> dict[str, str]:
    """Installed versions of what decides a result, and Python's."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def hardware() -> dict[str, Any]:
    """CPU model, usable cores and, where torch is loaded and sees GPUs, their kind, count and memory in
    GiB.
    """
    facts: dict[str, Any] = {"cpu": cpu_model(), "cpu_count": usable_cpus()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "gpu_count": torch.cuda.device_count(),
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return facts
