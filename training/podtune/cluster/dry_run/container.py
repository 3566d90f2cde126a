"""One container of a dry run: its real command as local processes, watched, and ended for certain."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from podtune.run.errors import Unavailable

# in the environment of every process started here, by which all of them are found again
MARK = "PODTUNE_DRY_RUN_POD"
KILLED_S = 5.0  # a process that the kernel does not let go of is left

# What a process needs of this machine; everything else comes from the manifest alone, as in a pod.
PASSED = (
    *("LANG", "LC_ALL", "TERM", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_HOME"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HF_ENDPOINT", "HF_TOKEN"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"),
)


class LocalContainer:
    """A started container. ``emit`` gets each line of its output, from a thread."""

    def __init__(
        self, command: list[str], env: Mapping[str, str], folder: Path, mark: str, emit: Callable[[str], None]
    ) -> None:
        base = {name: os.environ[name] for name in PASSED if name in os.environ}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self._process = subprocess.Popen(
            [_program(command[0], path), *command[1:]],
            env={**base, "PATH": path, "TMPDIR": str(folder), **env, MARK: mark},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the dry run, which then ends its pods
        )
        self._reader = threading.Thread(target=self._read, args=(emit,), daemon=True)
        self._reader.start()

    def _read(self, emit: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            emit(line.rstrip("\n"))

    def wait(self) -> int:
        """Wait for the first process; its exit code, 128 + N for signal N."""
        code = self._process.wait()
        self._reader.join(timeout=2)  # what was written last; a grandchild may hold the pipe open
        return 128 - code if code < 0 else code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the first process, as the kubelet does."""
        self._process.send_signal(number)


def kill_marked(mark: str) -> None:
    """End every process that carries the mark, and wait until they are gone, at most :data:`KILLED_S`."""
    until = time.monotonic() + KILLED_S
    # again and again: a process may fork between the look and the kill
    while (pids := list(marked(mark))) and time.monotonic() < until:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def marked(mark: str) -> Iterator[int]:
    """Yield the processes with the mark in their environment, also those that left group and parent."""
    entry_of_mark = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if entry_of_mark in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def _program(name: str, path: str) -> str:
    """The local program for the image's: by name on PATH, where this Python's own folder comes first."""
    if name.startswith("python"):
        return sys.executable
    program = shutil.which(name, path=path) or shutil.which(Path(name).name, path=path)
    if program is None:
        what = f"the container's command {name!r} is not on this machine"
        fix = "install it, or start the container with one that is: podtune, torchrun, python"
        raise Unavailable(what, where="dry-run", fix=fix)
    return program
