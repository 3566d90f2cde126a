"""A training as the planner sees it, checked. Needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from podtune.plan.shapes import Checkpointing, Opaque, Shape, Transformer
from podtune.run.errors import UsageError, near

DATA_PARALLEL = ("ddp", "fsdp", "fsdp-grad-op", "hsdp", "zero2", "zero3")
FULLY_SHARDED = ("fsdp", "fsdp-grad-op", "hsdp")
PIPELINES = ("pipeline-gpipe", "pipeline-1f1b")
PLANNED = ("single", *DATA_PARALLEL, "naive-mp", *PIPELINES, "tensor")  # what these formulas cover
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
        bucket_view: ddp's gradients are views of its buckets (``gradient_as_bucket_view``).
        zero_bucket: ZeRO's gradients are gathered in a bucket of DeepSpeed's default size.
        shard_size: of hsdp, the ranks that share one copy; by default a machine's.
        gradient_bytes: width of the gradients on the wire, where it differs from the precision's.
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
    bucket_view: bool = True
    zero_bucket: bool = False
    shard_size: int | None = None
    gradient_bytes: float | None = None

    @property
    def machines(self) -> int:
        """``nodes``, or its default."""
        return self.nodes or math.ceil(self.world_size / RANKS_PER_NODE)

    @property
    def pieces(self) -> int:
        """``micro_batches``, or its default."""
        return self.micro_batches or max(n for n in range(1, 9) if self.batch_size % n == 0)

    @property
    def trained(self) -> int:
        """Parameters that have gradients."""
        return self.shape.parameters if self.lora_r is None else self.shape.lora_parameters(self.lora_r)

    def check(self) -> None:
        """Refuse names and numbers that cannot be, and a world that does not divide what it has to.

        Raises:
            UserError: with the nearest name, or the number that would do.
        """
        if self.strategy not in PLANNED:
            raise UsageError(
                f"unknown strategy '{self.strategy}'{near(self.strategy, PLANNED)}",
                where="--strategy",
                fix=f"one of {', '.join(PLANNED)}",
            )
        for flag, value in {
            "--world-size": self.world_size,
            "--batch-size": self.batch_size,
            "--micro-batches": self.pieces,
            "--accumulation": self.accumulation,
            "--lora-r": 1 if self.lora_r is None else self.lora_r,
            "--params": self.shape.parameters,
        }.items():
            if value < 1:
                raise UsageError(f"{value} is not a positive number", where=flag, fix="give 1 or more")
        if self.strategy == "single" and self.world_size > 1:
            raise UsageError(
                f"single is one process, not {self.world_size}",
                where="--world-size",
                fix="give 1, or another strategy",
            )
        self._check_batch()
        if not isinstance(self.shape, Opaque):
            self._check_parts()
        n = self.world_size
        if self.strategy == "hsdp" and self.shard_size is None and (n < 4 or n % 2):
            raise UsageError(
                f"hsdp shards inside a group and replicates between groups, which {n} ranks cannot do",
                where="--world-size",
                fix="give 4 or more, an even number, or another strategy",
            )

    def _check_batch(self) -> None:
        ranks = self.world_size if self.strategy in DATA_PARALLEL else 1
        shares = self.accumulation * (self.pieces if self.strategy in PIPELINES else ranks)
        if self.batch_size % shares:
            above = math.ceil(self.batch_size / shares) * shares
            below = f" or {above - shares}" if above > shares else ""
            raise UsageError(
                f"a batch of {self.batch_size} does not divide into {shares} equal parts",
                where="--batch-size",
                fix=f"give {above}{below}",
            )

    def _check_parts(self) -> None:
        shape = self.shape
        if self.strategy == "tensor":
            if not isinstance(shape, Transformer):
                raise UsageError(
                    "tensor divides attention heads, and a ResNet has none",
                    where="--strategy",
                    fix="another strategy",
                )
            self._check_divides(shape.heads, "heads")
            self._check_divides(shape.kv_heads, "key and value heads")
        if self.strategy == "naive-mp" and self.world_size > shape.units:
            raise UsageError(
                f"{self.world_size} ranks cannot share {shape.units} blocks",
                where="--world-size",
                fix=f"at most {shape.units}",
            )
        if self.strategy in PIPELINES:
            self._check_divides(shape.units, "blocks")

    def _check_divides(self, count: int, what: str) -> None:
        if count % self.world_size:
            divisors = ", ".join(str(number) for number in range(1, count + 1) if count % number == 0)
            raise UsageError(
                f"{self.world_size} does not divide {count} {what}",
                where="--world-size",
                fix=f"one of {divisors}",
            )
