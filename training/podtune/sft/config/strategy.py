"""One flag for how the work is distributed, mapped to what accelerate, FSDP2 and DeepSpeed are told."""

from __future__ import annotations

from typing import Any

from podtune.machine.building import deepspeed_that_builds_nothing
from podtune.run.distributed import World
from podtune.run.errors import ConfigError, Unavailable


def resolve_strategy(name: str, world: World) -> str:
    """The strategy that really runs: ``auto`` is decided, and one process is always ``single``.

    Raises:
        UserError: the strategy cannot hold in this world, or DeepSpeed is not installed.
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
    if name in ("zero2", "zero3"):
        require_deepspeed(world)
    return name


def require_deepspeed(world: World) -> None:
    """Check that DeepSpeed can work here, and let it see the process group that is already open.

    Without that it takes the world for one process when ZeRO-3 splits the weights while they are loaded.
    """
    import importlib.util

    if importlib.util.find_spec("deepspeed") is None:
        raise Unavailable(
            "DeepSpeed is not installed", where="strategy", fix="pip install 'podtune[deepspeed]'"
        )
    backend = "gloo" if world.device_type == "cpu" else "nccl"
    deepspeed_that_builds_nothing().init_distributed(
        dist_backend=backend, auto_mpi_discovery=False, verbose=False
    )


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
    if strategy in ("zero2", "zero3"):
        return {"deepspeed": zero_config(int(strategy[-1]))}
    return {}


def zero_config(stage: int) -> dict[str, Any]:
    """A DeepSpeed configuration for ZeRO ``stage``; transformers fills in every "auto"."""
    config: dict[str, Any] = {
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": "auto",
        },
        "zero_allow_untested_optimizer": True,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "steps_per_print": 10**9,
    }
    if stage == 3:
        config["zero_optimization"] |= {
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    return config
