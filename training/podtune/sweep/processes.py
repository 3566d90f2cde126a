"""Starting the processes of a run on this machine, and ending every one of them. Needs no torch itself."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from podtune.bench.strategies.table import STRATEGIES
from podtune.run.world import PodPlace

TORCHRUN_GRACE_S = 10  # between SIGTERM and SIGKILL, of torchrun to its workers


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Process:
    """A program in a session of its own, its output appended to ``log``."""

    def __init__(
        self, command: Sequence[str], log: Path, grace_s: float, env: Mapping[str, str] | None = None
    ) -> None:
        self._grace_s = grace_s
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                # Ctrl-C of a terminal reaches the sweep alone, which ends this one in its order
                start_new_session=True,
            )

    def poll(self, wait_s: float) -> int | None:
        """The exit code, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        return self._process.poll()

    def end(self) -> None:
        """SIGTERM, and SIGKILL to it and its children for what has not ended within the grace time."""
        if self._process.poll() is not None:
            return
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._process.pid).children(recursive=True)
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(self._grace_s)
            for member in family:  # psutil knows a process from another one that got its number later
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def torchrun(
    arguments: Sequence[str],
    log: Path,
    *,
    nodes: int,
    local_ranks: int,
    threads: int,
    timeout_s: float,
    pod: PodPlace | None = None,
    index: int = 0,
) -> Process:
    """Start a fresh torchrun for ``arguments`` of Python.

    In a job (``pod``) every pod calls it for the same runs in the same order. Each run of several nodes meets
    on a port of its own, the job's plus one plus its ``index``, so that nobody joins the group of the run
    before. A pod that has no part in a run waits for its next one in torchrun's rendezvous.
    """
    # torchrun would read the job's own PET_* beside the words here
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PET_", "TORCHELASTIC_"))}
    env["OMP_NUM_THREADS"] = str(threads)  # before torch is loaded; torchrun itself would warn and set 1
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(local_ranks)]
    command += ["--shutdown-timeout", str(TORCHRUN_GRACE_S)]
    if pod is None or nodes == 1:
        command.append("--standalone")
    else:
        command += ["--nnodes", str(nodes), "--node-rank", str(pod.node_rank)]
        command += ["--master-addr", pod.master_addr, "--master-port", str(pod.master_port + 1 + index)]
        # its own bound is 15 minutes, whatever the cases before take
        command += ["--rdzv-conf", f"timeout={int(timeout_s)}"]
    return Process([*command, *arguments], log, TORCHRUN_GRACE_S + 5, env)


class ForkedRanks:
    """The ranks of one run, forked from the server."""

    TERMINATE_GRACE_S = 3.0

    def __init__(self, ranks: Sequence[ForkServerProcess]) -> None:
        self.ranks = ranks

    def poll(self, wait_s: float) -> int | None:
        """The first exit code that is not 0, once all have ended."""
        until = time.monotonic() + wait_s
        for process in self.ranks:
            process.join(max(0.0, until - time.monotonic()))
        if any(process.is_alive() for process in self.ranks):
            return None
        return next((process.exitcode for process in self.ranks if process.exitcode), 0)

    def end(self) -> None:
        """End the ranks that still run, and what they started."""
        for process in self.ranks:
            process.terminate()
        self.poll(self.TERMINATE_GRACE_S)
        for process in self.ranks:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid or 0, signal.SIGKILL)
                process.kill()  # where it has not yet come to lead its group
                process.join()


class ForkServer:
    """A process that has loaded torch and computes nothing itself; the ranks of runs are forked from it.

    A crash takes down one run. For the CPU: CUDA does not survive a fork.
    """

    def __init__(self, strategies: Iterable[str]) -> None:
        modules = {f"podtune.bench.strategies.{STRATEGIES[name].module}" for name in strategies}
        if "podtune.bench.strategies.deepspeed_zero" in modules:
            modules.add("deepspeed")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["podtune.bench.case.loop", *sorted(modules)])

    def start(self, arguments: Sequence[str], log: Path, world_size: int) -> ForkedRanks:
        """Start ``podtune.benchmark`` with ``arguments`` on ``world_size`` ranks.

        The first call waits for the server's imports.
        """
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}  # of the server
        streams = [os.dup(1), os.dup(2)]
        try:
            _output_to(log)  # what its imports print
            forkserver.ensure_running()
        finally:
            for number, stream in enumerate(streams, 1):
                os.dup2(stream, number)
                os.close(stream)
        port = free_port()
        ranks = []
        for rank in range(world_size):
            words = (rank, world_size, port, list(arguments), log)
            ranks.append(self._context.Process(target=_rank, args=words))
            ranks[-1].start()
        return ForkedRanks(ranks)


def _output_to(log: Path) -> None:
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(sink)


def _end_with_the_sweep() -> None:
    """End this rank's group when the sweep has gone, by SIGKILL too."""
    sweep = multiprocessing.parent_process()
    assert sweep is not None
    sweep.join()
    os.killpg(0, signal.SIGKILL)


def _rank(rank: int, world_size: int, port: int, arguments: list[str], log: Path) -> None:
    """Run the program in a forked process, with torchrun's environment and its output to the log."""
    os.setsid()  # Ctrl-C reaches the sweep first, which ends this group
    threading.Thread(target=_end_with_the_sweep, daemon=True).start()
    _output_to(log)
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
