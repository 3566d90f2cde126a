"""Reading sweep files: a YAML mapping of known keys, and every combination of its lists. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from podtune.run.errors import ConfigError, NotFound, near


def read_mapping(path: Path, *, fix: str, usage: str) -> dict[str, Any]:
    """The keys of a sweep file.

    Raises:
        UserError: missing (``fix`` says what to give), unreadable, or not a mapping (``usage`` says where it
        is explained).
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
