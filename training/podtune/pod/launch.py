"""``podtune launch``: torchrun, ending with the exit code of the process that failed instead of torchrun's 1.

Kubernetes decides by the exit code whether a retry makes sense (``restartPolicy: ExitCode``: 1-127 is final,
128 and above starts the pod again), and torchrun turns every failure into 1. This runs torchrun's own ``run``
in this process, so signals, ``PET_*`` and all its options work as ever, and reads the codes of the ranks from
the error that it raises.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from podtune.run.distributed import DEFAULT_TIMEOUT_S, why_no_cuda
from podtune.run.errors import (
    OK,
    PEER_LOST,
    PREEMPTED,
    TERMINATION_LOG,
    PeerLost,
    Unavailable,
    UserError,
    report,
    terminate_log,
)
from podtune.run.exit import end_now
from podtune.run.launcher import ENDS, LAUNCHER, all_ended_well
from podtune.run.library_environment import spin_briefly
from podtune.run.yaml_text import read_mapping

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GRACE_S = 5.0  # between a signal and the end by force, while no rank has anything to save
NOTIFY_S = 30.0


def launch(arguments: Sequence[str], *, shutdown_timeout_s: int = 240) -> int:
    """Run ``torchrun *arguments`` and return the documented exit code.

    Args:
        arguments: torchrun's, for example ``-m podtune.training --config c.yaml``.
        shutdown_timeout_s: how long ranks may take to save and end after SIGTERM before torchrun kills them.
    """
    try:
        return _torchrun([f"--shutdown-timeout={shutdown_timeout_s}", *arguments])
    except PeerLost as error:  # the other pods were not met
        return report(error)


_received: list[int] = []  # signals that asked this process to end


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM, SIGINT and SIGHUP end the block with code 128 + n.

    Process 1 of a container ignores signals that it does not handle. The exception may be lost: numpy's and
    torch's start-up in C swallow what is raised in it. Then the process ends by force.
    """

    def end(number: int, _frame: object) -> NoReturn:
        _received.append(number)
        by_force = threading.Timer(GRACE_S, os._exit, (128 + number,))
        by_force.daemon = True
        by_force.start()
        sys.exit(128 + number)

    before = {each: signal.signal(each, end) for each in SIGNALS}
    try:
        yield
        stop_if_requested()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_if_requested() -> None:
    """End now if a signal asked for it and its exception was lost."""
    if _received:
        sys.exit(128 + _received[0])


def leave_verdict(file: Path, code: int, message: str) -> None:
    """Write a failure of the prepare step for :func:`failed_before` in the next container of the pod."""
    file.write_text(json.dumps({"code": code, "message": message}), encoding="utf-8")


def failed_before(file: Path) -> int:
    """Report the failure that a prepare step left in ``file``; its exit code, 0 if there is none."""
    if not file.exists():
        return OK
    verdict = json.loads(file.read_text(encoding="utf-8"))
    print(f"podtune launch: the prepare step failed: {verdict['message']}", file=sys.stderr, flush=True)
    terminate_log(f"prepare: {verdict['message']}", verdict["code"])
    return int(verdict["code"])


def prepare_first(config: Path, arguments: Sequence[str]) -> int:
    """Run ``podtune prepare`` with what follows ``config`` in torchrun's arguments; its exit code.

    For pods that can have no init container. In a process of its own, because it may use the network where
    PREPARE_OFFLINE allows it, and training may not.
    """
    environment = dict(os.environ, HF_HUB_OFFLINE=os.environ.get("PREPARE_OFFLINE", "0"))
    more = arguments[list(arguments).index(str(config)) + 1 :] if str(config) in arguments else ()
    command = [sys.executable, "-m", "podtune.cli", "prepare", "--config", str(config), "--", *more]
    with subprocess.Popen(command, env=environment) as process:
        try:
            return process.wait()
        finally:
            process.terminate()


def _torchrun(arguments: list[str]) -> int:
    import torch
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    stop_if_requested()
    timeout_s = rendezvous_s(arguments)
    args = parse_args(arguments)  # type: ignore[no-untyped-call]
    if args.nproc_per_node == "gpu" and not torch.cuda.is_available():  # torchrun ends in a traceback
        fix = "a number of processes trains without one"
        raise Unavailable(f"torch sees no GPU: {why_no_cuda()}", where="--nproc-per-node gpu", fix=fix)
    # torchrun passes what it handles on to the ranks as it came: SIGINT and SIGHUP reach them as SIGTERM
    args.signals_to_handle = "SIGTERM,SIGQUIT"
    if "timeout=" not in args.rdzv_conf:
        args.rdzv_conf = ",".join(filter(None, [args.rdzv_conf, f"timeout={timeout_s:.0f}"]))
    where = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
    killed = _Killed()
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addHandler(killed)
    with tempfile.TemporaryDirectory(prefix="podtune-launch-") as folder, _as_sigterm() as first:
        ends = Path(folder, "ends")
        ends.mkdir()
        args.log_dir = args.log_dir or str(Path(folder, "logs"))  # torchrun's own would stay behind
        spin_briefly()
        os.environ |= {LAUNCHER: str(os.getpid()), ENDS: str(ends)}
        signal.signal(signal.SIGUSR1, _volume_lost)
        met = threading.Event()
        watch = (where, timeout_s, args.rdzv_backend == "static", met)
        threading.Thread(target=_watch_rendezvous, args=watch, daemon=True).start()
        try:
            run(args)  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            return _failed(error.failures, killed.pids)
        except SignalException as error:
            return OK if all_ended_well(ends) else 128 + int(first[0] if first else error.sigval)
        except (RendezvousError, dist.DistError) as error:
            raise PeerLost(
                f"the pods did not meet at {where}: {str(error).splitlines()[0][:300]}\n"
                "  likely: a pod that never started or has ended, a name that does not resolve, or a closed "
                "port"
            ) from error
        finally:
            met.set()
    return OK


