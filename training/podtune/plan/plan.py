"""What a strategy costs before it is run: memory a rank, bytes on the wire, time a step, and what limits it.

Pure formulas, no torch. Sources:

- memory of states: Rajbhandari et al. 2019 (ZeRO), sections 3.1 and 5: with K = 12 for Adam in mixed
  precision, 16 bytes a parameter, of which stage 1 divides the optimizer's, stage 2 the gradients' too, stage
  3 the weights' too;
- activations: Korthikanti et al. 2022 (see :mod:`podtune.plan.shapes`);
- volumes: ring collectives as NVIDIA/nccl-tests reckons bus bandwidth (doc/PERFORMANCE.md): an all-reduce of
  S bytes over n ranks puts 2 (n-1)/n S on each rank's link, an all-gather or reduce-scatter (n-1)/n S;
- bubble: Huang et al. 2019 (GPipe), section 2.3: (P-1)/(M+P-1), for 1F1B too (Narayanan et al. 2021, section
  2.2.1).

It is a plan: peaks times an assumed utilisation, perfect balance, no fragmentation. The report puts it beside
what was measured.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from podtune.plan.hardware import LINKS, Hardware, Link, link_row
from podtune.plan.layout import DATA_PARALLEL, PIPELINES, PLANNED, Collective, Layout
from podtune.plan.models import GLOBAL_BATCH_SIZE
from podtune.plan.shapes import Checkpointing, Opaque, Shape, Transformer
from podtune.run.errors import UsageError, UserError, near

GIB = 2**30

# Bytes a parameter: weights, gradients, and of the optimizer the fp32 copy of the weights and each of Adam's
# two moments. "mixed" is the ZeRO paper's: 16-bit weights with an fp32 copy. "autocast" is PyTorch's: fp32
# weights, 16-bit products; the same 16 bytes, differently spread. Plain bf16 keeps everything in bf16.
_BYTES: dict[str, tuple[float, float, float, float]] = {
    "fp32": (4, 4, 0, 4),
    "bf16": (2, 2, 0, 2),
    "bf16-mixed": (2, 2, 4, 4),
    **dict.fromkeys(("bf16-autocast", "fp16-autocast", "fp8-autocast"), (4.0, 4.0, 0.0, 4.0)),
    "fp16-mixed": (2, 2, 4, 4),
    "fp8-mixed": (2, 2, 4, 4),
}
PRECISIONS = tuple(_BYTES)
# How many moments, and their bytes where these are not the precision's. 8-bit ones (Dettmers et al. 2021)
# come with a 4-byte scale for each block of 256; Adafactor (Shazeer and Stern 2018) keeps rows' and columns'
# sums.
_MOMENTS: dict[str, tuple[int, float | None]] = {
    "adamw": (2, None),
    "adamw-8bit": (2, 1 + 4 / 256),
    "adafactor": (0, None),
    "sgd": (1, None),
}
OPTIMIZERS = tuple(_MOMENTS)
# QLoRA (Dettmers et al. 2023): four bits a weight of the linear maps and a 4-byte scale for each 64 of them.
_QUANTIZED = 0.5 + 4 / 64

# of the peak; well-tuned training shows 0.3 to 0.6 (docs: PaLM 0.46, Llama on H100 0.3 to 0.58)
UTILISATION = 0.4
USABLE = 0.94  # of a device's memory: CUDA's context, NCCL's buffers and fragmentation take the rest
RANKS_PER_NODE = 8


@dataclass(frozen=True)
class Plan:
    """The estimate for one rank and one step. GiB are 2^30 bytes. ``None``: cannot be said without hardware,
    or without the model's shape; then ``total_gib`` is of what is known.

    ``buffers_gib`` is what is gathered, bucketed or cast for a moment, ``head_gib`` are logits and loss,
    ``checkpoint_gib`` is what a checkpoint takes on the volume, all ranks'.
    """

    strategy: str
    world_size: int
    precision: str
    batch_size: int
    parameters: int
    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float | None
    head_gib: float | None
    buffers_gib: float
    total_gib: float
    checkpoint_gib: float
    bytes_per_step: float
    bubble_share: float
    flops_per_step: float
    compute_time_s: float | None
    communication_time_s: float | None
    exposed_communication_s: float | None
    step_time_s: float | None
    hardware: str | None
    memory_gib: float | None
    fits: bool | None
    limited_by: str | None
    communication: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)


def state_bytes(precision: str, optimizer: str = "adamw") -> tuple[float, float, float]:
    """Bytes a trained parameter: weights, gradients, optimizer state (with mixed precision's fp32 copy of the
    weights).

    Raises:
        UserError: unknown precision or optimizer.
    """
    if precision not in _BYTES:
        raise UsageError(
            f"unknown precision '{precision}'{near(precision, PRECISIONS)}",
            where="--precision",
            fix=f"one of {', '.join(PRECISIONS)}",
        )
    if optimizer not in _MOMENTS:
        optimizers = tuple(_MOMENTS)
        raise UsageError(
            f"unknown optimizer '{optimizer}'{near(optimizer, optimizers)}",
            where="--optimizer",
            fix=f"one of {', '.join(optimizers)}",
        )
    weights, gradients, copy, moment = _BYTES[precision]
    count, width = _MOMENTS[optimizer]
    return weights, gradients, copy + count * (moment if width is None else width)


def estimate(
    shape: Shape,
    *,
    strategy: str,
    world_size: int,
    precision: str = "bf16-mixed",
    batch_size: int = 8,
    hardware: Hardware | None = None,
    interconnect: Link | None = None,
    nodes: int | None = None,
    micro_batches: int | None = None,
    accumulation: int = 1,
    activation_checkpointing: Checkpointing = "none",
    optimizer: str = "adamw",
    lora_r: int | None = None,
    lora_dropout: float = 0.0,
    lora_cast: bool = False,
    quantized: bool = False,
    fused_head: bool = False,
    bucket_view: bool = True,
    zero_bucket: bool = False,
    shard_size: int | None = None,
    gradient_bytes: float | None = None,
    utilisation: float = UTILISATION,
) -> Plan:
    """The plan for training ``shape`` with ``strategy``.

    Args:
        batch_size: sequences or images a step over **all** ranks and accumulation steps (the global batch).
        hardware: without it there are no times and no verdict.
        interconnect: the slowest link between ranks; by default the hardware's own within a machine, and 100
            Gb Ethernet between ``nodes`` machines.
        nodes: machines; by default one for every eight ranks.
        micro_batches: of the pipeline strategies; by default the most up to 8 that divide the batch.
        lora_r: LoRA of this rank on every linear map of every layer, kept in 32 bits; the rest is frozen.
        lora_dropout, lora_cast: its dropout; whether PEFT casts each adapter's input to 32 bits.
        quantized: QLoRA, the frozen linear maps in four bits and the adapters in 16.
        fused_head: the loss projects tile by tile and never holds logits, as a fine-tune on a GPU does.
        bucket_view: ddp's gradients are views of its buckets (``gradient_as_bucket_view``).
        zero_bucket: ZeRO's gradients are gathered in a bucket of DeepSpeed's default size.
        shard_size: of hsdp, the ranks that share one copy; by default a machine's.
        gradient_bytes: width of the gradients on the wire, where it differs from the precision's.
        utilisation: the share of peak FLOP/s that the compute reaches.

    Raises:
        UserError: a name or number that cannot be.
    """
    micro_batches = micro_batches or max(count for count in range(1, 9) if batch_size % count == 0)
    check_numbers(shape, strategy, world_size, batch_size, micro_batches, accumulation, lora_r)
    if strategy == "hsdp" and shard_size is None:
        _check_groups(world_size)
    nodes = nodes or math.ceil(world_size / RANKS_PER_NODE)
    ranks_per_node = math.ceil(world_size / nodes)
    layout = Layout(
        shape,
        strategy,
        world_size,
        nodes,
        precision,
        batch_size,
        micro_batches,
        accumulation,
        activation_checkpointing,
        fused_head,
        lora_r,
        lora_dropout,
        lora_cast,
        bucket_view,
        shard_size,
        zero_bucket,
    )
    trained = shape.parameters if lora_r is None else shape.lora_parameters(lora_r)
    kept_states = _states(shape, precision, optimizer, lora_r, quantized)
    weights, gradients, states = layout.states(kept_states)
    activations, head, buffers = layout.activations(), layout.head(), layout.buffers(trained)
    collectives = layout.collectives(trained, gradient_bytes)
    total = weights + gradients + states + (activations or 0.0) + (head or 0.0) + buffers
    if accumulation == 1:  # autocast's copies are gone before the gradients are there
        total -= min(layout.casts(), gradients)
    bubble = layout.bubble
    flops = (
        shape.flops_per_sample * batch_size * (2 / 3 if lora_r else 1) * RECOMPUTE[activation_checkpointing]
    )
    times = None
    if hardware is not None:
        peak = hardware.peak(precision)
        if peak is None:
            raise UsageError(
                f"{hardware.name} has no {precision}",
                where="--precision",
                fix=f"one of {', '.join(hardware.flops)}",
            )
        compute = layout.rank_flops(flops) / (peak * utilisation)
        # the optimizer reads weights, gradients and states and writes them back: bound by memory, not by
        # arithmetic
        compute += 2 * (weights + gradients + states) / hardware.memory_bandwidth
        times = _times(layout, collectives, compute, hardware, interconnect, ranks_per_node)
    memory = None if hardware is None else hardware.memory_gib
    fits = None if memory is None else total <= memory * USABLE * GIB
    return Plan(
        strategy=strategy,
        world_size=world_size,
        precision=precision,
        batch_size=batch_size,
        parameters=shape.parameters,
        weights_gib=weights / GIB,
        gradients_gib=gradients / GIB,
        optimizer_gib=states / GIB,
        activations_gib=None if activations is None else activations / GIB,
        head_gib=None if head is None else head / GIB,
        buffers_gib=buffers / GIB,
        total_gib=total / GIB,
        checkpoint_gib=_checkpoint_bytes(shape, strategy, kept_states, lora_r) / GIB,
        bytes_per_step=sum(item.bytes_per_rank for item in collectives),
        bubble_share=bubble,
        flops_per_step=flops,
        compute_time_s=times.compute if times else None,
        communication_time_s=times.communication if times else None,
        exposed_communication_s=times.exposed if times else None,
        step_time_s=times.step if times else None,
        hardware=hardware.name if hardware else None,
        memory_gib=memory,
        fits=fits,
        limited_by=None if times is None else "memory" if fits is False else times.limited_by,
        communication=[{**asdict(item), "bytes_per_rank": item.bytes_per_rank} for item in collectives],
    )


def _states(
    shape: Shape, precision: str, optimizer: str, lora_r: int | None, quantized: bool
) -> tuple[float, float, float]:
    """Bytes of all weights, of their gradients and of the optimizer's states, before anything is divided."""
    weight, gradient, state = state_bytes(precision, optimizer)
    if lora_r is not None:
        adapters = shape.lora_parameters(lora_r)
        # adapters of 16-bit weights are kept in 32 bits (PEFT), those of quantised ones in 16 (TRL)
        width = 2.0 if quantized else 4.0
        frozen = shape.parameters * weight
        if quantized:
            frozen -= shape.divisible * (weight - _QUANTIZED)
        states = adapters * (_MOMENTS[optimizer][1] or width) * _MOMENTS[optimizer][0]
        return frozen + adapters * width, adapters * width, states
    states = shape.parameters * state
    if isinstance(shape, Transformer):
        if optimizer == "adamw-8bit":  # bitsandbytes keeps an embedding's moments in 32 bits
            states += shape.vocabulary * shape.hidden * 2 * (4 - (_MOMENTS[optimizer][1] or 0))
        if optimizer == "adafactor":
            states += 4.0 * (shape.lora_parameters(1) + shape.vocabulary + shape.hidden)
    return shape.parameters * weight, shape.parameters * gradient, states


