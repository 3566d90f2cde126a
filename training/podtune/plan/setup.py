"""A training as the planner sees it: checked, and divided over its ranks. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import get_args

from podtune.plan.shapes import Checkpointing, Opaque, Shape, Transformer
from podtune.run.errors import UsageError, unknown

DATA_PARALLEL = ("ddp", "fsdp", "fsdp-grad-op", "hsdp", "zero2", "zero3")
FULLY_SHARDED = ("fsdp", "fsdp-grad-op", "hsdp")
PIPELINES = ("gpipe", "pipeline-gpipe", "pipeline-1f1b")
OFFLOADED = ("fsdp-offload", "zero3-offload")
COMPOSED = (*OFFLOADED, "tensor+fsdp")  # planned as another strategy, and what they add to it
# what these formulas cover
PLANNED = ("single", *DATA_PARALLEL, "naive-mp", *PIPELINES, "tensor", *COMPOSED)
RANKS_PER_NODE = 8


@dataclass(frozen=True)
class TrainingSetup:
    """One training: a model's shape, how it is distributed, and what decides its memory and traffic.

    Args:
        batch_size: sequences or images a step over **all** ranks and accumulation steps (the global batch).
        nodes: machines; by default one for every eight ranks.
        micro_batches: of the pipeline strategies; by default the most up to 8 that divide the batch.
        lora_r: LoRA of this rank on every linear map of every layer, kept in 32 bits; the rest is frozen.
        lora_dropout: dropout of the adapters' inputs.
        quantized: QLoRA, the frozen linear maps in four bits and the adapters in 16.
        fused_head: the loss projects tile by tile and never holds logits, as a fine-tune on a GPU does.
        shard_size: of hsdp and tensor+fsdp, the ranks of a group; by default a machine's or half of one.
    """

    shape: Shape
    strategy: str
    world_size: int
    precision: str = "bf16-mixed"
    batch_size: int = 8
    nodes: int | None = None
    micro_batches: int | None = None
    accumulation: int = 1
    activation_checkpointing: Checkpointing = "none"
    optimizer: str = "adamw"
    lora_r: int | None = None
    lora_dropout: float = 0.0
    quantized: bool = False
    fused_head: bool = False
    shard_size: int | None = None

    @property
    def machines(self) -> int:
        """``nodes``, or its default."""
        return self.nodes or math.ceil(self.world_size / RANKS_PER_NODE)

    @property
    def pieces(self) -> int:
        """Micro-batches of a pipeline; 1 of anything else."""
        if self.strategy not in PIPELINES:
            return 1
        return self.micro_batches or max(n for n in range(1, 9) if self.batch_size % n == 0)

    @property
    def trained(self) -> int:
        """Parameters that have gradients."""
        if self.lora_r is None or not isinstance(self.shape, Transformer):
            return self.shape.parameters
        return self.shape.lora_parameters(self.lora_r)

    @property
    def width(self) -> float:
        """Bytes of an activation or of a weight that is computed with."""
        return 4.0 if self.precision == "fp32" else 2.0

    @property
    def master_width(self) -> float:
        """Bytes of a weight as it is kept and of a gradient as it is reduced: under autocast fp32's."""
        return 4.0 if self.precision.endswith("-autocast") else self.width

    @property
    def stages(self) -> int:
        """Parts into which the layers are cut."""
        return self.world_size if self.strategy in (*PIPELINES, "naive-mp") else 1

    @property
    def replicas(self) -> int:
        """Parts into which the batch is cut."""
        return self.world_size if self.strategy in DATA_PARALLEL else 1

    @property
    def samples(self) -> float:
        """Rows of one forward pass on one rank."""
        return self.batch_size / (self.replicas * self.pieces * self.accumulation)

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the states."""
        if self.strategy == "hsdp":
            return self.shard_size or self.world_size // max(2, self.machines)
        return self.world_size if self.strategy in DATA_PARALLEL and self.strategy != "ddp" else 1

    @property
    def inner(self) -> TrainingSetup:
        """What a composed strategy adds to: a group of the hybrid with its rows, or what is offloaded."""
        if self.strategy != "tensor+fsdp":
            return replace(self, strategy=self.strategy.removesuffix("-offload"))
        ranks = self.shard_size or self.world_size // max(2, self.machines)
        copies = self.world_size // ranks
        nodes, rows = max(1, self.machines // copies), self.batch_size // copies
        return replace(
            self, strategy="tensor", world_size=ranks, nodes=nodes, batch_size=rows, shard_size=None
        )

    def check(self) -> None:
        """Refuse names and numbers that cannot be, and a world that does not divide what it has to.

        Raises:
            UserError: with the nearest name, or the number that would do.
        """
        if self.strategy not in PLANNED:
            raise unknown("strategy", self.strategy, PLANNED, where="--strategy")
        levels = get_args(Checkpointing)
        if self.activation_checkpointing not in levels:
            flag = "--activation-checkpointing"
            raise unknown("level", self.activation_checkpointing, levels, where=flag)
        for flag, value in {
            "--world-size": self.world_size,
            "--batch-size": self.batch_size,
            "--micro-batches": 1 if self.micro_batches is None else self.micro_batches,
            "--accumulation": self.accumulation,
            "--lora-r": 1 if self.lora_r is None else self.lora_r,
            "--params": self.shape.parameters,
        }.items():
            if value < 1:
                raise UsageError(f"{value} is not a positive number", where=flag, fix="give 1 or more")
        if self.lora_r is not None and not isinstance(self.shape, Transformer):
            raise UsageError(
                "LoRA's size follows from a transformer's layers",
                where="--lora-r",
                fix="give --model of a transformer, or leave it out",
            )
        n = self.world_size
        if self.strategy == "single" and n > 1:
            raise UsageError(
                f"single is one process, not {n}", where="--world-size", fix="give 1, or another strategy"
            )
        if self.strategy in ("hsdp", "tensor+fsdp") and self.shard_size is None and (n < 4 or n % 2):
            raise UsageError(
                f"{self.strategy} works inside a group and between groups, which {n} ranks cannot do",
                where="--world-size",
                fix="give 4 or more, an even number, or another strategy",
            )
        inner = self.inner
        shares = self.world_size // inner.world_size * inner.replicas * self.pieces * self.accumulation
        if self.batch_size % shares:
            above = math.ceil(self.batch_size / shares) * shares
            below = f" or {above - shares}" if above > shares else ""
            raise UsageError(
                f"a batch of {self.batch_size} does not divide into {shares} equal parts",
                where="--batch-size",
                fix=f"give {above}{below}",
            )
        if not isinstance(self.shape, Opaque):
            inner._check_parts()

    def _check_parts(self) -> None:
        shape, n = self.shape, self.world_size
        if self.strategy == "tensor":
            if not isinstance(shape, Transformer):
                what = "tensor divides attention heads, and a ResNet has none"
                raise UsageError(what, where="--strategy", fix="another strategy")
            self._check_divides(shape.heads, "heads")
            self._check_divides(shape.kv_heads, "key and value heads")
        if self.strategy in ("naive-mp", "gpipe") and n > shape.units:
            what = f"{n} ranks cannot share {shape.units} blocks"
            raise UsageError(what, where="--world-size", fix=f"at most {shape.units}")
        if self.strategy.startswith("pipeline"):  # torch's schedules
            self._check_divides(shape.units, "blocks")

    def _check_divides(self, count: int, what: str) -> None:
        if count % self.world_size:
            divisors = ", ".join(str(number) for number in range(1, count + 1) if count % number == 0)
            raise UsageError(
                f"{self.world_size} does not divide {count} {what}",
                where="--world-size",
                fix=f"one of {divisors}",
            )
