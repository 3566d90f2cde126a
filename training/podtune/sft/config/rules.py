"""The rules of a configuration that need neither torch nor the data: bounds and contradictions of keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from podtune.run.errors import ConfigError
from podtune.sft.config.keys import Settings, known_keys, shown
from podtune.sft.data.source import STREAMING
from podtune.sft.source.object_store import refuse_secret

REQUIRED = {
    ("model_name_or_path",): ("no model is named", "--model_name_or_path FOLDER|HUB_ID"),
    ("dataset_name", "datasets"): ("no data set is named", "--dataset_name FILE|FOLDER|HUB_NAME"),
    ("output_dir",): ("no output folder is named", "--output_dir FOLDER"),
}


@dataclass(frozen=True)
class Rule:
    """A contradiction between a key that is set, neither to null nor to false, and other keys."""

    key: str
    problem: str | Callable[[Settings], str]  # the rest of a sentence that begins with the key and its value
    fix: str = ""
    broken: Callable[[Settings], object] = bool  # true for a configuration that breaks the rule


def check(settings: Settings) -> None:
    """Check bounds, secrets in names, required keys and the rules. Raises :class:`UserError`."""
    check_bounds(settings)
    for key, value in settings.values.items():
        for name in [entry.get("path", "") for entry in value] if key == "datasets" else [value]:
            refuse_secret(str(name), f"{settings.source[key]}: {key}")
    for keys, (problem, fix) in REQUIRED.items():
        if not any(settings.values.get(key) for key in keys):
            raise ConfigError(problem, where=keys[0], fix=fix)
    for rule in RULES:
        value = settings.value(rule.key)
        if value is not None and value is not False and rule.broken(settings):
            problem = rule.problem if isinstance(rule.problem, str) else rule.problem(settings)
            raise _wrong(settings, rule.key, problem, rule.fix)


def check_bounds(settings: Settings) -> None:
    """Check that numbers are finite and within the bounds of their keys. Raises :class:`UserError`."""
    for key, value in settings.values.items():
        if value is None:
            continue
        spec = known_keys()[key]
        if isinstance(value, float) and not math.isfinite(value):
            raise _wrong(settings, key, "must be a finite number")
        if "at_least" in spec and value < spec["at_least"]:
            raise _wrong(settings, key, f"must be at least {spec['at_least']}")
        if "above" in spec and not value > spec["above"]:
            raise _wrong(settings, key, f"must be above {spec['above']}")


def _wrong(settings: Settings, key: str, problem: str, fix: str = "") -> ConfigError:
    return ConfigError(
        f"{key} is {shown(key, settings.values[key])}: {problem}", where=settings.source[key], fix=fix
    )


def _all_set(*keys: str) -> Callable[[Settings], bool]:
    return lambda s: all(s.values.get(key) for key in keys)


def _lacks(*keys: str) -> Callable[[Settings], bool]:
    return lambda s: not any(s.value(key) for key in keys)


#: in the order in which they are applied; the first one that is broken is said
RULES = (
    Rule(
        "max_steps",
        "must be at least 1, or -1 to train num_train_epochs",
        broken=lambda s: s.value("max_steps") != -1 and s.value("max_steps") < 1,
    ),
    Rule(
        "eval_split_size",
        "must be a share below 1 or a whole number of rows",
        broken=lambda s: s.value("eval_split_size") > 1 and s.value("eval_split_size") % 1,
    ),
    Rule(
        "early_stopping_patience",
        "it counts evaluations, and eval_strategy is no",
        "eval_strategy: steps",
        broken=lambda s: s.value("eval_strategy") == "no",
    ),
    Rule(
        "early_stopping_threshold",
        "it has no effect without early_stopping_patience",
        "set it",
        broken=lambda s: s.value("early_stopping_threshold") and not s.value("early_stopping_patience"),
    ),
    Rule(
        "global_batch_size",
        "it is solved from the batch and the world, but gradient_accumulation_steps is given too",
        "give one",
        _all_set("gradient_accumulation_steps", "per_device_train_batch_size"),
    ),
    Rule(
        "strategy",
        "fsdp is configured by hand too",
        "remove strategy, or fsdp",
        broken=lambda s: s.value("strategy") != "auto" and s.value("fsdp"),
    ),
    Rule(
        "columns",
        "must be a mapping of names to new names",
        "columns: {instruction: prompt, output: completion}",
        broken=lambda s: not isinstance(s.value("columns"), dict),
    ),
    Rule("packing", "packing needs max_length", broken=lambda s: s.value("max_length") is None),
    *(
        Rule(key, "quantised weights cannot be trained in full", "--use_peft", _lacks("use_peft"))
        for key in ("load_in_4bit", "load_in_8bit")
    ),
    *(
        rule
        for key in STREAMING
        for rule in (
            Rule(
                key,
                "nobody counts the rows, so epochs have no end",
                "set max_steps",
                broken=lambda s: (s.value("max_steps") or -1) < 1,
            ),
            *(
                Rule(key, f"{other} needs all rows before the first step", "leave one out", _all_set(other))
                for other in ("packing", "eval_split_size", "drop_incomplete")
            ),
            Rule(
                key,
                "group_by_length needs all rows before the first step",
                "leave one out",
                lambda s: s.value("train_sampling_strategy") == "group_by_length",
            ),
            Rule(
                key,
                "one worker reads the stream",
                "dataloader_num_workers: 1",
                broken=lambda s: (s.value("dataloader_num_workers") or 0) > 1,
            ),
        )
    ),
    Rule(
        "hub_strategy",
        "the hub gets final/ alone, at the end",
        "hub_strategy: end; publish uploads checkpoints, to object storage",
        broken=lambda s: s.value("hub_strategy") in ("checkpoint", "all_checkpoints"),
    ),
    Rule("ignore_data_skip", "a resumed run would train on rows that it has seen", "remove it"),
)