def _checkpoint_bytes(
    shape: Shape, strategy: str, states: tuple[float, float, float], lora_r: int | None
) -> float:
    """Weights and optimizer of a checkpoint on the volume. Under full sharding accelerate writes the weights
    twice, in two formats, each with a tied head twice.
    """
    weights, gradients, optimizer = states
    if lora_r is not None:
        return gradients + optimizer  # the adapters are as large as their gradients
    if strategy in ("fsdp", "fsdp-grad-op", "hsdp"):
        if isinstance(shape, Transformer) and shape.tied:
            weights += weights / shape.parameters * shape.vocabulary * shape.hidden
        return 2 * weights + optimizer
    return weights + optimizer


def _check_groups(world_size: int) -> None:
    if world_size < 4 or world_size % 2:
        raise UsageError(
            f"hsdp shards inside a group and replicates between groups, which {world_size} ranks cannot do",
            where="--world-size",
            fix="give 4 or more, an even number, or another strategy",
        )


def estimate_all(shape: Shape, **settings: Any) -> tuple[list[Plan], dict[str, str]]:
    """The plan of every strategy that is possible with ``settings`` (as :func:`estimate` takes them), and why
    the others are not.
    """
    plans, refused = [], {}
    for strategy in PLANNED:
        try:
            plans.append(estimate(shape, strategy=strategy, **settings))
        except UserError as error:
            if error.where not in ("--world-size", "--strategy", "--batch-size"):
                raise
            refused[strategy] = f"{error.what} ({error.fix})"
    return plans, refused


