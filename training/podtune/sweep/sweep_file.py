"""Sweep files: their keys and values checked, and every combination of their lists. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from podtune.run.errors import ConfigError, near


def check_keys(keys: Iterable[object], known: Sequence[str], where: str, *, what: str = "key") -> None:
    """Raise :class:`ConfigError` for the first of ``keys`` that is not among ``known``."""
    for key in keys:
        if key not in known:
            raise ConfigError(
                f"unknown {what} '{key}'{near(str(key), list(known))}",
                where=where,
                fix=f"one of {', '.join(known)}",
            )


def is_a(kind: type) -> Callable[[Any], bool]:
    """A test for values of one Python type."""
    return lambda value: isinstance(value, kind)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


SECONDS = ("a positive number of seconds", _is_positive)


def check_values(
    content: Mapping[str, Any], kinds: Mapping[str, tuple[str, Callable[[Any], bool]]], path: Path
) -> None:
    """Raise :class:`ConfigError` for the first value that is not of its key's kind: its name, and a test."""
    for key, (kind, fits) in kinds.items():
        if key in content and not fits(content[key]):
            raise ConfigError(f"{content[key]!r} is not {kind}", where=f"{path}: {key}")


def combinations(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Every combination of one value of each axis, the last axis turning fastest."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))
