"""Costs of a strategy before it is run: memory a rank, bytes on the wire, time a step, and what limits it.

Pure formulas, no torch. Sources:

- memory of states: Rajbhandari et al. 2019 (ZeRO), sections 3.1 and 5 (:mod:`podtune.plan.states`): of 16
  bytes a parameter stage 1 divides the optimizer's, stage 2 the gradients' too, stage 3 the weights' too;
- activations: Korthikanti et al. 2022 (:mod:`podtune.plan.shapes`);
- volumes: ring collectives by NVIDIA/nccl-tests' bus bandwidth (doc/PERFORMANCE.md): an all-reduce of S bytes
  over n ranks puts 2 (n-1)/n S on each rank's link, an all-gather or reduce-scatter (n-1)/n S;
- bubble: Huang et al. 2019 (GPipe), section 2.3: (P-1)/(M+P-1), for 1F1B too (Narayanan et al. 2021, section
  2.2.1).

It is a plan: peaks times an assumed utilisation, perfect balance, no fragmentation. The report puts it beside
what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from podtune.plan.hardware import LINKS, Hardware, Link, link_row
from podtune.plan.layout import Layout
from podtune.plan.messages import Collective, collectives
from podtune.plan.models import GLOBAL_BATCH_SIZE
from podtune.plan.setup import PLANNED, TrainingSetup
from podtune.plan.shapes import Opaque
from podtune.plan.states import checkpoint_bytes, whole_states
from podtune.run.errors import UsageError, UserError

GIB = 2**30
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
SENDS_ACTIVATIONS = ("naive-mp", "pipeline-gpipe", "pipeline-1f1b", "tensor")
OVERLAP = {"ddp": 2 / 3, "zero2": 2 / 3, "fsdp-grad-op": 1.0, "fsdp": 1.0, "hsdp": 1.0, "zero3": 1.0}


@dataclass(frozen=True)
class Plan:
    """The estimate for one rank and one step. GiB are 2^30 bytes.

    ``None``: cannot be said without hardware, or without the model's shape; then ``total_gib`` is of what is
    known. ``buffers_gib`` is what is gathered, bucketed or cast for a moment, ``head_gib`` are logits and
    loss, ``checkpoint_gib`` is what a checkpoint takes on the volume, all ranks'.
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
    bytes_per_step: float | None
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
    communication: tuple[Collective, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """All fields as plain values."""
        sent = [{**asdict(item), "bytes_per_rank": item.bytes_per_rank} for item in self.communication]
        return asdict(self) | {"communication": sent}


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
    layout = Layout(setup)
    states = layout.states(whole_states(setup))
    activations, head, buffers = layout.activations(), layout.head(), layout.buffers()
    total = sum(states) + (activations or 0.0) + (head or 0.0) + buffers
    if setup.accumulation == 1:
        # autocast's copies and what a layer kept are gone when its gradients are there
        total -= min(layout.casts() + layout.replaced(), states.gradients)
    sent, flops, times, fits = collectives(layout), _flops(setup), None, None
    if hardware is not None:
        compute = layout.rank_flops(flops) / (_peak(hardware, setup.precision) * utilisation)
        # the optimizer reads weights, gradients and states and writes them: bound by memory, not arithmetic
        compute += 2 * sum(states) / hardware.memory_bandwidth
        times = _times(layout, sent, compute, hardware, interconnect)
        fits = total <= hardware.memory_gib * USABLE * GIB
    return Plan(
        strategy=setup.strategy,
        world_size=setup.world_size,
        precision=setup.precision,
        batch_size=setup.batch_size,
        parameters=setup.shape.parameters,
        weights_gib=states.weights / GIB,
        gradients_gib=states.gradients / GIB,
        optimizer_gib=states.optimizer / GIB,
        activations_gib=None if activations is None else activations / GIB,
        head_gib=None if head is None else head / GIB,
        buffers_gib=buffers / GIB,
        total_gib=total / GIB,
        checkpoint_gib=checkpoint_bytes(setup) / GIB,
        bytes_per_step=_bytes(setup, sent),
        bubble_share=layout.bubble,
        flops_per_step=flops,
        compute_time_s=times.compute if times else None,
        communication_time_s=times.communication if times else None,
        exposed_communication_s=times.exposed if times else None,
        step_time_s=times.step if times else None,
        hardware=hardware.name if hardware else None,
        memory_gib=hardware.memory_gib if hardware else None,
        fits=fits,
        limited_by=None if times is None else "memory" if fits is False else times.limited_by,
        communication=tuple(sent),
    )


def _bytes(setup: TrainingSetup, sent: Sequence[Collective]) -> float | None:
    """Bytes that a rank sends a step; None where it sends activations, whose size the shape would tell."""
    if isinstance(setup.shape, Opaque) and setup.strategy in SENDS_ACTIVATIONS:
        return None
    return sum(item.bytes_per_rank for item in sent)


def _flops(setup: TrainingSetup) -> float:
    """FLOPs of a step on all ranks: LoRA makes no gradients of the weights, checkpointing computes again."""
    lora, again = (2 / 3 if setup.lora_r else 1), RECOMPUTE[setup.activation_checkpointing]
    return setup.shape.flops_per_sample * setup.batch_size * lora * again


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


def default_batch_size(model: str, world_size: int, accumulation: int = 1) -> int:
    """The benchmark's global batch for ``model`` (8 for others), or the next larger that the ranks share."""
    parts = max(1, world_size * accumulation)  # what cannot be is refused by estimate
    return math.ceil(GLOBAL_BATCH_SIZE.get(model, 8) / parts) * parts


def _peak(hardware: Hardware, precision: str) -> float:
    peak = hardware.peak(precision)
    if peak is None:
        fix = f"one of {', '.join(hardware.flops)}"
        raise UsageError(f"{hardware.name} has no {precision}", where="--precision", fix=fix)
    return peak


@dataclass(frozen=True)
class _Times:
    """Seconds of a step: compute, all messages, those that do not hide behind compute, and waiting."""

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
    layout: Layout, sent: Sequence[Collective], compute: float, hardware: Hardware, link: Link | None
) -> _Times:
    setup = layout.setup
    inside, outside = link or link_row(hardware.link), link or LINKS["ethernet-100g"]
    # hsdp's rings between machines, one a rank of a machine, share its port
    rings = math.ceil(setup.world_size / setup.machines) if setup.strategy == "hsdp" else 1
    communication = sum(
        item.seconds(outside, rings) if item.between_nodes else item.seconds(inside) for item in sent
    )
    overlap = OVERLAP.get(setup.strategy, 0.0)
    exposed = max(0.0, communication - overlap * compute)
    if communication and overlap:  # the last bucket or unit has nothing left to hide behind
        exposed = max(exposed, communication / max(1, sum(item.calls for item in sent)))
    idle = compute * layout.bubble / (1 - layout.bubble)
    return _Times(compute, communication, exposed, idle)