def default_batch_size(model: str, world_size: int, accumulation: int = 1) -> int:
    """The benchmark's global batch for ``model`` (8 for others), made larger where the ranks could not share
    it evenly.
    """
    parts = max(1, world_size * accumulation)  # what cannot be is refused by estimate
    return math.ceil(GLOBAL_BATCH_SIZE.get(model, 8) / parts) * parts


# Backward costs twice a forward pass, so that a second forward pass makes 3 into 4. Selective computes only
# cheap things again.
RECOMPUTE: dict[str, float] = {
    "none": 1.0,
    "selective": 1.02,
    "every-second": 7 / 6,
    "full": 4 / 3,
    "sequential": 4 / 3,
}


@dataclass(frozen=True)
class _Times:
    compute: float
    communication: float
    exposed: float
    idle: float

    @property
    def step(self) -> float:
        return self.compute + self.idle + self.exposed

    @property
    def limited_by(self) -> str:
        shares = {"compute": self.compute, "communication": self.exposed, "bubble": self.idle}
        return max(shares, key=lambda name: shares[name])


def _times(
    layout: Layout,
    collectives: list[Collective],
    compute: float,
    hardware: Hardware,
    link: Link | None,
    ranks_per_node: int,
) -> _Times:
    """Compute, waiting and what of the communication does not hide behind compute.

    DDP and ZeRO-2 reduce gradients during the backward pass (two thirds of the compute), full sharding
    gathers and reduces all along; what is left over shows. Tensor parallelism's reductions sit between
    dependent products: nothing hides there.
    """
    inside = link or link_row(hardware.link)
    outside = link or LINKS["ethernet-100g"]
    communication = sum(
        item.seconds(
            outside if item.between_nodes else inside,
            ranks_per_node if layout.strategy == "hsdp" and item.between_nodes else 1,
        )
        for item in collectives
    )
    hidden_by = {"ddp": 2 / 3, "zero2": 2 / 3, "fsdp-grad-op": 1.0, "fsdp": 1.0, "hsdp": 1.0, "zero3": 1.0}
    overlap = hidden_by.get(layout.strategy, 0.0)
    exposed = max(0.0, communication - overlap * compute)
    if communication and overlap:  # the last bucket or unit has nothing left to hide behind
        exposed = max(exposed, communication / max(1, sum(item.calls for item in collectives)))
    idle = compute * layout.bubble / (1 - layout.bubble)
    return _Times(compute, communication, exposed, idle)


