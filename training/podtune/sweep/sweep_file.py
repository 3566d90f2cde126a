"""Values of sweep files, checked. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from podtune.run.errors import ConfigError, unknown

_KINDS = {
    str: "a text",
    int: "a positive number",
    float: "a positive number",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
}


def check_keys(keys: Iterable[object], known: Iterable[str], where: str, *, what: str = "key") -> None:
    """Raise :class:`ConfigError` for the first of ``keys`` that is not among ``known``."""
    known = list(known)
    for key in keys:
        if key not in known:
            raise unknown(what, str(key), known, where=where, error=ConfigError)


def check_values(
    content: Mapping[str, Any], kinds: Mapping[str, type], path: Path, lists: Iterable[str] = ()
) -> None:
    """Raise :class:`ConfigError` for a value that is not of its key's kind; ``lists`` may hold several."""
    for key, kind in kinds.items():
        value = content.get(key)
        values = value if key in lists and isinstance(value, list) and value else [value]
        if key in content and not all(_is(each, kind) for each in values):
            many = " or a list of such" if key in lists else ""
            raise ConfigError(f"{value!r} is not {_KINDS[kind]}{many}", where=f"{path}: {key}")


def _is(value: object, kind: type) -> bool:
    if kind in (int, float):  # true and false are no numbers
        numbers = int if kind is int else int | float
        return isinstance(value, numbers) and not isinstance(value, bool) and value > 0
    return isinstance(value, kind)
