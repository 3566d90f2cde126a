"""The batch of one process, solved from the batch of all. Needs no torch."""

from __future__ import annotations

from podtune.run.errors import ConfigError
from podtune.run.world import World
from podtune.sft.config.keys import Settings


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
