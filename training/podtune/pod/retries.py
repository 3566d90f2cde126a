"""Bound on the restarts of a pod: failures without progress, counted on the volume. Needs no torch."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from podtune.run.checkpoint import checkpoints
from podtune.run.errors import PREEMPTED, terminate_log, warn
from podtune.run.files import write_atomically

EXHAUSTED = 75  # sysexits' EX_TEMPFAIL: worth a retry once, but too often by now
ANSWER_S = 10.0  # a volume that does not answer must not keep the pod
#: exit codes of a requested stop: nobody's failure
STOP_REQUESTED = (PREEMPTED, 128 + signal.SIGINT, 128 + signal.SIGHUP)


class Retries:
    """The count of one pod, by its name: a pod that the operator creates again starts at zero restarts.

    A start is counted when it begins, so that one whose whole container is killed counts too, and taken back
    when it ends well or was asked to end. A newer checkpoint starts the count anew. Nothing in here can
    change what a failure's code is, but for :data:`EXHAUSTED`, and nothing waits for the volume beyond
    ANSWER_S.
    """

    def __init__(self, output: Path, pod: str, most: int) -> None:
        self._output, self._pod, self._most = output, pod, most
        self._file = output / ".retries" / pod
        self._starts, self._step = 0, 0  # since the last progress; the newest checkpoint when they began

    def begin(self) -> int:
        """Count this start; returns the code to end with instead, 0 to go on."""
        return self._bounded(self._begin, 0)

    def end(self, code: int) -> int:
        """``code``, or :data:`EXHAUSTED` (final) if it asks for a retry once more than allowed."""
        return self._bounded(lambda: self._end(code), code)

    def _begin(self) -> int:
        try:
            starts, step = map(int, self._file.read_text().split())
        except (FileNotFoundError, ValueError):  # the first start, or a file that something has torn
            starts, step = 0, 0
        newest = self._newest()
        self._starts, self._step = 1 + (0 if newest > step else starts), max(newest, step)
        if self._starts > self._most + 1:
            return self._exhausted("was killed")
        self._write()
        return 0

    def _end(self, code: int) -> int:
        if code <= 128:  # an end for good: whoever starts again starts counting again
            self._file.unlink(missing_ok=True)
        elif code in STOP_REQUESTED:
            self._starts -= 1
            self._write()
        elif self._newest() <= self._step and self._starts > self._most:
            return self._exhausted(f"failed with code {code}")
        else:
            text = f"failure {self._starts} of {self._pod} without a newer checkpoint"
            print(f"podtune launch: {text}; {self._most} may be retried", flush=True)
        return code

    def _exhausted(self, what: str) -> int:
        self._file.unlink(missing_ok=True)
        message = f"{what} after {self._most} retries without a newer checkpoint (runPolicy.backoffLimit)"
        warn(message)
        terminate_log(message, EXHAUSTED)
        return EXHAUSTED

    def _newest(self) -> int:
        """The step of the newest checkpoint that can be seen, 0 without one."""
        return max((int(path.name.rpartition("-")[2]) for path in checkpoints(self._output)), default=0)

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, f"{self._starts} {self._step}\n")

    def _bounded(self, work: Callable[[], int], otherwise: int) -> int:
        # in a thread: a call into a dead NFS mount cannot be interrupted
        answer: list[int] = []

        def run() -> None:
            try:
                answer.append(work())
            except Exception as error:  # whatever it is: it may not change how the job ends
                warn(f"{self._file}: starts cannot be counted: {error}")
                answer.append(otherwise)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(ANSWER_S)
        if not answer:
            warn(f"{self._file}: the volume does not answer; this start is not counted")
        return answer[0] if answer else otherwise


def retries(most: int | None) -> Retries | None:
    """The count for this pod; None without a bound, or without OUTPUT_DIR and PODTUNE_POD_NAME."""
    output, pod = os.environ.get("OUTPUT_DIR"), os.environ.get("PODTUNE_POD_NAME")
    if index := os.environ.get("JOB_COMPLETION_INDEX"):  # a Job gives each of its pods another name
        pod = f"index-{index}"
    return Retries(Path(output), pod, most) if most is not None and output and pod else None
