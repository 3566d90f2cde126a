"""One container of a dry run: its real command as a local process group, watched, prefixed, and ended for
certain.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal as signals
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from podtune.run.errors import Unavailable

# in the environment of every process started here, by which all of them are found again
MARK = "PODTUNE_DRY_RUN_POD"
KEPT_LINES = 20

# What a process needs of this machine; everything else comes from the manifest alone, as in a pod.
PASSED = (
    "LANG",
    "LC_ALL",
    "TERM",
    "TZ",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "CUDA_HOME",
)
PROXIES = (
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HF_ENDPOINT",
)


class LocalContainer:
    """A started container. ``emit`` gets each line of its output, from a thread."""

    def __init__(
        self, command: list[str], env: Mapping[str, str], folder: Path, mark: str, emit: Callable[[str], None]
    ) -> None:
        self.mark = mark
        self.tail: deque[str] = deque(maxlen=KEPT_LINES)
        base = {name: os.environ[name] for name in (*PASSED, *PROXIES) if name in os.environ}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        everything = {**base, "PATH": path, "TMPDIR": str(folder), **env, MARK: mark}
        program = _program(command[0], path)
        self._process = subprocess.Popen(
            [program, *command[1:]],
            env=everything,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(emit,), daemon=True)
        self._reader.start()

    def _read(self, emit: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            line = line.rstrip("\n")
            if line.strip():
                self.tail.append(line)
            emit(line)

    @property
    def exit_code(self) -> int | None:
        """As a container runtime gives it: 128 + N for signal N; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._reader.join(timeout=2)  # what was written last; a grandchild may hold the pipe open
        return 128 - code if code < 0 else code

    def signal(self, number: signals.Signals) -> None:
        """Send a signal to the first process, as the kubelet does."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def signal_all(self, number: signals.Signals) -> None:
        """Send a signal to every process of the container, the first one first so that it cannot react to the
        others.
        """
        self.signal(number)
        kill_marked(self.mark, number)

    def kill(self) -> None:
        """SIGKILL everything and wait for the first process."""
        self.signal_all(signals.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)


def kill_marked(mark: str, number: signals.Signals = signals.SIGKILL) -> None:
    """Send a signal to every process that carries the mark."""
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def marked(mark: str) -> Iterator[int]:
    """The processes whose environment holds the mark; a process that left its group or lost its parent is
    found, too.
    """
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def _program(name: str, path: str) -> str:
    """The local program for the image's: by name on PATH, where this Python's own folder comes first."""
    program = (
        name if os.path.isabs(name) and os.access(name, os.X_OK) else shutil.which(Path(name).name, path=path)
    )
    if Path(name).name.startswith("python") and not os.path.isabs(name):
        program = sys.executable
    if program is None:
        raise Unavailable(
            f"the container's command {name!r} is not on this machine",
            where="dry-run",
            fix="install it, or start the container with one that is: podtune, torchrun, python",
        )
    return program
