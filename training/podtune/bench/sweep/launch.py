"""Starting a cell's processes, with a time limit, and ending every one of them. Needs no torch itself."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Protocol, cast

from podtune.bench.strategies.table import STRATEGIES
from podtune.bench.sweep.sweep import Cell
from podtune.run.distributed import PodPlace

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

    def close(self) -> object:
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

    def __init__(self, pod: PodPlace | None = None) -> None:
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
    """Cells on this machine's CPU, each rank forked from a process that has loaded torch and never computes
    anything itself: a crash takes down one cell. CUDA does not survive a fork.
    """

    FAILED_PEER_GRACE_S = 15.0  # gloo tells the others of a dead rank well within this
    TERMINATE_GRACE_S = 3.0

    def __init__(self, strategies: Sequence[str]) -> None:
        modules = {f"podtune.bench.strategies.{STRATEGIES[name].module}" for name in strategies}
        if any(name.startswith("zero") for name in strategies):
            modules.add("deepspeed")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["podtune.bench.case.loop", *sorted(modules)])
        self._ranks: list[ForkServerProcess] = []

    def run(self, cell: Cell, index: int, output: Path, log: Path, timeout_s: float) -> Outcome:
        """See :class:`Launcher`. A server that has died is started again."""
        arguments, port, size = [*cell.arguments, "--output", str(output)], free_port(), cell.world_size
        try:
            with _environment_of_the_server(log):
                forkserver.ensure_running()
                for rank in range(size):
                    words = (rank, size, port, arguments, str(log))
                    process = self._context.Process(target=_rank, args=words)
                    process.start()  # waits for the server's imports, the first time
                    self._ranks.append(process)
        except (OSError, EOFError):
            self.close()
            return Outcome(-signal.SIGKILL)
        running = {process.sentinel: process for process in self._ranks}
        deadline, failed = time.monotonic() + timeout_s, False
        while running and (left := deadline - time.monotonic()) > 0:
            for sentinel in multiprocessing.connection.wait(list(running), left):
                process = running.pop(cast(int, sentinel))
                process.join()
                if process.exitcode and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + self.FAILED_PEER_GRACE_S)
        codes = [process.exitcode for process in self.close()]
        return Outcome(next((code for code in codes if code), 0), timed_out=bool(running) and not failed)

    def close(self) -> list[ForkServerProcess]:
        """End the ranks that still run, and what they started; all of the last cell's, ended."""
        ranks, self._ranks = self._ranks, []
        for process in ranks:
            if process.is_alive():
                process.terminate()
        end = time.monotonic() + self.TERMINATE_GRACE_S
        for process in ranks:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid or 0, signal.SIGKILL)
                process.kill()  # where it has not yet come to lead its group
                process.join()
        return ranks


@contextlib.contextmanager
def _environment_of_the_server(log: Path) -> Iterator[None]:
    """What the fork server is started with: no GPU, and whatever its imports print goes to the log."""
    wanted = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    before = {name: os.environ.get(name) for name in wanted}
    streams = [os.dup(1), os.dup(2)]
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.environ.update(wanted)
    try:
        for number in (1, 2):
            os.dup2(sink, number)
        yield
    finally:
        for number, stream in zip((1, 2), streams, strict=True):
            os.dup2(stream, number)
            os.close(stream)
        os.close(sink)
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _end_with_the_sweep() -> None:
    """However the sweep goes, its ranks go too, with what they have started."""
    sweep = multiprocessing.parent_process()
    assert sweep is not None
    sweep.join()
    os.killpg(0, signal.SIGKILL)


def _rank(rank: int, world_size: int, port: int, arguments: list[str], log: str) -> None:
    """A forked process: torchrun's environment, output to the log, then the program."""
    os.setsid()  # Ctrl-C reaches the sweep first, which ends this group
    threading.Thread(target=_end_with_the_sweep, daemon=True).start()
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    size = str(world_size)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    code = 1
    try:
        code = importlib.import_module("podtune.benchmark").main(arguments)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # peers may sit in a collective that never ends
