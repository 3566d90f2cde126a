"""The strategy and the batch of one process, as what transformers and accelerate are told. Needs no torch."""

from __future__ import annotations

from podtune.run.errors import ConfigError
from podtune.run.world import World
from podtune.sft.config.keys import Settings


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


def strategy_settings(strategy: str, world: World) -> dict[str, object]:
    """The keys of transformers' TrainingArguments that make ``strategy`` happen."""
    if strategy in ("fsdp", "fsdp-grad-op", "hsdp"):
        settings: dict[str, object] = {
            "fsdp": True,
            "fsdp_config": {
                "version": 2,
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                # full shard frees the weights after the forward pass; grad-op keeps them until the backward
                # pass
                "reshard_after_forward": strategy != "fsdp-grad-op",
                # of the weights for final/ and for every reader of a checkpoint; what training continues
                # from is sharded (podtune.sft.train.sharded_state)
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


def solve_batch(settings: Settings, world: World) -> dict[str, int]:
    """Solve the accumulation that makes a step ``global_batch_size`` rows.

    Raises:
        UserError: the rows cannot be split evenly; names sizes that can.
    """
    wanted = settings.values.get("global_batch_size")
    if wanted is None:
        return {}
    if wanted % world.world_size:
        lower = wanted // world.world_size * world.world_size
        raise ConfigError(
            f"global_batch_size {wanted} cannot be split evenly over {world.world_size} processes",
            where=settings.source["global_batch_size"],
            fix="use " + " or ".join(str(size) for size in (lower, lower + world.world_size) if size),
        )
    per_rank = wanted // world.world_size
    divisors = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
    batch = settings.values.get("per_device_train_batch_size")
    accumulation = settings.values.get("gradient_accumulation_steps")
    if batch is None:
        batch = per_rank // accumulation if accumulation else max(size for size in divisors if size <= 8)
    if batch not in divisors or (accumulation and batch * accumulation != per_rank):
        raise ConfigError(
            f"global_batch_size {wanted} is {per_rank} rows for each of {world.world_size} processes, "
            f"which {f'{accumulation} batches' if accumulation else f'batches of {batch}'} do not fill",
            where=settings.source["global_batch_size"],
            fix="per_device_train_batch_size one of " + ", ".join(map(str, divisors)),
        )
    return {"per_device_train_batch_size": batch, "gradient_accumulation_steps": per_rank // batch}
