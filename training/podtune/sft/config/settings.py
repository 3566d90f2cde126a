"""The configuration of a fine-tune: defaults < environment < YAML < command line, checked before anything is
imported.

Two steps. :func:`read` needs no torch: it merges the layers and checks every key and value against
``config_keys.json`` (the names, types and choices of TRL's dataclasses and ours, written by
``scripts/config_keys.py``; a test holds it equal), so a typing error is answered in a tenth of a second.
``podtune.sft.config.resolve`` hands the result to TRL's own parser.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podtune.run.errors import ConfigError, NotFound, UsageError, UserError, near
from podtune.sft.data.source import STREAMING, Sources
from podtune.sft.source.object_store import refuse_secret

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
SECRET = ("hub_token", "notify_url")  # never in a message or a record
_LAUNCHER_KEYS = ("config_file", "main_process_ip", "main_process_port", "machine_rank", "num_machines")
RENAMED = {  # keys of older TRL and transformers that people still paste
    "max_seq_length": "max_length",
    "evaluation_strategy": "eval_strategy",
    "torch_dtype": "dtype",
    "warmup_ratio": "warmup_steps (a value below 1 is a share of all steps)",
    "group_by_length": "train_sampling_strategy: group_by_length",
    "overwrite_output_dir": "output_dir (a new one) or auto_resume: false",
    "no_cuda": "use_cpu",
    "tokenizer_name": "model_name_or_path",
    "logging_dir": "output_dir (metrics.jsonl lies there)",
    "save_safetensors": "nothing: checkpoints are always safetensors",
    "chat_template": "chat_template_path (a .jinja file, or a model that has the template)",
    "dataset_mixture": "datasets (a list of path, split, columns)",
    "dataset_id_or_path": "dataset_name",
    "tokenizer_name_or_path": "model_name_or_path",
    "use_liger": "use_liger_kernel",
    "deepspeed": "strategy (fsdp or fsdp-grad-op)",
    **dict.fromkeys(_LAUNCHER_KEYS, "torchrun's own arguments, or distributed.nodes of the chart"),
}
AT_LEAST = {  # smallest value that makes sense; for our own keys arguments.py says it
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
_VALUE_OR_FLAG = ("fsdp", "include_num_input_tokens_seen", "resume_from_checkpoint")  # text, or true
_VALUE_OR_LIST = ("optim_target_modules", "fsdp")  # text, or a list of texts
# Keys of accelerate launch, which TRL's command line takes too; podtune is started by torchrun.
LAUNCHER = {
    "fsdp1": "fsdp",
    "fsdp2": "fsdp",
    "multi_gpu": "ddp",
    "single_gpu": "single",
}
Value = Any


@dataclass(frozen=True)
class Settings:
    """The merged configuration: ``values`` by key, and for each key the layer it came from (for error
    messages).
    """

    values: dict[str, Value] = field(default_factory=dict)
    source: dict[str, str] = field(default_factory=dict)

    def given(self, key: str) -> bool:
        """True if the user set ``key`` in any layer, so that no default of ours may replace it."""
        return key in self.values

    def value(self, key: str) -> Value:
        """What the user set for ``key``, else its default."""
        return self.values[key] if key in self.values else known_keys()[key]["default"]

    @functools.cached_property
    def sources(self) -> Sources:
        """Where the rows come from."""
        return Sources.of(self.values)


@functools.cache
def known_keys() -> dict[str, dict[str, Any]]:
    """Every key with its type, default, choices and the dataclass it belongs to."""
    keys: dict[str, dict[str, Any]] = json.loads(
        Path(__file__).with_name("config_keys.json").read_text(encoding="utf-8")
    )
    for name, least in AT_LEAST.items():
        keys[name]["at_least"] = least
    for name, bound in ABOVE.items():
        keys[name]["above"] = bound
    return keys


@functools.cache
def environment() -> dict[str, str]:
    """The environment variables that are read, and the key that each stands for."""
    ours = {spec["env"]: key for key, spec in known_keys().items() if "env" in spec}
    return ENVIRONMENT | ours


def read(argv: Sequence[str], env: Mapping[str, str] = os.environ) -> Settings:
    """Merge environment, YAML (``--config``) and command line; check keys, types, ranges and contradictions.

    Raises:
        UserError: says which layer, which key, what was found and what would be right.
    """
    command_line, config_file = _command_line(argv)
    if "hub_token" in command_line:
        raise UsageError(
            "--hub_token on a command line is read by everybody who sees the processes or the job",
            where="command line",
            fix="set HF_TOKEN in the environment",
        )
    layers: list[tuple[str, dict[str, Value]]] = []
    # first: its env: may set the variables read next
    content = read_yaml(Path(config_file)) if config_file else {}
    layers += [
        (f"environment variable {name}", {key: env[name]})
        for name, key in environment().items()
        if env.get(name)
    ]
    if config_file:
        layers.append((config_file, content))
    layers.append(("command line", command_line))
    return merged(layers)


def merged(layers: list[tuple[str, dict[str, Value]]]) -> Settings:
    """Layers of keys, each with where it comes from and the last one winning, checked.

    Raises:
        UserError: as :func:`read`.
    """
    for where, layer in layers:
        _refuse_deepspeed(layer, where)
        _launcher_keys(layer, where)
    _check_names(layers)
    values: dict[str, Value] = {}
    source: dict[str, str] = {}
    for where, layer in layers:
        for key, value in layer.items():
            values[key] = convert(key, value, where)
            source[key] = where
    settings = Settings(values, source)
    check(settings)
    return settings


def _refuse_deepspeed(layer: Mapping[str, Value], where: str) -> None:
    for key in ("deepspeed", "strategy", "accelerate_config"):
        value = layer.get(key)
        if value is not None and (key == "deepspeed" or str(value).startswith("zero")):
            raise ConfigError(
                f"{key} is {shown(key, value)}: fine-tunes shard with FSDP; DeepSpeed is the benchmark's",
                where=where,
                fix="--strategy fsdp-grad-op in place of ZeRO-2, --strategy fsdp in place of ZeRO-3",
            )


def _launcher_keys(layer: dict[str, Value], where: str) -> None:
    """accelerate's ready-made configuration as our strategy, and its spelling of the timeout as ours."""
    name = layer.pop("accelerate_config", None)
    if name is not None:
        if name not in LAUNCHER:
            raise ConfigError(
                f"accelerate_config is {name!r}{near(str(name), list(LAUNCHER))}",
                where=where,
                fix=f"one of {', '.join(LAUNCHER)}; or strategy, see --help",
            )
        layer.setdefault("strategy", LAUNCHER[name])
    if "ddp_timeout" in layer:
        layer.setdefault("timeout_s", layer["ddp_timeout"])


