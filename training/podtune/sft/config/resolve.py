"""Resolution of checked settings to TRL's dataclasses, for this world and this device."""

from __future__ import annotations

import dataclasses
import enum
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)

from podtune.machine.provenance import provenance
from podtune.run.checkpoint import ResumeKey
from podtune.run.errors import ConfigError
from podtune.run.record import new_record
from podtune.run.world import World
from podtune.sft.config.arguments import ResumeOptions, RunArguments
from podtune.sft.config.hardware import hardware_choices, refuse_unfit
from podtune.sft.config.keys import SECRET, Settings
from podtune.sft.config.strategy import resolve_strategy, solve_batch, strategy_settings
from podtune.sft.data.source import Sources
from podtune.sft.data.tokenizer import load_tokenizer
from podtune.sft.model.end_to_end import Architecture
from podtune.sft.source.model import Origin, explained

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedTokenizerBase


DATACLASSES = (ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig, RunArguments)


@dataclass(frozen=True)
class Arguments:
    """The resolved configuration: TRL's dataclasses and ours; ``training`` is what SFTTrainer gets."""

    script: ScriptArguments
    training: SFTConfig
    model: ModelConfig
    mixture: DatasetMixtureConfig
    run: RunArguments
    sources: Sources
    strategy: str
    notes: tuple[str, ...]  # what was chosen for this hardware, for the start line
    checkpointing_open: bool = False  # the user leaves it to the memory that there is
    liger_open: bool = False  # the user leaves use_liger_kernel to the trial of the first batch

    @property
    def name(self) -> str:
        return str(self.training.run_name)

    @property
    def global_batch_size(self) -> int:
        """Rows of one optimizer step over all processes."""
        training = self.training
        size: int = training.per_device_train_batch_size * training.gradient_accumulation_steps
        return size * int(training.world_size)

    @property
    def folder(self) -> Path:
        return Path(self.training.output_dir)

    @property
    def publish_url(self) -> str | None:
        """URL of the run's folder in object storage, if it is published."""
        return f"{self.run.publish.rstrip('/')}/{self.name}" if self.run.publish else None

    def resume_options(self) -> ResumeOptions:
        """Read which checkpoint to resume from."""
        return ResumeOptions.of(self.training.resume_from_checkpoint, self.run)

    def load_tokenizer(self, origin: Origin) -> PreTrainedTokenizerBase:
        """Load the tokenizer with the configuration's changes."""
        training = self.training
        return load_tokenizer(
            origin,
            eos_token=training.eos_token,
            pad_token=training.pad_token,
            chat_template_path=training.chat_template_path,
            trust_remote_code=training.trust_remote_code,
        )

    def model_options(self) -> dict[str, Any]:
        """Make the keywords of :func:`podtune.sft.model.load.load_model`."""
        return {
            "dtype": self.model.dtype or "auto",
            "attn_implementation": self.model.attn_implementation,
            "trust_remote_code": self.training.trust_remote_code,
            "quantization_config": get_quantization_config(self.model),
            "model_init_kwargs": self.training.model_init_kwargs,
        }

    def record(self, world: World, data: dict[str, Any]) -> dict[str, Any]:
        """Make the record of the run as it begins; ``data`` describes its rows."""
        return new_record(
            mode="sft",
            name=self.name,
            config=self.resolved(),
            strategy=self.strategy,
            model=str(self.model.model_name_or_path),
            world_size=world.world_size,
            nnodes=world.nnodes,
            nproc_per_node=world.local_world_size,
            global_batch_size=self.global_batch_size,
            seed=self.training.seed,
            data=data,
            provenance=provenance() if world.is_main else {},
        )

    def peft_config(self, model_type: str) -> PeftConfig | None:
        """Configure the adapter that is trained, if one is: on PEFT's own choice of layers, as with TRL."""
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as CHOSEN

        config = get_peft_config(self.model)
        if config and not (config.target_modules or config.target_parameters) and model_type not in CHOSEN:
            config.target_modules = "all-linear"
        return config

    def resume_key(self, fingerprint: str) -> ResumeKey:
        """Make the key of this run's checkpoints; ``fingerprint`` is that of the token rows."""
        training, scheduler = self.training, self.training.lr_scheduler_type
        return ResumeKey(
            world_size=training.world_size,
            per_device_train_batch_size=training.per_device_train_batch_size,
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            learning_rate=training.learning_rate,
            warmup_steps=training.warmup_steps,
            num_train_epochs=training.num_train_epochs,
            max_steps=training.max_steps,
            seed=training.seed,
            max_length=training.max_length,
            packing=training.packing,
            strategy=self.strategy,
            lr_scheduler_type=str(getattr(scheduler, "value", scheduler)),
            data=fingerprint,
            model=str(self.model.model_name_or_path),
            use_peft=self.model.use_peft,
        )

    def resolved(self) -> dict[str, object]:
        """Return the whole configuration as JSON-ready values, without secrets, for the record."""
        merged: dict[str, object] = {}
        for part in (self.script, self.training, self.model, self.mixture, self.run):
            for item in dataclasses.fields(part):
                if item.name in SECRET:
                    continue
                value = getattr(part, item.name)
                if isinstance(value, enum.Enum):  # also one that is text: its name must not be shown for it
                    value = value.value
                if dataclasses.is_dataclass(value) and not isinstance(value, type):
                    value = dataclasses.asdict(value)
                merged[item.name] = (
                    value if isinstance(value, str | int | float | bool | list | dict | None) else str(value)
                )
        return merged | {
            "global_batch_size": self.global_batch_size,
            "strategy": self.strategy,
            "datasets": [vars(part) for part in self.mixture.datasets],
        }


