"""List of the architectures that may train padding-free, made by ``scripts/end_to_end.py``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LIST = Path(__file__).with_name("end_to_end.json")


@dataclass(frozen=True)
class Architecture:
    """Class that a model is loaded as, and the kinds of its layers, such as ``sliding_attention``."""

    name: str
    layers: frozenset[str] = frozenset()


@cache
def _tried() -> tuple[dict[str, list[str]], dict[str, str]]:
    """Kinds of layers with which a class trains the same end to end, and for other classes the reason."""
    content = json.loads(LIST.read_text(encoding="utf-8"))
    return content["equal"], content["others"]


def architecture(config: PreTrainedConfig, trust_remote_code: bool = False) -> Architecture:
    """Name the class that holds a model's weights: of a multimodal model all of it, as TRL loads it.

    Code of the model's own, where it is trusted, comes before transformers' class of that ``model_type``.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    named: str = (config.architectures or [""])[0]
    remote = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    # the text part alone would lose tensors on saving, and an adapter of it would fit nothing published
    if named not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values():
        named = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, named))
        if remote and trust_remote_code:
            named = str(remote)  # "file.Class", which no class of transformers is called
    return Architecture(named, layer_kinds(config))


def layer_kinds(config: PreTrainedConfig) -> frozenset[str]:
    """Name the kinds of a model's layers; configurations without a list of them have one kind."""
    text = config.get_text_config()
    if kinds := getattr(text, "layer_types", None):
        return frozenset(kinds)
    window = getattr(text, "sliding_window", None)
    return frozenset({"full_attention" if window is None else "sliding_attention"})


def why_padded(model: Architecture) -> str:
    """Give the reason to pad rows of a model; empty if there is none.

    State that runs on from row to row, attention sinks, biases and masks of a model's own would be wrong end
    to end, mostly without a message. ``scripts/end_to_end.py`` has trained every architecture both ways.
    """
    equal, others = _tried()
    if model.name not in equal:
        return others.get(model.name, "it was not tried end to end")
    new = sorted(model.layers.difference(equal[model.name]))
    return f"it was not shown equal end to end with {', '.join(new)}" if new else ""
