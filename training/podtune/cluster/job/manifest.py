"""Manifests as mappings."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]


def dig(content: Json | None, *keys: str) -> Json:
    """The mapping at ``keys`` below ``content``, an empty one where any of them is absent."""
    for key in keys:
        content = (content or {}).get(key)
    return content or {}
