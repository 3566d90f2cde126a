"""A server that runs many short cells without paying for their imports each time: ``python -m
podtune.bench.sweep.forked``.

It loads torch and the benchmark once and never computes anything itself; for each cell it forks the ranks,
which then are processes like any other, with their own process group and their own end: a crash takes down
one cell. On one machine and the CPU only, since CUDA does not survive a fork.

Protocol: one JSON request a line on standard input (``arguments``, ``world_size``, ``port``, ``log``,
``timeout_s``), one JSON answer a line on standard output (``codes`` by rank, negative for a signal;
``timed_out``).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

FAILED_PEER_GRACE_S = 15.0  # gloo tells the others of a dead rank well within this
TERMINATE_GRACE_S = 3.0


def main() -> None:
    """Serve until standard input ends."""
    import podtune.bench.cell.loop  # the imports that every cell needs, torch among them
    from podtune.bench.strategies.table import STRATEGIES

    assert podtune.bench.cell.loop
    for name in sys.argv[1:]:
        try:
            STRATEGIES[name].load()
            if name.startswith("zero"):
                os.environ["DS_ACCELERATOR"] = "cpu"
                __import__("deepspeed")
        except Exception as error:  # the cell that needs it will say so in its record
            print(f"{name}: {error}", file=sys.stderr)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is not an answer
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        answers.write(json.dumps(_run(json.loads(line))) + "\n")


def _run(request: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks and wait for all of them, within the time limit and a grace after the first failure."""
    ranks = {_fork(rank, request): rank for rank in range(request["world_size"])}
    codes: dict[int, int] = {}
    deadline = time.monotonic() + request["timeout_s"]
    timed_out = False
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            codes[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
            if codes and any(codes.values()):
                deadline = min(deadline, time.monotonic() + FAILED_PEER_GRACE_S)
        elif time.monotonic() > deadline:
            timed_out = not any(codes.values())
            _end(list(ranks))
            deadline = float("inf")
        else:
            time.sleep(0.005)
    return {"codes": [codes[rank] for rank in sorted(codes)], "timed_out": timed_out}


def _end(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + TERMINATE_GRACE_S
    while time.monotonic() < end and any(_alive(pid) for pid in pids):
        time.sleep(0.05)
    for pid in pids:
        if _alive(pid):
            os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    """True while the child has not ended; it stays to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _fork(rank: int, request: dict[str, Any]) -> int:
    """The process id of a new process that runs the benchmark as ``rank``."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        size = str(request["world_size"])
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(request["port"]))
        sys.argv = ["podtune.benchmark", *request["arguments"]]
        from podtune import benchmark

        code = benchmark.main(request["arguments"])
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
