"""podtune: fine-tune small language models on Kubernetes, from one pod to many, and measure what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podtune.api import UserError, compare, fine_tune, lint, load, plan_memory, render

__version__ = "0.1.0"
__all__ = ["UserError", "compare", "fine_tune", "lint", "load", "plan_memory", "render"]


def __getattr__(name: str) -> Any:
    """The functions of podtune.api, imported when one is asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'podtune' has no attribute {name!r}")
    from podtune import api

    return getattr(api, name)
