"""Costs of a strategy before it is run: memory a rank, bytes on the wire, time a step, and what limits it.

Pure formulas, no torch; :mod:`podtune.plan.memory`, :mod:`podtune.plan.messages` and
:mod:`podtune.plan.shapes` name their sources. The bubble is Huang et al. 2019 (GPipe), section 2.3, for 1F1B
too (Narayanan et al. 2021, section 2.2.1).

It is a plan: peaks times an assumed utilisation, perfect balance, no fragmentation. The report puts it beside
what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from podtune.plan import memory
from podtune.plan.hardware import LINKS, Hardware, Link
from podtune.plan.messages import Collective, collectives
from podtune.plan.setup import OFFLOADED, PIPELINES, PLANNED, TrainingSetup
from podtune.plan.shapes import Opaque, Transformer
from podtune.plan.states import States
from podtune.run.errors import UsageError, UserError

GIB = 2**30
HOST_BANDWIDTH = 204.8e9  # bytes a second of a machine's memory: eight channels of DDR4-3200
# of the peak; well-tuned training shows 0.3 to 0.6 (docs: PaLM 0.46, Llama on H100 0.3 to 0.58)
UTILISATION = 0.4
USABLE = 0.94  # of a device's memory: CUDA's context, NCCL's buffers and fragmentation take the rest
# Backward costs twice a forward pass, so that a second forward pass makes 3 into 4. Selective computes only
# cheap things again.
RECOMPUTE: dict[str, float] = {
    "none": 1.0,
    "selective": 1.02,
    "every-second": 7 / 6,
    "full": 4 / 3,
    "sequential": 4 / 3,
}
# The share of the compute behind which a strategy's messages hide. DDP and ZeRO-2 reduce gradients during the
# backward pass, full sharding gathers and reduces all along. Others' messages sit between dependent products.
SENDS_ACTIVATIONS = ("naive-mp", *PIPELINES, "tensor", "tensor+fsdp")
OVERLAP = {"ddp": 2 / 3, "zero2": 2 / 3, "fsdp-grad-op": 1.0, "fsdp": 1.0, "hsdp": 1.0, "zero3": 1.0}


@dataclass(frozen=True)
class Plan:
    """The estimate for one rank and one step. GiB are 2^30 bytes.

    ``None``: cannot be said without hardware, or without the model's shape; then ``total_gib`` is of what is
    known. ``buffers_gib`` is what is gathered, bucketed or cast for a moment, ``head_gib`` are logits and
    loss, ``host_gib`` what an offload keeps in the machine's memory.
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
    host_gib: float
    bytes_per_step: float | None
    bubble_share: float
    flops_per_step: float
    step_time_s: float | None = None
    hardware: str | None = None
    memory_gib: float | None = None
    fits: bool | None = None
    limited_by: str | None = None


def estimate(
    setup: TrainingSetup,
    hardware: Hardware | None = None,
    *,
    interconnect: Link | None = None,
    utilisation: float = UTILISATION,
) -> Plan:
    """The plan of ``setup``.

    Args:
        hardware: without it there are no times and no verdict.
        interconnect: the slowest link between ranks; by default the hardware's own within a machine, and 100
            Gb Ethernet between machines.
        utilisation: the share of peak FLOP/s that the compute reaches.

    Raises:
        UserError: a name or number that cannot be.
    """
    setup.check()
    known = not isinstance(setup.shape, Opaque)
    inner, sent = setup.inner, collectives(setup)
    states, activations = memory.states(setup), memory.activations(inner)
    head, buffers = memory.head(inner), memory.buffers(inner) + memory.gathered_between(setup)
    host = sum(states) if setup.strategy in OFFLOADED else 0.0
    here = States(0.0, 0.0, 0.0) if host else states
    total = sum(here) + activations + head + buffers
    total -= min(memory.gone_at_update(inner), here.gradients)
    # activations that are sent have a size that only the shape would tell
    hidden = not known and setup.strategy in SENDS_ACTIVATIONS
    plan = Plan(
        strategy=setup.strategy,
        world_size=setup.world_size,
        precision=setup.precision,
        batch_size=setup.batch_size,
        parameters=setup.shape.parameters,
        weights_gib=here.weights / GIB,
        gradients_gib=here.gradients / GIB,
        optimizer_gib=here.optimizer / GIB,
        activations_gib=activations / GIB if known else None,
        head_gib=head / GIB if known else None,
        buffers_gib=buffers / GIB,
        total_gib=total / GIB,
        host_gib=host / GIB,
        bytes_per_step=None if hidden else sum(item.bytes_per_rank for item in sent),
        bubble_share=bubble_share(inner.stages, inner.pieces),
        flops_per_step=_flops(setup),
    )
    if hardware is None:
        return plan
    compute = _rank_flops(inner, _flops(inner)) / (_peak(hardware, setup.precision) * utilisation)
    # the optimizer reads weights, gradients and states and writes them: bound by memory, not arithmetic
    sharing = math.ceil(setup.world_size / setup.machines)  # ranks of a machine, its memory
    compute += 2 * sum(states) / (HOST_BANDWIDTH / sharing if host else hardware.memory_bandwidth)
    exposed = _exposed_s(inner if host else setup, sent, compute, hardware, interconnect)
    if host:  # weights come twice over PCIe, gradients go once
        exposed += (2 * states.weights + states.gradients) / LINKS["pcie4"].bus_bandwidth
    idle = compute * plan.bubble_share / (1 - plan.bubble_share)
    shares = {"compute": compute, "communication": exposed, "bubble": idle}
    fits = total <= hardware.memory_gib * USABLE * GIB
    return replace(
        plan,
        step_time_s=compute + idle + exposed,
        hardware=hardware.name,
        memory_gib=hardware.memory_gib,
        fits=fits,
        limited_by=max(shares, key=shares.__getitem__) if fits else "memory",
    )