def _check_names(layers: list[tuple[str, dict[str, Value]]]) -> None:
    """Refuse unknown keys, all of them at once."""
    lines, places = [], []
    for where, layer in layers:
        for key in layer:
            if key in known_keys():
                continue
            remedy = f": use {RENAMED[key]}" if key in RENAMED else near(key, list(known_keys()))
            lines.append(f"unknown key '{key}'{remedy}")
            places.append(where)
    if lines:
        raise ConfigError(
            "\n    ".join(lines),
            where=", ".join(dict.fromkeys(places)),
            fix="correct the names; python -m podtune.training --help_all lists the keys",
        )


def read_yaml(path: Path) -> dict[str, Value]:
    """The keys of a training YAML. An ``env:`` mapping is put into this process's environment, as TRL
    does.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound("no such file", where=str(path), fix="give --config an existing YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound(f"cannot be read: {error}", where=str(path)) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"not YAML: {getattr(error, 'problem', error)}", where=place) from None
    if not isinstance(content, dict):
        raise ConfigError(
            "holds no mapping of keys to values", where=str(path), fix="write one 'key: value' a line"
        )
    variables = content.pop("env", None) or {}
    if not isinstance(variables, dict):
        raise ConfigError("env is not a mapping of names to values", where=str(path))
    os.environ.update({str(name): str(value) for name, value in variables.items()})
    return content


def _command_line(argv: Sequence[str]) -> tuple[dict[str, Value], str | None]:
    """``--key value``, ``--key=value``, ``--key`` (a flag), ``--no_key``, ``--key a b`` (a list); hyphens as
    underscores.
    """
    words_by_key: dict[str, Value] = {}
    config_file: str | None = None
    key: str | None = None
    for token in argv:
        if token.startswith("--") and len(token) > 2:
            name, has_value, value = token[2:].partition("=")
            key = name.replace("-", "_")
            words_by_key[key] = [value] if has_value else []
        elif key is None:
            raise UsageError(f"unexpected argument {token!r}", where="command line", fix="write --key value")
        else:
            words_by_key[key].append(token)
    values: dict[str, Value] = {}
    for name, words in words_by_key.items():
        if name == "config":
            config_file = words[0] if len(words) == 1 else None
            if len(words) != 1:
                given = f"and has {len(words)}: {', '.join(words)}" if words else "and has none"
                raise UsageError(f"--config takes one file {given}", where="command line")
        elif name not in known_keys() and name.startswith("no_") and name[3:] in known_keys() and not words:
            values[name[3:]] = False
        elif not words:
            spec = known_keys().get(name)
            if spec and spec["type"] != "bool" and name not in _VALUE_OR_FLAG:
                raise UsageError(f"--{name} needs a value", where="command line")
            values[name] = True
        else:
            values[name] = words[0] if len(words) == 1 else words
    return values, config_file


def convert(key: str, value: Value, where: str) -> Value:
    """``value`` in the type of ``key``.

    Raises:
        UserError: a value of another type or outside the choices.
    """
    spec = known_keys()[key]
    if value is None:
        return None
    kind, choices = spec["type"], spec.get("choices")
    if kind in ("int", "float", "bool") and str(value).lower() in ("none", "null"):
        return None  # TRL's command line takes the word
    if (key, value) == ("packing_strategy", "bfd-requeue"):
        return "bfd_split"  # its earlier name
    if isinstance(value, list) and key in _VALUE_OR_LIST:
        return value
    if isinstance(value, list) and kind != "list":
        raise ConfigError(f"{key} takes one value and has {len(value)}: {shown(key, value)}", where=where)
    if value is False and choices and "no" in choices:
        value = "no"  # YAML reads `eval_strategy: no` as false
    try:
        converted = _converters[kind](value)
    except (ValueError, TypeError, SyntaxError):
        raise ConfigError(f"{key} is {shown(key, value)}, not {_names[kind]}", where=where) from None
    if choices and str(converted) not in choices:
        raise ConfigError(
            f"{key} is {value!r}{near(str(converted), choices)}",
            where=where,
            fix="one of " + ", ".join(choices),
        )
    return converted


def shown(key: str, value: Value) -> str:
    """``value`` for a message, which must not have a secret in it."""
    if key in SECRET:
        return "***"
    return ", ".join(map(str, value)) if isinstance(value, list) else repr(value)


def _boolean(value: Value) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word in ("yes", "true", "t", "y", "1"):
        return True
    if word in ("no", "false", "f", "n", "0"):
        return False
    raise ValueError(value)


def _whole(value: Value) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(value)
    return int(value)


def _number(value: Value) -> float:
    if isinstance(value, bool):
        raise ValueError(value)
    return float(value)


def _text(value: Value) -> Value:
    """Text stays text. TRL's fields for mappings are text too (JSON, or a path), so mappings pass."""
    if isinstance(value, dict | bool | int | float):
        return value
    text = str(value)
    return (
        ast.literal_eval(text)
        if text.startswith("{") and "'" in text
        else json.loads(text)
        if text.startswith("{")
        else text
    )