def _failed(failures: Mapping[int, Any], killed: Sequence[int]) -> int:
    """Report how the ranks ended; the code that stands for them. torchrun had to kill ``killed``."""
    ends: list[str] = []
    codes: list[int] = []
    # the first failure first, as the others mostly follow from it; those that were killed last
    for rank, end in sorted(failures.items(), key=lambda item: (item[1].pid in killed, item[1].timestamp)):
        if end.pid in killed:
            ends.append(f"rank {rank} hung: it did not end when asked to")
        else:
            ends.append(f"rank {rank} ended with {_named(end.exitcode)}")
            codes.append(end.exitcode)
        print(f"podtune launch: {ends[-1]}", file=sys.stderr, flush=True)
    code = exit_code_of(codes or [PEER_LOST])
    if not (TERMINATION_LOG.exists() and TERMINATION_LOG.stat().st_size):  # no rank has left its reason
        terminate_log(ends[0], code)
    return code


class _Killed(logging.Handler):
    """Notes the processes that torchrun kills because they do not end, from what it logs of them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.pids: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("Unable to shutdown process") and isinstance(record.args, tuple):
            self.pids.append(int(str(record.args[0])))


@contextlib.contextmanager
def _as_sigterm() -> Iterator[list[int]]:
    """Pass SIGINT and SIGHUP on as SIGTERM, at which the ranks save; yields those that came.

    A second one ends everything at once.
    """
    came: list[int] = []

    def hand_on(number: int, _frame: object) -> None:
        came.append(number)
        if len(came) > 1:  # without another word to the volume or the other pods
            _kill_ranks()
            os._exit(128 + number)
        os.kill(os.getpid(), signal.SIGTERM)

    before = {each: signal.signal(each, hand_on) for each in (signal.SIGINT, signal.SIGHUP)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_ranks() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()


def _volume_lost(_signal: int, _frame: object) -> NoReturn:
    """A rank says that the volume does not answer: it may not be able to end itself."""
    _kill_ranks()
    end_now("the output volume has stopped answering; ended, to be started again")


def _watch_rendezvous(where: str, timeout_s: float, bounded: bool, met: threading.Event) -> None:
    """Report every 30 s that the pods have not met, and end the process after ``timeout_s`` and NOTIFY_S.

    torchrun waits for some steps of its rendezvous for ever. Not ``bounded`` is an elastic job, in which a
    pod may stand by.
    """
    import psutil

    process, began = psutil.Process(), time.monotonic()
    notified_at = began
    while not met.wait(0.5) and not process.children():
        now = time.monotonic()
        if bounded and now - began > timeout_s + NOTIFY_S:
            end_now(f"the pods did not meet at {where} within {timeout_s:.0f} s")
        if now - notified_at > NOTIFY_S:
            notified_at = now
            bound = f", at most {timeout_s:.0f} s" if bounded else ""
            text = f"waiting for the pods to meet at {where} ({now - began:.0f} s{bound})"
            print(f"podtune launch: {text}", file=sys.stderr, flush=True)


def rendezvous_s(arguments: Sequence[str]) -> float:
    """The program's ``timeout_s``: of its command line, or of the YAML that it names; else the default."""
    words = [part for word in arguments for part in word.split("=", 1)]
    with contextlib.suppress(ValueError, IndexError):
        return float(words[words.index("--timeout_s") + 1])
    with contextlib.suppress(ValueError, IndexError, TypeError, KeyError, UserError):
        return float(read_mapping(Path(words[words.index("--config") + 1]), fix="")["timeout_s"])
    return DEFAULT_TIMEOUT_S


def exit_code_of(codes: Sequence[int]) -> int:
    """One code for the codes of failed ranks, the first failure first; negative ones are signals.

    An error that only the user can mend wins, because a retry would meet it again; then the first failure,
    since the others are mostly its consequence.
    """
    for code in codes:
        # 2 is a wrong command line, the others are of sysexits
        if code == 2 or 64 <= code <= 78:
            return code
    return next((128 - code if code < 0 else code for code in codes if code), 1)


def _named(code: int) -> str:
    if code >= 0:
        meanings = {PREEMPTED: ", preempted after saving", PEER_LOST: ", a peer or a collective lost"}
        return f"exit code {code}{meanings.get(code, '')}"
    likely = {
        signal.SIGKILL: " (out of memory, unless someone sent it)",
        signal.SIGABRT: " (NCCL gave up waiting for a lost peer, or a library aborted)",
    }
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name + likely.get(signal.Signals(-code), "")
    return f"signal {-code}"
