"""Errors for people: what is wrong, where, and how to fix it, with the exit code that says who has to act.

Codes 64-78 are those of sysexits.h and mean that the user has to change something: a retry would fail again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

OK = 0
USAGE = 64  # the command line, or flags that contradict each other
DATA = 65  # the content of an input: data set, record, checkpoint
NO_INPUT = 66  # an input that is missing or cannot be read
UNAVAILABLE = 69  # a service or program that is needed: hub, cluster, GPU, helm
SOFTWARE = 70  # a fault of podtune itself
OUT_OF_MEMORY = 71  # the GPU or the pod is too small for this batch, length and model
CANNOT_CREATE = 73  # an output that cannot be written
IO = 74  # reading or writing failed half-way: a full disk
NO_PERMISSION = 77
CONFIG = 78  # a value of the configuration or the environment
PREEMPTED = 143  # ended by SIGTERM after saving; start again and it resumes
PEER_LOST = 170  # another rank, or a collective, failed; start again and it resumes

TERMINATION_LOG = Path("/dev/termination-log")
MARKER = "PODTUNE-RECORD/1"  # begins the lines of a record in a log
# a terminal obeys escape sequences, and marks of direction reorder what is read
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Clean ``text`` of unknown origin for a terminal or log: no escape sequences, no line of a record."""
    return _CONTROL.sub("\ufffd", text).replace(MARKER, MARKER.replace("-", " "))


class UserError(Exception):
    """A mistake that the user can mend; its subclasses carry the exit code.

    Args:
        what: one sentence, without a full stop at the end, that says what is wrong and names the values
        found.
        where: the file, key, row, pod or rank.
        fix: what to do; an imperative.
        code: the exit code of a process that said so itself, in place of the class's.
    """

    code = CONFIG

    def __init_subclass__(cls, *, code: int | None = None) -> None:
        if code is not None:  # else that of its own base
            cls.code = code

    def __init__(self, what: str, *, where: str = "", fix: str = "", code: int | None = None) -> None:
        super().__init__(what)
        self.what, self.where, self.fix = what, where, fix
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        remedy = f"\n  fix: {self.fix}" if self.fix else ""
        return printable(" ".join(f"{place}{self.what}".splitlines()) + remedy)


class ConfigError(UserError):
    """A value of the configuration or the environment."""


class UsageError(UserError, code=USAGE):
    """The command line, or flags that contradict each other."""


class DataError(UserError, code=DATA):
    """The content of an input: data set, record, checkpoint."""


class NotFound(UserError, code=NO_INPUT):
    """An input that is missing or cannot be read."""


class Unavailable(UserError, code=UNAVAILABLE):
    """A service or program that is needed: hub, cluster, GPU, helm."""


class SoftwareError(UserError, code=SOFTWARE):
    """A fault of podtune itself."""


class OutOfMemory(UserError, code=OUT_OF_MEMORY):
    """A GPU or pod that is too small for this batch, length and model."""


class CannotCreate(UserError, code=CANNOT_CREATE):
    """An output that cannot be written."""


class NoPermission(UserError, code=NO_PERMISSION):
    """A right that this user or process lacks."""


class PeerLost(RuntimeError):
    """A rank that died, hung or became unreachable. Nothing is wrong with the input: a restart resumes."""


