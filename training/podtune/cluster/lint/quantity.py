"""Kubernetes quantities: ``500m``, ``16Gi``, ``1e3``."""

from __future__ import annotations

import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([KMGTPE]i)|([numkMGTPE])|[eE]([+-]?\d+))?")
_BINARY = {unit + "i": 1024 ** (power + 1) for power, unit in enumerate("KMGTPE")}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def quantity(value: Any) -> Decimal | None:
    """The number that ``value`` stands for, in cores, bytes or pieces; None if it is no quantity."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    return _parsed(str(value))


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Decimal | None:
    match = _QUANTITY.fullmatch(text)
    # a number of thousands of digits would take seconds
    if match is None or len(text) > 40:
        return None
    number = Decimal(match[1])
    if match[2]:
        return Decimal(_BINARY[match[2]]) * number
    power: int = _DECIMAL[match[3]] if match[3] else int(match[4] or 0)
    return number.scaleb(power) if abs(power) < 100 else None