def continue_adapter(settings: Settings, adapter: Origin) -> Settings:
    """Take LoRA's settings from the ``adapter`` that is trained on. Raises :class:`UserError` for others."""
    if given := [key for key in settings.values if key.startswith(("lora_", "use_dora", "use_rslora"))]:
        raise ConfigError(
            f"{', '.join(given)}: the model is an adapter, which is trained on as it was made",
            where="model_name_or_path",
            fix="leave these out; for a new adapter name the base model, or merge (podtune model merge)",
        )
    with explained(adapter.name, "adapter_config.json"):
        made = json.loads(adapter.file("adapter_config.json").read_text(encoding="utf-8"))
        if made["peft_type"] != "LORA":
            raise ValueError(f"it is of the kind {made['peft_type']}, and LoRA alone is trained on")
        numbers = {"lora_r": int(made["r"]), "lora_alpha": int(made["lora_alpha"])}
        own = {"use_peft": True, **numbers, "lora_dropout": float(made["lora_dropout"])}
    return dataclasses.replace(settings, values=settings.values | own)


def resolve(settings: Settings, world: World, architecture: Architecture | None = None) -> Arguments:
    """Decide batch, strategy and hardware choices, and have TRL's parser make its dataclasses.

    Raises:
        UserError: a batch that does not divide, or what the world, this hardware or TRL refuses.
    """
    values = dict(settings.values)
    if (processes := values.get("num_processes")) and processes != world.world_size:
        raise ConfigError(
            f"num_processes is {processes}, and {world.world_size} processes were started",
            where=settings.source["num_processes"],
            fix=f"start {processes} (torchrun --nproc-per-node, distributed.nodes), or remove the key",
        )
    values |= solve_batch(settings, world)
    strategy = resolve_strategy(values.pop("strategy", "auto"), world)
    values |= strategy_settings(strategy, world)
    refuse_unfit(settings, world)
    chosen, notes = hardware_choices(settings, world, strategy, architecture)
    values |= chosen
    # Ours to decide: the bounds, the screen, and never hiding a NaN behind a zero.
    values.setdefault("run_name", str(values["output_dir"]).rstrip("/").rsplit("/", 1)[-1])
    ours = {
        "ddp_timeout": int(settings.value("timeout_s")),
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
    }
    if without_effect := [key for key, value in ours.items() if values.get(key, value) != value]:
        notes.append(f"without effect: {', '.join(without_effect)}")
    values |= ours
    # transformers has DDP look for them in every step that does not recompute
    values.setdefault("ddp_find_unused_parameters", False)
    # a language model's buffers are constants, and each forward would wait for rank 0
    values.setdefault("ddp_broadcast_buffers", False)
    if values.get("early_stopping_patience"):
        values.setdefault("metric_for_best_model", "loss")
        values["restore_callback_states_from_checkpoint"] = True  # the evaluations counted before a restart
    if world.device_type == "cpu":
        values |= {"use_cpu": True, "dataloader_pin_memory": False}
    parser = TrlParser(DATACLASSES)
    leftover = parser.set_defaults_with_config(**values)
    assert not leftover, f"config_keys.json knows keys that TRL does not: {leftover}"
    try:
        script, training, model, mixture, run = parser.parse_args_into_dataclasses(
            args=[], look_for_args_file=False
        )
    except SystemExit:
        raise ConfigError("TRL refuses the configuration, see above") from None
    except (ValueError, TypeError, ImportError, NotImplementedError) as error:
        raise ConfigError(f"TRL refuses the configuration: {error}") from None
    check_installed(training)
    check_best_metric(training, run.eval_dataset_name)
    if not model.use_peft and (unused := [key for key in values if key.startswith("lora_")]):
        notes.append(f"all parameters trained ({', '.join(unused)} without use_peft has no effect)")
    asked = any(settings.given(key) for key in ("activation_checkpointing", "gradient_checkpointing"))
    liger_open = not settings.given("use_liger_kernel")
    parts = script, training, model, mixture, run
    return Arguments(*parts, settings.sources, strategy, tuple(notes), not asked, liger_open)


def check_best_metric(training: SFTConfig, sets: dict[str, str] | str | None) -> None:
    """Raise :class:`ConfigError` for a metric of none of several ``sets``: transformers chooses by it."""
    metric = training.metric_for_best_model
    if (
        metric
        and isinstance(sets, dict)
        and not metric.removeprefix("eval_").startswith(tuple(f"{name}_" for name in sets))
    ):
        raise ConfigError(
            f"{metric!r} is measured on none of the evaluation sets {', '.join(sets)}",
            where="metric_for_best_model",
            fix=f"name the set, too: eval_{next(iter(sets))}_loss",
        )


def check_installed(training: SFTConfig) -> None:
    """Raise :class:`ConfigError` for a tracker in ``report_to`` that is not installed."""
    from transformers.integrations import get_available_reporting_integrations

    available = get_available_reporting_integrations()
    for tracker in training.report_to:
        if tracker not in available:
            named = ", ".join(available) or "none"
            raise ConfigError(
                f"{tracker!r} is not installed, or no tracker that transformers knows (installed: {named})",
                where="report_to",
                fix="install its package, remove it, or track with --aim_repo FOLDER",
            )
