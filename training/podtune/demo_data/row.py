"""A question with its answer, and the hash that orders rows and divides them into train and eval."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

EVAL_SHARE = 10  # one group in ten is held out


@dataclass(frozen=True)
class Row:
    """One row of a set. The columns are the fields in this order, without ``group``.

    Attributes:
        kind: the sort of question, such as ``script``.
        object: what the question is about.
        group: rows of one group are held out together.
    """

    question: str
    answer: str
    kind: str
    object: str
    group: str = field(kw_only=True, compare=False)


def order_of(*parts: object) -> int:
    """A number that depends on the parts alone, the same in every process."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:8], "big")


def held_out(group: str, seed: int) -> bool:
    """True if the rows of a group stand in eval."""
    return order_of(seed, group) % EVAL_SHARE == 0
