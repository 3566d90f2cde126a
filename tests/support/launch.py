"""Start the real programs without paying for their imports each time.

Importing torch, transformers and trl takes seconds; a program started here is forked from a server that has
them loaded, with the environment that torchrun would give each rank. Tests of torchrun itself start torchrun.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support import row_ledger

CLONE_NEWNET = 0x40000000  # of linux/sched.h
PRELOADED = ["tests.support.preloaded"]


@dataclass
class Program:
    """A started program: one process a rank, its output in one file a rank."""

    ranks: list[Any]
    logs: list[Path]

    def wait(self, timeout_s: float = 600.0) -> list[int]:
        """Exit codes by rank (negative: a signal); whatever still runs after ``timeout_s`` is killed and
        fails the test.
        """
        deadline = time.monotonic() + timeout_s
        for rank in self.ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        hanging = [number for number, rank in enumerate(self.ranks) if rank.is_alive()]
        self.kill()
        assert not hanging, f"ranks {hanging} still ran after {timeout_s} s:\n{self.output()[-3000:]}"
        return [rank.exitcode for rank in self.ranks]

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to some ranks, by default all."""
        for rank in self.ranks if ranks is None else [self.ranks[index] for index in ranks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, number)

    def kill(self) -> None:
        """End what still runs."""
        self.signal(signal.SIGKILL, [index for index, rank in enumerate(self.ranks) if rank.is_alive()])
        for rank in self.ranks:
            rank.join(10)

    def output(self) -> str:
        """What all ranks printed, one after the other."""
        return "\n".join(log.read_text(errors="replace") for log in self.logs)

    def wait_for(self, what: str, timeout_s: float = 120.0) -> None:
        """Block until a rank has printed ``what``."""
        deadline = time.monotonic() + timeout_s
        while what not in self.output():
            alive = any(rank.is_alive() for rank in self.ranks)
            assert alive or what in self.output(), f"ended without {what!r}:\n{self.output()[-3000:]}"
            assert time.monotonic() < deadline, f"no {what!r} in {timeout_s} s:\n{self.output()[-3000:]}"
            time.sleep(0.02)


def _rank(module: str, argv: list[str], env: dict[str, str], log: str, namespace: str) -> None:
    """The child: torchrun's environment, output to a file, then the program's own main."""
    if namespace:
        file = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        assert not ctypes.CDLL(None).setns(file, CLONE_NEWNET)
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        del os.environ[name]
    os.environ.update(env)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    multiprocessing.set_start_method("fork", force=True)  # as in a process that torchrun has started
    sys.argv = [module, *argv]
    if row_ledger.FOLDER in env:
        row_ledger.keep(Path(env[row_ledger.FOLDER]))
    code = importlib.import_module(module).main(argv)
    sys.stdout.flush()
    sys.exit(code)


def _podtune(words: list[str], env: dict[str, str], out: Connection, err: Connection) -> None:
    """The child: this environment, output to the pipes, then the command's own main."""
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # as TMPDIR says
    for number, pipe in ((1, out), (2, err)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.argv = ["podtune", *words]
    importlib.import_module("podtune.__main__").main()


class Podtune:
    """``podtune WORDS`` as a process with its heavy imports done: what its tests need of
    ``subprocess.Popen``.
    """

    def __init__(self, context: Any, words: list[str], env: dict[str, str]) -> None:
        (out, child_out), (err, child_err) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        self._process = context.Process(target=_podtune, args=(words, env, child_out, child_err))
        self._process.start()
        child_out.close()
        child_err.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(pipe.fileno()), errors="replace") for pipe in (out, err))
        self.pid: int = self._process.pid

    def wait(self, timeout_s: float = 240.0) -> int:
        """The exit code, negative for a signal; fails after ``timeout_s``."""
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"still runs after {timeout_s} s"
        return int(self._process.exitcode)

    def end(self, timeout_s: float = 240.0) -> tuple[int, str, str]:
        """Wait: the exit code, and what it and its children wrote to stdout and to stderr."""
        with ThreadPoolExecutor(2) as pool:
            texts = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
            out, err = (text.result(timeout_s) for text in texts)
        return self.wait(timeout_s), out, err

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it if it still runs."""
        self._process.kill()
        self._process.join(10)


class Launcher:
    """Starts a program as one or more ranks, forked from a server with the heavy imports done."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count, self._started = folder, 0, list[Program | Podtune]()
        self._context = multiprocessing.get_context("forkserver")
        # A process has one server: one that a sweep's tests left running has other imports.
        multiprocessing.forkserver._forkserver._stop()
        self._context.set_forkserver_preload(PRELOADED)
        # The server finds PRELOADED by its working directory, and says nothing where it does not.
        safe = os.environ.pop("PYTHONSAFEPATH", None)
        multiprocessing.forkserver.ensure_running()
        os.environ.update({"PYTHONSAFEPATH": safe} if safe else {})

    def start(
        self,
        *argv: object,
        ranks: int = 1,
        env: Mapping[str, str] | None = None,
        namespaces: Sequence[str] = (),
        pods: Sequence[Path] = (),
        module: str = "podtune.training",
    ) -> Program:
        """Start and return at once; with ``namespaces`` each rank in a network of its own, with ``pods`` each
        one a pod, with that output folder of its own. ``module`` has the ``main(argv)`` that is called.
        """
        self._count += 1
        port = free_port()
        processes, logs = [], []
        for rank in range(ranks):
            own: dict[str, str] = {}
            if ranks > 1:
                own |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_WORLD_SIZE": str(ranks),
                }
                own |= {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "GROUP_RANK": "0",
                    "GROUP_WORLD_SIZE": "1",
                }
            if pods:
                own |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OUTPUT_DIR": str(pods[rank])}
                own |= {"GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": str(ranks)}
            logs.append(self._folder / f"{self._count}-{rank}.log")
            logs[-1].touch()
            words, network = [str(word) for word in argv], namespaces[rank] if namespaces else ""
            arguments = (module, words, own | dict(env or {}), str(logs[-1]), network)
            processes.append(self._context.Process(target=_rank, args=arguments))
            processes[-1].start()
        self._started.append(program := Program(processes, logs))
        return program

    def podtune(self, *words: object, **environment: str) -> Podtune:
        """Start a command of ``podtune`` and return at once; ``environment`` is beside this process's."""
        command = Podtune(self._context, [str(word) for word in words], {**os.environ, **environment})
        self._started.append(command)
        return command

    def run(
        self,
        *argv: object,
        ranks: int = 1,
        env: Mapping[str, str] | None = None,
        codes: Sequence[int] | None = None,
        pods: Sequence[Path] = (),
    ) -> str:
        """Start, wait, check the exit codes (all 0 unless told otherwise) and return the output."""
        program = self.start(*argv, ranks=ranks, env=env, pods=pods)
        found = program.wait()
        assert found == list(codes or [0] * ranks), program.output()[-4000:]
        return program.output()

    def process(self, function: Callable[[], None]) -> Any:
        """A process with the heavy imports done that calls ``function``."""
        process = self._context.Process(target=function)
        process.start()
        return process

    def close(self) -> None:
        """End everything that was started."""
        for program in self._started:
            program.kill()


def free_port() -> int:
    """A TCP port that nobody uses at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def metrics(run: Path, split: str = "train", name: str = "loss") -> dict[int, float]:
    """A metric of a run by step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if line["split"] == split}
