"""Provenance of a run: code, versions, image, hardware, pod. Needs no torch."""

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

import podtune
from podtune.machine.facts import host_info

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


def provenance() -> dict[str, object]:
    """The record's ``provenance``: git sha, versions, image, hardware, job, pod; unknowns are absent."""
    found: dict[str, object] = {
        "git_sha": git_sha(),
        "versions": versions(),
        "image": os.environ.get("PODTUNE_IMAGE"),
        "job": os.environ.get("PODTUNE_JOB_NAME"),
        "pod": os.environ.get("PODTUNE_POD_NAME") or socket.gethostname(),
        "hardware": host_info(),
        "command": [_program(sys.argv[0]), *without_secrets(sys.argv[1:])],
    }
    return {key: value for key, value in found.items() if value}


def _program(path: str) -> str:
    """A module of podtune by its name, the same on every machine; anything else as it was started."""
    package = Path(__file__).resolve().parents[1]
    file = Path(path).resolve()
    if file.is_relative_to(package):
        return ".".join((package.name, *file.relative_to(package).with_suffix("").parts))
    return file.name


_SECRET = re.compile(r"-.*(token|passw(or)?d|secret|api_?key|credential)", re.IGNORECASE)
_NO_SECRET = re.compile(r".*(tokens|_token_id|(eos|pad|bos|unk)_token)$", re.IGNORECASE)
_USER_OF_URL = re.compile(r"(\w+://)[^/@\s]+@")


def without_secrets(words: Sequence[str]) -> list[str]:
    """``words`` with each token, password and key blanked: records and logs are read by many."""
    blanked, is_value = [], False
    for word in words:
        name, separator, _ = word.partition("=")
        secret = bool(_SECRET.match(name)) and not _NO_SECRET.match(name.replace("-", "_"))
        # an option without its value may be followed by the next option
        if is_value and not word.startswith("--"):
            word = "***"
        elif secret and separator:
            word = f"{name}=***"
        is_value = secret and not separator
        blanked.append(_USER_OF_URL.sub(r"\1***@", word))
    return blanked


def git_sha() -> str | None:
    """The commit of the running code: the image's, the checkout's (``-dirty`` if changed) or the wheel's."""
    if sha := os.environ.get("PODTUNE_GIT_SHA"):
        return sha
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return COMMIT_FILE.read_text().strip() if COMMIT_FILE.exists() else None

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()

    try:
        sha = git("rev-parse", "HEAD")
        changed = sha and git("status", "--porcelain", "--untracked-files=no")
        return f"{sha}-dirty" if changed else sha or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that decide a result."""
    installed = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed
