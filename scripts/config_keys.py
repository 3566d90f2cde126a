"""Generate config_keys.json and deploy/training.schema.json from the keys of TRL's dataclasses and ours.

The first lets a configuration be checked without importing TRL, the second is the same for editors.

    python scripts/config_keys.py            # after a change of TRL or of RunArguments
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from trl import TrlParser

from podtune.sft.config.arguments import limits
from podtune.sft.config.keys import known_keys
from podtune.sft.config.resolve import DATACLASSES
from podtune.sft.config.settings import RENAMED

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "deploy" / "training.schema.json"

AT_LEAST = {  # smallest value that makes sense of TRL's keys; ours have it in their types
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_length": 2,
    "logging_steps": 0,
    "lora_r": 1,
    "lora_alpha": 1,
    "save_total_limit": 1,
    "warmup_steps": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "eval_steps": 0,
    "save_steps": 0,
}
ABOVE = dict.fromkeys(("learning_rate", "num_train_epochs", "adam_epsilon"), 0)


def config_keys() -> str:
    """Write config_keys.json, a key a line: dataclass, type, default, choices, bounds; of ours the help."""
    owner = {item.name: part.__name__ for part in DATACLASSES for item in dataclasses.fields(part)}
    ours = limits()
    special = {"report_to": "list", "debug": "list", "datasets": "list"}
    keys: dict[str, dict[str, Any]] = {}
    for action in TrlParser(DATACLASSES)._actions:
        name = action.dest
        if name not in owner or name in RENAMED or action.option_strings[0].startswith("--no_"):
            continue
        kind = getattr(action.type, "__name__", "str")
        kind = "bool" if kind == "string_to_bool" else kind if kind in ("int", "float") else "str"
        kind = special.get(name, "list" if action.nargs in ("+", "*") else kind)
        if name == "include_num_input_tokens_seen":
            kind = "str"
        default = (
            action.default
            if isinstance(action.default, str | int | float | bool | list | None)
            else str(action.default)
        )
        keys[name] = {"class": owner[name], "type": kind, "default": default} | ours.get(name, {})
        if action.choices and "choices" not in keys[name]:
            keys[name]["choices"] = [str(choice) for choice in action.choices]
        if name in AT_LEAST:
            keys[name]["at_least"] = AT_LEAST[name]
        if name in ABOVE:
            keys[name]["above"] = ABOVE[name]
    return (
        "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(spec)}" for key, spec in keys.items()) + "\n}\n"
    )


# YAML 1.1 takes 2e-5 without a point for text, and the reader takes it for the number that it is
_TYPES = {
    "bool": ["boolean", "null"],
    "int": ["integer", "null"],
    "float": ["number", "string", "null"],
    "list": ["array", "string", "null"],
}


def json_schema() -> dict[str, object]:
    """The schema, as data."""
    properties = {name: _property(spec) for name, spec in known_keys().items()}
    properties["env"] = {"type": "object", "description": "environment variables to set first"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "podtune: a fine-tune",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "not": {"anyOf": [{"required": [name]} for name in RENAMED if name not in properties]},
    }


def _property(spec: dict[str, Any]) -> dict[str, object]:
    about: dict[str, object] = {"default": spec["default"]}
    if help_text := spec.get("help"):
        about["description"] = help_text
    if choices := spec.get("choices"):
        about["enum"] = [*choices, None]
    elif types := _TYPES.get(spec["type"]):
        about["type"] = types
    if "at_least" in spec:
        about["minimum"] = spec["at_least"]
    if "above" in spec:
        about["exclusiveMinimum"] = spec["above"]
    return about


if __name__ == "__main__":
    target = ROOT / "training/podtune/sft/config/config_keys.json"
    target.write_text(config_keys(), encoding="utf-8")
    known_keys.cache_clear()  # of what was just written
    SCHEMA.write_text(json.dumps(json_schema(), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {target} and {SCHEMA}")