def bubble_share(stages: int, micro_batches: int) -> float:
    """The idle share of a pipeline's step, (P-1)/(M+P-1); 1 - 1/P for one micro-batch, as in naive-mp."""
    return (stages - 1) / (micro_batches + stages - 1)


def estimate_all(
    setup: TrainingSetup, hardware: Hardware | None = None, interconnect: Link | None = None
) -> tuple[list[Plan], dict[str, str]]:
    """The plan of every strategy that is possible in ``setup``'s place, and why the others are not."""
    plans, refused = [], {}
    for strategy in PLANNED:
        try:
            plans.append(estimate(replace(setup, strategy=strategy), hardware, interconnect=interconnect))
        except UserError as error:
            if error.where not in ("--world-size", "--strategy", "--batch-size"):
                raise
            refused[strategy] = f"{error.what} ({error.fix})"
    return plans, refused


def _flops(setup: TrainingSetup) -> float:
    """FLOPs of a step on all ranks: LoRA makes no gradients of the weights, checkpointing computes again."""
    lora, again = (2 / 3 if setup.lora_r else 1), RECOMPUTE[setup.activation_checkpointing]
    return setup.shape.flops_per_sample * setup.batch_size * lora * again


def _rank_flops(setup: TrainingSetup, flops: float) -> float:
    """FLOPs of one rank of a step's ``flops``: tensor parallelism repeats the head on every rank."""
    shape = setup.shape
    if setup.strategy == "tensor" and isinstance(shape, Transformer):
        head = 6.0 * shape.vocabulary * shape.hidden * shape.sequence_length * setup.batch_size
        return head + max(0.0, flops - head) / setup.world_size
    return flops / setup.world_size


def _peak(hardware: Hardware, precision: str) -> float:
    peak = hardware.peak(precision)
    if peak is None:
        fix = f"one of {', '.join(hardware.flops)}"
        raise UsageError(f"{hardware.name} has no {precision}", where="--precision", fix=fix)
    return peak


def _exposed_s(
    setup: TrainingSetup, sent: Sequence[Collective], compute_s: float, hardware: Hardware, link: Link | None
) -> float:
    """Seconds of the messages that do not hide behind compute."""
    inside, outside = link or LINKS[hardware.link], link or LINKS["ethernet-100g"]
    # hsdp's rings between machines, one a rank of a machine, share its port
    rings = math.ceil(setup.world_size / setup.machines) if setup.strategy == "hsdp" else 1
    seconds = sum(
        item.seconds(outside, rings) if item.between_nodes else item.seconds(inside) for item in sent
    )
    overlap = OVERLAP.get(setup.strategy, 0.0)
    if not overlap:
        return seconds
    # the last bucket or unit has nothing left to hide behind
    last = seconds / max(1, sum(item.calls for item in sent))
    return max(0.0, seconds - overlap * compute_s, last)