def _items(value: Value) -> list[Value]:
    return list(value) if isinstance(value, list | tuple) else [value]


_converters = {"bool": _boolean, "int": _whole, "float": _number, "str": _text, "list": _items}
_names = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text or a JSON mapping",
    "list": "a list",
}


def check(settings: Settings) -> None:
    """Ranges and contradictions that need neither torch nor the data. Raises :class:`UserError`."""
    values = settings.values

    def wrong(key: str, what: str, fix: str = "") -> UserError:
        return ConfigError(f"{key} is {shown(key, values[key])}: {what}", where=settings.source[key], fix=fix)

    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise wrong(key, "must be a finite number")
    for key, value in values.items():
        spec = known_keys()[key]
        if value is not None and "at_least" in spec and value < spec["at_least"]:
            raise wrong(key, f"must be at least {spec['at_least']}")
        if value is not None and "above" in spec and not value > spec["above"]:
            raise wrong(key, f"must be above {spec['above']}")
    for key, value in values.items():
        for name in [entry.get("path", "") for entry in value] if key == "datasets" else [value]:
            refuse_secret(str(name), f"{settings.source[key]}: {key}")
    if not values.get("model_name_or_path"):
        raise ConfigError(
            "no model is named", where="model_name_or_path", fix="--model_name_or_path FOLDER|HUB_ID"
        )
    if not values.get("dataset_name") and not values.get("datasets"):
        raise ConfigError(
            "no data set is named", where="dataset_name", fix="--dataset_name FILE|FOLDER|HUB_NAME"
        )
    if not values.get("output_dir"):
        raise ConfigError("no output folder is named", where="output_dir", fix="--output_dir FOLDER")
    if values.get("max_steps") is not None and values["max_steps"] != -1 and values["max_steps"] < 1:
        raise wrong("max_steps", "must be at least 1, or -1 to train num_train_epochs")
    if (values.get("eval_split_size") or 0) > 1 and values["eval_split_size"] % 1:
        raise wrong("eval_split_size", "must be a share below 1 or a whole number of rows")
    saves, evaluates = values.get("save_strategy", "steps"), values.get("eval_strategy", "no")
    if values.get("load_best_model_at_end") and saves != "best" and saves != evaluates:
        raise wrong(
            "load_best_model_at_end",
            f"the best is chosen where both are done, but save_strategy is {saves} and eval_strategy is "
            f"{evaluates}",
            f"eval_strategy: {saves if saves != 'no' else 'steps'}",
        )
    if values.get("early_stopping_patience") and evaluates == "no":
        raise wrong(
            "early_stopping_patience",
            "it counts evaluations, and eval_strategy is no",
            "eval_strategy: steps",
        )
    if values.get("early_stopping_threshold") and not values.get("early_stopping_patience"):
        raise wrong("early_stopping_threshold", "it has no effect without early_stopping_patience", "set it")
    if values.get("logging_steps") == 0 and values.get("logging_strategy", "steps") == "steps":
        raise wrong("logging_steps", "must be above 0", "logging_strategy: no leaves the lines out")
    for key, other in (("bf16", "fp16"), ("load_in_4bit", "load_in_8bit")):
        if values.get(key) and values.get(other):
            raise wrong(key, f"{other} is set too, and only one can hold", f"remove {key} or {other}")
    if (
        values.get("global_batch_size")
        and values.get("gradient_accumulation_steps")
        and values.get("per_device_train_batch_size")
    ):
        raise wrong(
            "global_batch_size",
            "it is solved from the batch and the world, but gradient_accumulation_steps is given too",
            "give one",
        )
    if values.get("strategy", "auto") != "auto" and values.get("fsdp"):
        raise wrong("strategy", "fsdp is configured by hand too", "remove strategy, or fsdp")
    if values.get("packing") and values.get("max_length", 1) is None:
        raise wrong("packing", "packing needs max_length")
    if (values.get("load_in_4bit") or values.get("load_in_8bit")) and not values.get("use_peft"):
        raise wrong(
            "load_in_4bit" if values.get("load_in_4bit") else "load_in_8bit",
            "quantised weights cannot be trained in full",
            "--use_peft",
        )
    if values.get("notify_url"):
        from podtune.run.notify import check_url

        check_url(str(values["notify_url"]), settings.source["notify_url"])
    if "aim" in _items(values.get("report_to", "none")):
        raise wrong("report_to", "Aim is not a tracker of transformers", "--aim_repo FOLDER")
    streaming = next((key for key in STREAMING if values.get(key)), None)
    if streaming:
        if (values.get("max_steps") or -1) < 1:
            raise wrong(streaming, "nobody counts the rows, so epochs have no end", "set max_steps")
        needs_all = [key for key in ("packing", "eval_split_size") if values.get(key)]
        if values.get("train_sampling_strategy") == "group_by_length":
            needs_all.append("group_by_length")
        if needs_all:
            raise wrong(streaming, f"{needs_all[0]} needs all rows before the first step", "leave one out")
        if (values.get("dataloader_num_workers") or 0) > 1:
            raise wrong(streaming, "one worker reads the stream", "dataloader_num_workers: 1")
    if values.get("ignore_data_skip"):
        raise wrong("ignore_data_skip", "a resumed run would train on rows that it has seen", "remove it")
    if values.get("enable_jit_checkpoint"):
        raise wrong(
            "enable_jit_checkpoint",
            "podtune saves on SIGTERM by itself, with all ranks at one step",
            "remove it",
        )


