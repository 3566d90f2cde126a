"""The JSON Schema of the training YAML: equal to the keys, and of one mind with the reader about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from podtune.run.errors import UserError
from podtune.sft.config import settings
from scripts.config_keys import json_schema

DEPLOY = Path(__file__).parents[3] / "deploy"


def test_the_committed_schema_is_that_of_today() -> None:
    committed = json.loads((DEPLOY / "training.schema.json").read_text())
    assert committed == json.loads(json.dumps(json_schema())), "run scripts/config_keys.py"


@pytest.mark.parametrize("file", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_here_passes_it(file: Path) -> None:
    for document in yaml.safe_load_all(file.read_text()):
        config = (document or {}).get("config") if file.parent.name == "values" else None
        if file.name == "demo.yaml":
            config = document
        elif isinstance(config, str):
            config = yaml.safe_load(config)
        if config:
            jsonschema.validate(config, json_schema())


@pytest.mark.parametrize(
    "config",
    [
        {"learning_rat": 1e-4},
        {"learning_rate": -1},
        {"max_steps": "many"},
        {"bf16": "perhaps"},
        {"strategy": "dpp"},
        {"evaluation_strategy": "steps"},
    ],
)
def test_what_the_reader_refuses_the_schema_refuses(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config, json_schema())
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    with pytest.raises(UserError):
        settings.read(["--config", str(file), "--output_dir", "run"], {})


def test_every_default_passes() -> None:
    defaults = {name: spec["default"] for name, spec in settings.known_keys().items()}
    bounded = {name for name, spec in settings.known_keys().items() if "at_least" in spec or "above" in spec}
    for name in defaults.keys() - bounded:
        jsonschema.validate({name: defaults[name]}, json_schema())
