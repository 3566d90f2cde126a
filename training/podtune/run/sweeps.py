"""What sweeps of fine-tunes and of benchmark cells share: the file, a YAML mapping of known keys; every
combination of its lists; and how they end when they are asked to. Needs no torch.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from podtune.run.errors import ConfigError, NotFound, near


def read_mapping(path: Path, *, fix: str, usage: str) -> dict[str, Any]:
    """The keys of a sweep file.

    Raises:
        UserError: missing (``fix`` says what to give), unreadable, or no mapping (``usage`` says where it is
        explained).
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound("no such file", where=str(path), fix=fix) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"cannot be read as YAML: {' '.join(str(error).split())}", where=str(path)
        ) from None
    if not isinstance(content, dict):
        raise ConfigError("is not a mapping of keys to values", where=str(path), fix=usage)
    return content


def check_keys(keys: Iterable[object], known: Sequence[str], where: str, *, what: str = "key") -> None:
    """Raise :class:`UserError` for the first of ``keys`` that is none of ``known``."""
    for key in keys:
        if key not in known:
            raise ConfigError(
                f"unknown {what} '{key}'{near(str(key), list(known))}",
                where=where,
                fix=f"one of {', '.join(known)}",
            )


def combinations(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination of one value of each axis, the last axis turning fastest."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


class SweepStopped(Exception):
    """The sweep was asked to end (Ctrl-C or SIGTERM); ``code`` is the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise :class:`SweepStopped` in the block, once: the running one is ended, and what
    is done is kept.
    """

    def stop(number: int, _frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # while that goes on
        raise SweepStopped(128 + number)

    before = {each: signal.signal(each, stop) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