def help_text(*, everything: bool = False) -> str:
    """The ``--help`` of the program: our keys and the common ones of TRL, or all."""
    ours = [(key, spec) for key, spec in known_keys().items() if spec["class"] == "RunArguments"]
    lines = [
        "usage: torchrun --nproc-per-node N -m podtune.training [--config FILE.yaml] [--key value ...]",
        "       python -m podtune.training ...                     (one process)",
        "",
        "Supervised fine-tuning of a causal language model through TRL's SFTTrainer. Defaults < environment "
        "< YAML < command line.",
        "",
        "needed:",
        "  --model_name_or_path NAME   a folder, URL or hub id, for example HuggingFaceTB/SmolLM3-3B",
        "  --dataset_name NAME         Parquet, JSONL or CSV file, a folder of them, a saved data set, URL, "
        "or a hub name",
        "  --output_dir DIR            checkpoints, metrics.jsonl, run.json and final/ go there; an "
        "interrupted run resumes",
        "",
        "podtune's own:",
        *(f"  --{key:<26}{spec['help']} [{spec['default']}]" for key, spec in ours),
        "",
        "environment: " + ", ".join(f"{name} ({key})" for name, key in environment().items()),
        "",
        "examples:",
        "  python -m podtune.training --model_name_or_path demo/model --dataset_name demo/data/train.parquet "
        "--output_dir out",
        "  torchrun --nproc-per-node 2 -m podtune.training --config sft.yaml --global_batch_size 32 "
        "--strategy fsdp",
        "",
    ]
    theirs = [(key, spec) for key, spec in known_keys().items() if spec["class"] != "RunArguments"]
    if everything:
        lines.append("TRL's keys (type, default):")
        for key, spec in theirs:
            lines.append(
                (f"  --{key:<42}{spec['type']:<6} {spec['default']}")
                + (f"  {{{','.join(spec['choices'])}}}" if spec.get("choices") else "")
            )
    else:
        lines.append(
            f"TRL's {len(theirs)} keys are all taken (learning_rate, max_length, packing, use_peft, "
            "...): --help_all lists them."
        )
    return "\n".join(lines)