def check_numbers(
    shape: Shape,
    strategy: str,
    world_size: int,
    batch_size: int,
    micro_batches: int,
    accumulation: int = 1,
    lora_r: int | None = None,
) -> None:
    """Refuse names and numbers that cannot be, and a world that does not divide what the strategy divides.

    Raises:
        UserError: with the nearest name, or the number that would do.
    """
    if strategy not in PLANNED:
        raise UsageError(
            f"unknown strategy '{strategy}'{near(strategy, PLANNED)}",
            where="--strategy",
            fix=f"one of {', '.join(PLANNED)}",
        )
    numbers = {
        "--world-size": world_size,
        "--batch-size": batch_size,
        "--micro-batches": micro_batches,
        "--accumulation": accumulation,
    }
    for flag, value in {
        **numbers,
        "--lora-r": 1 if lora_r is None else lora_r,
        "--params": shape.parameters,
    }.items():
        if value < 1:
            raise UsageError(f"{value} is not a positive number", where=flag, fix="give 1 or more")
    if strategy == "single" and world_size > 1:
        raise UsageError(
            f"single is one process, not {world_size}",
            where="--world-size",
            fix="give 1, or another strategy",
        )
    shares = accumulation * (
        world_size if strategy in DATA_PARALLEL else micro_batches if strategy in PIPELINES else 1
    )
    if batch_size % shares:
        above = math.ceil(batch_size / shares) * shares
        below = f" or {above - shares}" if above > shares else ""
        raise UsageError(
            f"a batch of {batch_size} does not divide into {shares} equal parts",
            where="--batch-size",
            fix=f"give {above}{below}",
        )
    if isinstance(shape, Opaque):
        return
    if strategy == "tensor":
        if not isinstance(shape, Transformer):
            raise UsageError(
                "tensor divides attention heads, and a ResNet has none",
                where="--strategy",
                fix="another strategy",
            )
        for count, what in ((shape.heads, "heads"), (shape.kv_heads, "key and value heads")):
            _divides(count, world_size, what)
    if strategy == "naive-mp" and world_size > shape.units:
        raise UsageError(
            f"{world_size} ranks cannot share {shape.units} blocks",
            where="--world-size",
            fix=f"at most {shape.units}",
        )
    if strategy in PIPELINES:
        _divides(shape.units, world_size, "blocks")


def _divides(count: int, world_size: int, what: str) -> None:
    if count % world_size:
        would = ", ".join(str(number) for number in range(1, count + 1) if count % number == 0)
        raise UsageError(
            f"{world_size} does not divide {count} {what}", where="--world-size", fix=f"one of {would}"
        )
