"""The known keys of a configuration, and the values that a user gave them. Needs no torch."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podtune.sft.data.source import Sources

ENVIRONMENT = {  # the reference pipeline's names
    "EPOCHS": "num_train_epochs",
    "BATCH_SIZE": "per_device_train_batch_size",
    "LEARNING_RATE": "learning_rate",
    "OUTPUT_DIR": "output_dir",
    "MODEL_NAME": "model_name_or_path",
    "DATASET_PATH": "dataset_name",
    "MAX_LENGTH": "max_length",
    "RUN_NAME": "run_name",
}
SECRET = ("hub_token",)  # never in a message or a record
Value = Any


@dataclass(frozen=True)
class Settings:
    """The merged configuration: ``values`` by key, and for each key its layer, for messages."""

    values: dict[str, Value] = field(default_factory=dict)
    source: dict[str, str] = field(default_factory=dict)

    def given(self, key: str) -> bool:
        """True if the user set ``key`` in any layer, so that no default of ours may replace it."""
        return key in self.values

    def value(self, key: str) -> Value:
        """Return the user's value of ``key``, else its default."""
        return self.values[key] if key in self.values else known_keys()[key]["default"]

    @functools.cached_property
    def sources(self) -> Sources:
        return Sources.of(self.values)


@functools.cache
def known_keys() -> dict[str, dict[str, Any]]:
    """Read the known keys, each with type, default, choices, bounds and the dataclass it belongs to."""
    text = Path(__file__).with_name("config_keys.json").read_text(encoding="utf-8")
    keys: dict[str, dict[str, Any]] = json.loads(text)
    return keys


@functools.cache
def environment() -> dict[str, str]:
    """Map each environment variable that is read to its key."""
    ours = {spec["env"]: key for key, spec in known_keys().items() if "env" in spec}
    return ENVIRONMENT | ours


def shown(key: str, value: Value) -> str:
    """Format ``value`` for a message, which must not have a secret in it."""
    if key in SECRET:
        return "***"
    return ", ".join(map(str, value)) if isinstance(value, list) else repr(value)
