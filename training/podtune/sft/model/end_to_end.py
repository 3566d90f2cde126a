"""List of the architectures that may train padding-free, made by ``scripts/end_to_end.py``."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("end_to_end.json")


@cache
def _listed() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(LIST.read_text(encoding="utf-8"))
    return content


def why_padded(architecture: str) -> str:
    """Give the reason to pad rows of a model class such as ``LlamaForCausalLM``; empty if there is none.

    State that runs on from row to row, attention sinks, biases and masks of a model's own would be wrong end
    to end, mostly without a message. ``scripts/end_to_end.py`` has trained every architecture both ways.
    """
    if architecture in _listed()["equal"]:
        return ""
    return str(_listed()["others"].get(architecture, "it was not tried end to end"))
