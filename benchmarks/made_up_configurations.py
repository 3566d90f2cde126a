"""Train made-up configurations of every listed architecture as podtune does, and as transformers does.

    python benchmarks/made_up_configurations.py             # five each; a quarter of an hour
    python benchmarks/made_up_configurations.py CohereForCausalLM ...

Drawn by the architecture's name and a number: switches, heads, layers, windows, kinds of layers, rotary
scaling. What transformers cannot train is drawn again. Equal is what scripts/end_to_end.py finds within 1e-5,
or within twice what the architecture's own two attentions, eager and sdpa, are apart, or what it is from
itself with a last bit of each weight changed: some multiply rounding by twenty in each of the three steps.
"""

from __future__ import annotations

import random
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import end_to_end as listed

from podtune.sft.model.attention import register_attention
from podtune.sft.model.end_to_end import Architecture, architecture, why_padded

EACH, DRAWS, TOLERANCE = 5, 25, 1e-5
SIZES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), (1, 2, 4)),
    **dict.fromkeys(("num_hidden_layers", "sliding_window"), (2, 3, 5)),
    "head_dim": (4, 8, 16),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}


def made_up(model_type: str, seed: int) -> Any:
    """Draw a configuration; it need not be one that can be built."""
    draw, config = random.Random(f"{model_type} {seed}"), listed.small_config(model_type)
    values: dict[str, Any] = config.to_dict()
    changed: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, bool) and not name.startswith(("output_", "return_", "use_cache", "is_")):
            changed[name] = value != (draw.random() < 0.25)
        elif name in SIZES and isinstance(value, int) and draw.random() < 0.4:
            changed[name] = draw.choice(SIZES[name])
    if isinstance(layers := values.get("layer_types"), list):
        kinds = sorted({*layers, *listed.other_kinds(model_type)})
        changed["layer_types"] = draw.choices(kinds, k=changed.get("num_hidden_layers", len(layers)))
    if "rope_type" in (rotary := values.get("rope_parameters") or {}) and draw.random() < 0.4:
        changed["rope_parameters"] = {**rotary, **YARN}
    return type(config)(**{**values, **changed})


def outcome(model_type: str, seed: int) -> str | None:
    """Say how far the two are apart, empty if they are equal; None where there is nothing to compare."""
    try:
        config = made_up(model_type, seed)
        if why_padded(architecture(config)):
            return None
        models = [listed.own_model(config), listed.own_model(config, "eager"), listed.own_model(config)]
        for weight in models[2].parameters():
            weight.data.mul_(1 + 2**-23)
        own, *others = (listed.trained(model, listed.batches()[0], lean=False) for model in models)
    except Exception:
        return None
    rounding = max(
        abs(a - b) / max(abs(b), 1e-12) for other in others for a, b in zip(own, other, strict=True)
    )
    listed.TOLERANCE = max(TOLERANCE, 2 * rounding)
    try:
        return listed.judged(config)
    except Exception as error:  # ours alone: transformers has trained it
        return f"{type(error).__name__}: {error}"


def main() -> None:
    torch.set_num_threads(1)  # of so small models
    register_attention()
    tried = apart = 0
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        name = names if isinstance(names, str) else names[0]
        if (sys.argv[1:] and name not in sys.argv) or why_padded(Architecture(name)):
            continue
        outcomes = ((seed, outcome(model_type, seed)) for seed in range(DRAWS))
        found = list(islice((pair for pair in outcomes if pair[1] is not None), EACH))
        bad = [f"{seed}: {each}" for seed, each in found if each]
        tried, apart = tried + len(found), apart + len(bad)
        print(f"{name:<40} {len(found)} tried  {'; '.join(bad) or 'equal'}", flush=True)
    print(f"{tried} configurations, {apart} differ")


if __name__ == "__main__":
    main()
