"""One flag for how the work is distributed, as what transformers and accelerate are told."""

from __future__ import annotations

from typing import Any

from podtune.run.errors import ConfigError
from podtune.run.world import World


def resolve_strategy(name: str, world: World) -> str:
    """The strategy that really runs: ``auto`` is decided, and one process is always ``single``.

    Raises:
        UserError: the strategy cannot hold in this world.
    """
    if world.world_size == 1:
        return "single"
    if name == "auto":
        return "ddp"
    if name == "single":
        raise ConfigError(
            f"strategy is single but {world.world_size} processes were started",
            where="strategy",
            fix="start one process, or --strategy ddp",
        )
    if name == "hsdp" and (world.world_size < 4 or world.world_size % 2):
        raise ConfigError(
            f"hsdp shards inside a group and replicates between groups, which {world.world_size} processes "
            "cannot",
            where="strategy",
            fix="use at least 4 processes, an even number; or --strategy fsdp",
        )
    return name


def strategy_settings(strategy: str, world: World) -> dict[str, Any]:
    """The keys of transformers' TrainingArguments that make ``strategy`` happen."""
    if strategy in ("fsdp", "fsdp-grad-op", "hsdp"):
        settings: dict[str, Any] = {
            "fsdp": True,
            "fsdp_config": {
                "version": 2,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                # full shard frees the weights after the forward pass; grad-op keeps them until the backward
                # pass
                "reshard_after_forward": strategy != "fsdp-grad-op",
                "state_dict_type": "FULL_STATE_DICT",
            },
        }
        if strategy == "hsdp":
            from accelerate.parallelism_config import ParallelismConfig

            groups = world.nnodes if world.nnodes > 1 else 2
            settings["parallelism_config"] = ParallelismConfig(
                dp_replicate_size=groups, dp_shard_size=world.world_size // groups
            )
        return settings
    return {}
