"""Starting a cell's processes, with a time limit, and ending every one of them. Needs no torch itself."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from podtune.bench.sweep.sweep import Cell
from podtune.run.distributed import Pod

SHUTDOWN_S = 10  # what torchrun gives its workers between SIGTERM and SIGKILL
START_S = 120.0  # for the imports, on top of the cell's own time limit, where processes start from nothing


@dataclass(frozen=True)
class Outcome:
    """How the processes of a cell ended. ``code`` is 0 only if all ended well; negative: by that signal."""

    code: int
    timed_out: bool = False


class Launcher(Protocol):
    """Runs one cell after another."""

    def run(self, cell: Cell, index: int, output: Path, log: Path, timeout_s: float) -> Outcome:
        """Run the cell's processes with ``--output output``, their output to ``log``; return when all of them
        have gone.
        """
        ...

    def close(self) -> None:
        """End whatever still runs."""
        ...


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Torchrun:
    """A fresh torchrun for every cell. In a job (``pod``) every pod calls it for the same cells in the same
    order.

    Each cell meets on a port of its own, the job's plus one plus the cell's number, so that nobody joins the
    group of the cell before. A pod that has no part in a cell goes on to the next and waits there, in
    torchrun's rendezvous.
    """

    PORTS = 2000

    def __init__(self, pod: Pod | None = None) -> None:
        self.pod = pod
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, cell: Cell, index: int, output: Path, log: Path, timeout_s: float) -> Outcome:
        """See :class:`Launcher`."""
        env = {
            key: value for key, value in os.environ.items() if not key.startswith(("PET_", "TORCHELASTIC_"))
        }
        # before torch is loaded; torchrun itself would warn and set 1
        env["OMP_NUM_THREADS"] = str(cell.options.threads)
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                [
                    *self._command(cell, index, timeout_s),
                    "-m",
                    "podtune.benchmark",
                    *cell.arguments,
                    "--output",
                    str(output),
                ],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=env,
            )
        try:
            return Outcome(self._process.wait(timeout=timeout_s + START_S))
        except subprocess.TimeoutExpired:
            self.close()
            return Outcome(self._process.returncode, timed_out=True)

    def _command(self, cell: Cell, index: int, timeout_s: float) -> list[str]:
        alone = self.pod is None or cell.nodes == 1
        address = "127.0.0.1" if self.pod is None or alone else self.pod.master_addr
        port = free_port() if self.pod is None or alone else self.pod.master_port + 1 + index % self.PORTS
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(cell.nodes), "--nproc-per-node", str(cell.world_size // cell.nodes)),
            *("--node-rank", str(self.pod.node_rank if self.pod is not None and not alone else 0)),
            *("--master-addr", address, "--master-port", str(port)),
            *("--rdzv-conf", f"timeout={int(timeout_s)}", "--shutdown-timeout", str(SHUTDOWN_S)),
        ]

    def close(self) -> None:
        """Ask torchrun to end its workers; what is left after its own grace is killed, workers included."""
        if self._process is None or self._process.poll() is not None:
            return
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._process.pid).children(recursive=True)
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=SHUTDOWN_S + 5)
            for member in family:  # psutil knows a process from another one that got its number later
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


class ForkServer:
    """Cells on this machine's CPU, forked from one process that has loaded torch (see
    :mod:`podtune.bench.sweep.forked`).
    """

    def __init__(self, strategies: Sequence[str], threads: int) -> None:
        self.strategies, self.threads = list(dict.fromkeys(strategies)), threads
        self._server: subprocess.Popen[bytes] | None = None

    def run(self, cell: Cell, index: int, output: Path, log: Path, timeout_s: float) -> Outcome:
        """See :class:`Launcher`. A server that has died is started again for the next cell."""
        server = self._started(log)
        request = {
            "arguments": [*cell.arguments, "--output", str(output)],
            "world_size": cell.world_size,
            "port": free_port(),
            "log": str(log),
            "timeout_s": timeout_s,
        }
        assert server.stdin is not None
        try:
            server.stdin.write(json.dumps(request).encode() + b"\n")
            server.stdin.flush()
        except BrokenPipeError:
            answer = None
        else:
            answer = self._answer(server, timeout_s + START_S)
        if answer is None:
            self.close()
            return Outcome(-signal.SIGKILL, timed_out=False)
        return Outcome(next((code for code in answer["codes"] if code), 0), answer["timed_out"])

    def _started(self, log: Path) -> subprocess.Popen[bytes]:
        if self._server is None or self._server.poll() is not None:
            env = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "CUDA_VISIBLE_DEVICES": ""}
            with log.open("ab") as sink:
                self._server = subprocess.Popen(
                    [sys.executable, "-m", "podtune.bench.sweep.forked", *self.strategies],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=sink,
                    env=env,
                    start_new_session=True,  # its group is what close() ends; Ctrl-C reaches us first
                )
            self._answer(self._server, START_S)
        return self._server

    @staticmethod
    def _answer(server: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any] | None:
        assert server.stdout is not None
        ready, _, _ = select.select([server.stdout], [], [], timeout_s)
        line = server.stdout.readline() if ready else b""
        return json.loads(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        """End the server and the ranks that it has forked: they are one process group."""
        if self._server is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        self._server = None