def first_line(error: BaseException) -> str:
    """The first line of a library's message, shortened; of an empty one the error's type."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


def warn(text: str) -> None:
    """Print a warning to stderr; the program continues."""
    print(f"podtune: warning: {printable(text)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def working(text: str, *, shown: bool = True) -> Iterator[None]:
    """Say on stderr what takes the next seconds: a line, or in a terminal a spinner until it is done."""
    said = f"podtune: {printable(text)} ..."
    if not shown or not sys.stderr.isatty():
        if shown:
            print(said, file=sys.stderr, flush=True)
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    # soft_wrap: a command that is printed meanwhile stays one line, which can be pasted
    console, spinner = Console(stderr=True, soft_wrap=True), Spinner("dots", Text(said))
    # what is printed meanwhile goes above it, but not where stdout is a file or a pipe
    with Live(spinner, console=console, transient=True, redirect_stdout=sys.stdout.isatty()):
        yield


@contextlib.contextmanager
def creating(path: Path, *, fix: str = "") -> Iterator[None]:
    """Raise :class:`CannotCreate` for an OSError of the block, at the file that it names or ``path``."""
    try:
        yield
    except OSError as error:
        place = str(error.filename or path)
        raise CannotCreate(f"cannot be written: {error.strerror}", where=place, fix=fix) from None


def reader_left() -> None:
    """End quietly after a BrokenPipeError: the reader of stdout, such as `| head`, has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report(error: BaseException, *, rank: int | None = None) -> int:
    """Report ``error`` to people and to the launcher; return the exit code.

    A :class:`UserError` met by every rank is printed once, by rank 0. One line goes to the pod's termination
    log, and the message to the file in which torchrun looks for the root cause.
    """
    code = exit_code(error)
    who = "" if rank is None else f"rank {rank}: "
    known = isinstance(error, UserError | PeerLost)
    text = str(error) if known else printable(f"{type(error).__name__}: {error}")
    if platform_fault(error):
        text += "\n  not the job's fault: started again, it resumes from its newest checkpoint"
    if out_of_memory(error):
        text += (
            "\n  fix: a smaller per_device_train_batch_size or max_length, activation_checkpointing, LoRA, "
            "or --strategy fsdp on more GPUs"
        )
    if out_of_space(error) and "/dev/shm" in text:
        text += "\n  fix: give the pod more shared memory: shm.sizeLimit in the chart, --shm-size in Docker"
    elif out_of_space(error):
        text += (
            "\n  fix: free space or enlarge the volume (persistence.output.size), or lower save_total_limit; "
            "complete checkpoints are kept "
            "and the same command resumes from the newest"
        )
    if not (known or out_of_space(error) or isinstance(error, SystemExit)):
        print(printable("".join(traceback.format_exception(error))), file=sys.stderr, end="", flush=True)
    if not rank or not isinstance(error, UserError):
        print(f"podtune: {'' if rank == 0 else who}error: {text}", file=sys.stderr, flush=True)
    terminate_log(f"{who}{text}", code)
    # of several ranks' torchrun names the earliest as the root cause
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": text, "errorCode": code, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(error_file).parent.mkdir(parents=True, exist_ok=True)
        Path(error_file).write_text(json.dumps({"message": message}), encoding="utf-8")
    return code


def exit_code(error: BaseException) -> int:
    if isinstance(error, UserError):
        return error.code
    if isinstance(error, PeerLost):
        return PEER_LOST
    if out_of_memory(error):
        return OUT_OF_MEMORY
    if out_of_space(error):
        return IO
    if platform_fault(error):
        return PEER_LOST
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return 1


#: how the libraries under torch say that memory is full, in errors of other types than torch's own
OUT_OF_MEMORY_SIGNS = (
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "'out of memory'",  # NCCL quotes CUDA
    "Triton Error [CUDA]: out of memory",
    "can't allocate memory",  # torch's CPU allocator
)


def out_of_memory(error: BaseException) -> bool:
    """True for full memory, of Python, torch, cuBLAS, Triton or NCCL.

    torch's OutOfMemoryError is known by its name, so that torch need not be loaded.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY_SIGNS)


def out_of_space(error: BaseException) -> bool:
    """True for a full disk or quota, also as the text of a library's own error (safetensors, torch)."""
    if isinstance(error, UserError | PeerLost):
        return False
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or os.strerror(errno.ENOSPC) in str(error) or os.strerror(errno.EDQUOT) in str(error)


#: a volume that fails: the same job runs once it is back
_VOLUME_LOST = (errno.EROFS, errno.EIO, errno.ESTALE)
_WORKER_KILLED = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: (Killed|Terminated)")


def platform_fault(error: BaseException) -> bool:
    """True where a restart may help: a volume that failed or a data worker that was killed.

    Also in the words of a library (safetensors, torch).
    """
    if isinstance(error, UserError | PeerLost):
        return False
    if isinstance(error, OSError) and error.errno in (*_VOLUME_LOST, errno.ETIMEDOUT) and error.filename:
        return True
    text = str(error)
    return any(os.strerror(code) in text for code in _VOLUME_LOST) or bool(_WORKER_KILLED.search(text))


def terminate_log(message: str, code: int) -> None:
    """Write one line for ``kubectl describe pod``; outside of a pod there is no such file."""
    if TERMINATION_LOG.exists() and os.access(TERMINATION_LOG, os.W_OK):
        line = " ".join(message.split())[:1000]  # Kubernetes keeps 4 KiB, and kubectl shows lines
        TERMINATION_LOG.write_text(f"exit {code}: {line}\n")


def near(name: str, names: list[str] | tuple[str, ...] | set[str] | dict[str, object]) -> str:
    """Suggest the closest known name: ``"; did you mean 'x'?"``, or an empty string."""
    import difflib

    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def unknown(
    what: str, name: str, known: Iterable[str], *, where: str, error: type[UserError] = UsageError
) -> UserError:
    """The error for a ``name`` that is not among those ``known``; suggests the nearest."""
    names = list(known)
    said = f"unknown {what} '{name}'{near(name, names)}"
    return error(said, where=where, fix=f"one of {', '.join(names)}")
