"""ZeRO (Rajbhandari et al. 2020) by DeepSpeed, the only file that imports it.

``zero2`` cuts gradients and optimizer state over the ranks: with S bytes of weights a rank sends 2 (N-1)/N S.
``zero3`` cuts the weights too and gathers them for forward and for backward: 3 (N-1)/N S (section 7 of the
paper); a tied weight is gathered at each of its two places. ``zero3-offload`` is zero3 with its shards, and
the optimizer, in the memory of the CPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from podtune.bench.options import Options
from podtune.bench.strategies.contract import Batch, SetupContext
from podtune.bench.strategies.step import Arithmetic, mean_over, prepare
from podtune.machine.building import deepspeed_that_builds_nothing
from podtune.run.errors import Unavailable
from podtune.run.world import World

REDUCE_BUCKET = 500_000_000  # DeepSpeed's default


class Zero:
    """Every rank: its share of the rows, and of the states that the stage cuts."""

    def __init__(self, context: SetupContext) -> None:
        world, options = context.world, context.options
        deepspeed = _import_deepspeed(world)
        self.rows = (world.rank, world.world_size)
        self.accumulation = options.accumulation
        self.arithmetic = Arithmetic(context)
        self.model = prepare(context.build_model(), context)
        # the group is there: DeepSpeed would open one without our bounds
        deepspeed.init_distributed(dist_init_required=False)
        self.engine: Any = deepspeed.initialize(
            model=self.model,
            optimizer=context.build_optimizer(self.model.parameters()),
            config=configuration(
                options,
                world,
                sum(p.numel() for p in self.model.parameters()),
                max(sum(p.numel() for p in block.parameters()) for block in self.model.blocks),
                self.arithmetic.dtype,
            ),
            dist_init_required=False,
        )[0]
        self.optimizer = self.engine.optimizer

    def train_step(self, batch: Batch) -> Tensor:
        """DeepSpeed divides by the accumulation, reduces when it is due and steps."""
        losses = []
        for piece in batch.split(self.accumulation):
            with self.arithmetic.autocast():
                loss = self.arithmetic.loss(self.engine(piece.inputs), piece.targets)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach() / self.accumulation)
        return mean_over(torch.stack(losses).sum(), self.rows[1])

    def predict(self, batch: Batch) -> Tensor:
        """DeepSpeed gathers what it has cut."""
        with torch.no_grad(), self.arithmetic.autocast():
            logits: Tensor = self.engine(batch.inputs)
        return logits

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag="zero")

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder), tag="zero")


def configuration(
    options: Options, world: World, parameters: int, largest_block: int, dtype: torch.dtype | None
) -> dict[str, object]:
    """DeepSpeed's configuration: fp32 weights, products under autocast to ``dtype``, as everywhere here."""
    overlap = options.overlap is not False and world.device_type == "cuda"
    zero: dict[str, Any] = {
        "stage": 2,
        "overlap_comm": overlap,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        # a buffer of as many elements, also where the model has fewer
        "reduce_bucket_size": min(REDUCE_BUCKET, parameters),
    }
    if options.strategy == "zero2":
        # reduce every gradient to its owner only, as the paper does
        zero["use_multi_rank_bucket_allreduce"] = False
    else:
        # All weights are cut, also small ones, and let go after forward: stage 3 as the paper has it. What is
        # gathered ahead for backward is not let go, so no more than a block is, and nothing where nothing
        # overlaps.
        zero |= {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
        zero["stage3_prefetch_bucket_size"] = largest_block if overlap else 0
    if options.strategy == "zero3-offload":
        on_cpu = {"device": "cpu", "pin_memory": world.device_type == "cuda"}
        zero |= {"offload_param": on_cpu, "offload_optimizer": on_cpu}
    autocast: dict[str, Any] = {}
    if dtype is not None:
        # Without this section DeepSpeed turns CUDA's autocast off inside the engine. No module is named safe,
        # so that gradients are reduced in fp32.
        name = str(dtype).removeprefix("torch.")
        autocast = {"enabled": True, "dtype": name, "lower_precision_safe_modules": []}
    return {
        **({"torch_autocast": autocast} if autocast else {}),
        "train_batch_size": options.global_batch_size,
        "train_micro_batch_size_per_gpu": options.global_batch_size
        // world.world_size
        // options.accumulation,
        "gradient_accumulation_steps": options.accumulation,
        "zero_optimization": zero,
        "gradient_clipping": 0.0,  # DeepSpeed 0.19 clips at 1.0 unless told otherwise
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # its own has to be compiled; torch's AdamW runs there too
    }


def _import_deepspeed(world: World) -> ModuleType:
    os.environ["DS_ACCELERATOR"] = world.device_type  # one of the environment's would win over the device
    try:
        deepspeed = deepspeed_that_builds_nothing()
    except ImportError as error:
        raise Unavailable(
            f"DeepSpeed cannot be imported: {error}",
            where="--strategy",
            fix="pip install 'podtune[deepspeed]'",
        ) from None
    deepspeed.utils.logger.setLevel("WARNING")
    return deepspeed


setup = Zero
