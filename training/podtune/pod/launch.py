"""``podtune launch``: torchrun, ending with the exit code of the process that failed instead of torchrun's 1.

Kubernetes decides by the exit code whether a retry makes sense (``restartPolicy: ExitCode``: 1-127 is final,
128 and above starts the pod again), and torchrun turns every failure into 1. This runs torchrun's own ``run``
in this process, so signals, ``PET_*`` and all its options work as ever, and reads the codes of the ranks from
the error that it raises.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from podtune.run.errors import OK, PEER_LOST, PREEMPTED, TERMINATION_LOG, PeerLost, report, terminate_log

EXHAUSTED = 75  # sysexits' EX_TEMPFAIL: worth a retry once, but too often by now


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


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end the block with code 143. Process 1 of a container ignores signals that it does not
    handle.
    """

    def end(_signal: int, _frame: object) -> NoReturn:
        sys.exit(PREEMPTED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def leave_verdict(file: Path, code: int, message: str) -> None:
    """Write a failure of the prepare step for :func:`failed_before` in the next container of the pod."""
    file.write_text(json.dumps({"code": code, "message": message}), encoding="utf-8")


def failed_before(file: Path) -> int:
    """The exit code of a prepare step that left its failure in ``file``, said once more; 0 if there is
    none.
    """
    if not file.exists():
        return OK
    verdict = json.loads(file.read_text(encoding="utf-8"))
    print(f"podtune launch: the prepare step failed: {verdict['message']}", file=sys.stderr, flush=True)
    terminate_log(f"prepare: {verdict['message']}", verdict["code"])
    return int(verdict["code"])


def prepare_first(config: Path, arguments: Sequence[str]) -> int:
    """Run ``podtune prepare`` with what follows ``config`` in torchrun's arguments, for pods that can have no
    init container.

    Returns its exit code.

    In a process of its own, because it may use the network where PREPARE_OFFLINE allows it, and training may
    not.
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
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    args = parse_args(arguments)  # type: ignore[no-untyped-call]
    try:
        run(args)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        for rank, failure in failures:
            print(
                (f"podtune launch: rank {rank} ended with {_named(failure.exitcode)}"),
                file=sys.stderr,
                flush=True,
            )
        code = exit_code_of([failure.exitcode for _, failure in failures])
        if not _said():  # a process that was killed could not say so itself
            terminate_log(f"rank {failures[0][0]} ended with {_named(failures[0][1].exitcode)}", code)
        return code
    except SignalException as error:
        return 128 + int(error.sigval)
    except (RendezvousError, dist.DistError) as error:
        where = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
        raise PeerLost(
            f"the pods did not meet at {where}: {str(error).splitlines()[0][:300]}\n"
            "  likely: a pod that never started or has ended, a name that does not resolve, or a closed port"
        ) from error
    return OK


def _said() -> bool:
    """True if a rank has left its reason for ``kubectl describe pod`` already."""
    return TERMINATION_LOG.exists() and TERMINATION_LOG.stat().st_size > 0


def exit_code_of(codes: Sequence[int]) -> int:
    """One code for the codes of failed ranks, the first failure first; negative ones are signals, as in
    subprocess.

    An error that only the user can mend wins, because a retry would meet it again; then the first failure,
    since the others are mostly its consequence.
    """
    for code in codes:
        if code == 2 or 64 <= code <= 78:
            return code
    return next((128 - code if code < 0 else code for code in codes if code), 1)


def _named(code: int) -> str:
    if code >= 0:
        meaning = {PREEMPTED: ", preempted after saving", PEER_LOST: (", a peer or a collective lost")}.get(
            code, ""
        )
        return f"exit code {code}{meaning}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
        likely = {
            "SIGKILL": " (out of memory, unless someone sent it)",
            "SIGABRT": " (NCCL gave up waiting for a lost peer, or a library aborted)",
        }
        return name + likely.get(name, "")
    return f"signal {-code}"


def bounded(code: int, max_retries: int | None) -> int:
    """``code``, or :data:`EXHAUSTED` (final) if it asks for a retry once more than ``max_retries`` times.

    Counted in ``OUTPUT_DIR`` under the pod's name, because a pod that the operator creates again starts at
    zero restarts; without ``OUTPUT_DIR`` and ``PODTUNE_POD_NAME`` nothing is counted. Preemption is nobody's
    fault and not counted.
    """
    output, pod = os.environ.get("OUTPUT_DIR"), os.environ.get("PODTUNE_POD_NAME")
    if max_retries is None or not output or not pod:
        return code
    counter = Path(output) / ".retries" / pod
    if code <= 128:  # an end for good: whoever starts again starts counting again
        counter.unlink(missing_ok=True)
        return code
    if code == PREEMPTED:
        return code
    counter.parent.mkdir(parents=True, exist_ok=True)
    failures = 1 + (int(counter.read_text() or 0) if counter.exists() else 0)
    if failures > max_retries:
        counter.unlink()
        message = (
            f"failed with code {code} after {max_retries} retries, which is all that "
            "runPolicy.backoffLimit allows"
        )
        print(f"podtune launch: {message}", file=sys.stderr, flush=True)
        terminate_log(message, EXHAUSTED)
        return EXHAUSTED
    counter.write_text(f"{failures}\n")
    print(
        (f"podtune launch: failure {failures} of {pod}; {max_retries} may be retried"),
        file=sys.stderr,
        flush=True,
    )
    return code
