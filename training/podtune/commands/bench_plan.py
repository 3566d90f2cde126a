"""podtune bench plan: memory, traffic and step time from formulas, before anything runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, cast

import typer

from podtune.commands.options import AsJson
from podtune.plan.hardware import ROWS
from podtune.plan.plan import RECOMPUTE
from podtune.plan.setup import PLANNED
from podtune.plan.states import OPTIMIZERS, PRECISIONS
from podtune.run.errors import UsageError

if TYPE_CHECKING:
    from podtune.plan.hardware import Hardware, Link
    from podtune.plan.plan import Plan
    from podtune.plan.setup import TrainingSetup
    from podtune.plan.shapes import Checkpointing, Shape
    from podtune.report.draw.tables import Value

Model = Annotated[
    str, typer.Option(help="A benchmark model, SmolLM3-3B, or hf:PATH of a folder with a config.json.")
]
BatchSize = Annotated[int | None, typer.Option(help="Sequences or images a step over all processes.")]
Interconnect = Annotated[
    str | None, typer.Option(help="The slowest link: pcie4, nvlink4, 25g, 100g, 400g, ...")
]
Nodes = Annotated[int | None, typer.Option(help="Machines (default: one for every eight processes).")]
Lora = Annotated[
    int | None, typer.Option(help="LoRA's rank, on all linear maps; the other weights are frozen.")
]
Quantized = Annotated[bool, typer.Option("--quantized", help="QLoRA: the frozen weights in 4 bits.")]
FusedHead = Annotated[
    bool, typer.Option("--fused-head", help="No logits; assumed of a fine-tune (LoRA, SmolLM3-3B).")
]


def plan(
    model: Model = "",
    params: Annotated[str, typer.Option(help="The count of parameters alone, for example 7.5e9.")] = "",
    strategy: Annotated[
        str,
        typer.Option(help="A strategy, or all, side by side.", autocompletion=lambda: ["all", *PLANNED]),
    ] = "all",
    world_size: Annotated[int, typer.Option(help="Processes (GPUs) in all.")] = 1,
    precision: Annotated[str, typer.Option(help=f"{', '.join(PRECISIONS)}.")] = "bf16-mixed",
    batch_size: BatchSize = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens a sequence.")] = None,
    hardware: Annotated[
        str, typer.Option(help=f"{', '.join(ROWS)}.", autocompletion=lambda: list(ROWS))
    ] = "L40S",
    interconnect: Interconnect = None,
    nodes: Nodes = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches of the pipelines.")] = None,
    accumulation: Annotated[int, typer.Option(help="Forward and backward passes a step.")] = 1,
    activation_checkpointing: Annotated[str, typer.Option(help=f"{', '.join(RECOMPUTE)}.")] = "none",
    optimizer: Annotated[str, typer.Option(help=f"{', '.join(OPTIMIZERS)}.")] = "adamw",
    lora_r: Lora = None,
    lora_dropout: Annotated[float, typer.Option(help="Dropout of LoRA's inputs.")] = 0.0,
    quantized: Quantized = False,
    fused_head: FusedHead = False,
    as_json: AsJson = False,
) -> None:
    """Memory a rank, bytes on the wire, time a step, what limits it: from formulas, before anything runs.

    \b
    Examples:
      podtune bench plan --model tinygpt-124m --strategy all --world-size 8 --hardware H100
      podtune bench plan --params 7.5e9 --strategy zero3 --world-size 64 --json
      podtune bench plan --model SmolLM3-3B --strategy single --precision bf16 --lora-r 16 --fused-head
      --activation-checkpointing full --batch-size 8 --sequence-length 1024
    """
    from podtune.plan.hardware import hardware_row, link_row
    from podtune.plan.models import plans_a_fine_tune
    from podtune.plan.plan import default_batch_size
    from podtune.plan.setup import TrainingSetup

    shape = _shape(model, params, sequence_length)
    if activation_checkpointing not in RECOMPUTE:
        raise UsageError(
            f"unknown '{activation_checkpointing}'",
            where="--activation-checkpointing",
            fix=f"one of {', '.join(RECOMPUTE)}",
        )
    setup = TrainingSetup(
        shape,
        strategy,
        world_size,
        precision=precision,
        batch_size=default_batch_size(model, world_size, accumulation) if batch_size is None else batch_size,
        nodes=nodes,
        micro_batches=micro_batches,
        accumulation=accumulation,
        activation_checkpointing=cast("Checkpointing", activation_checkpointing),
        optimizer=optimizer,
        lora_r=lora_r,
        lora_dropout=lora_dropout,
        quantized=quantized,
        fused_head=fused_head or plans_a_fine_tune(model, lora_r),
        zero_bucket=True,  # as the benchmark sets DeepSpeed up
    )
    _print(setup, hardware_row(hardware), link_row(interconnect) if interconnect else None, as_json=as_json)


def _shape(model: str, params: str, sequence_length: int | None) -> Shape:
    """The shape of ``--model``, or ``--params`` parameters of unknown shape."""
    from podtune.plan.models import shape_of
    from podtune.plan.shapes import Opaque

    if bool(model) == bool(params):
        raise UsageError(
            "give --model or --params, one of them", where="podtune bench plan", fix="--model tinygpt-124m"
        )
    return shape_of(model, sequence_length) if model else Opaque(_count(params), sequence_length or 1024)


def _print(setup: TrainingSetup, row: Hardware, link: Link | None, *, as_json: bool) -> None:
    """Print the plan of the setup's strategy, or those of all side by side."""
    from podtune.plan.plan import estimate, estimate_all

    if setup.strategy != "all":
        planned = estimate(setup, row, interconnect=link)
        typer.echo(json.dumps(planned.as_json(), indent=2) if as_json else _table([planned]))
        return
    plans, refused = estimate_all(setup, row, link)
    if not plans:
        raise UsageError(next(iter(refused.values())), where="podtune bench plan")
    if as_json:
        typer.echo(json.dumps({"plans": [each.as_json() for each in plans], "impossible": refused}, indent=2))
        return
    typer.echo(_table(plans))
    for name, why in refused.items():
        typer.echo(f"  {name}: not possible here: {why}")
    typer.echo(_advice(plans, setup, row, link))


CLOSE = 1.01  # times the fastest within which formulas see no difference


def _advice(plans: list[Plan], setup: TrainingSetup, row: Hardware, link: Link | None) -> str:
    """The plan to take, or what would hold the model where none fits."""
    from podtune.report.bench.groups import simplicity

    known = [plan for plan in plans if plan.fits and plan.bytes_per_step is not None and plan.step_time_s]
    if not known:
        return _enough(plans, setup, row, link)
    fastest = min(known, key=lambda plan: plan.step_time_s or 0.0)
    close = [plan for plan in known if (plan.step_time_s or 0.0) <= CLOSE * (fastest.step_time_s or 0.0)]
    chosen = min(close, key=lambda plan: simplicity(plan.strategy))
    why = "the fastest that fits" if chosen is fastest else "within 1 % of the fastest that fits, and simpler"
    return f"Take {chosen.strategy}: {why}, by formula."


def _enough(plans: list[Plan], setup: TrainingSetup, row: Hardware, link: Link | None) -> str:
    """How many of the GPUs hold the model, sharded fully, where as many as asked for do not."""
    from dataclasses import replace

    from podtune.plan.plan import estimate

    least = min(plans, key=lambda plan: plan.total_gib)
    text = (
        f"Nothing fits: {least.strategy} needs {least.total_gib:.1f} GiB of {row.name}'s {row.memory_gib:.1f}"
    )
    for times in (2, 4, 8, 16, 32, 64):
        more = replace(
            setup,
            strategy="fsdp",
            world_size=setup.world_size * times,
            batch_size=setup.batch_size * times,
            nodes=None,
        )
        if estimate(more, row, interconnect=link).fits:
            return f"{text}; {more.world_size} of them hold it with fsdp and a batch of {more.batch_size}."
    return f"{text}; smaller batches, LoRA or --activation-checkpointing full take less."


def _count(text: str) -> int:
    """A count such as ``7.5e9``, ``124M`` or ``1.5b``."""
    units = {"k": 1e3, "m": 1e6, "b": 1e9}
    scale = units.get(text[-1:].lower(), 1.0)
    try:
        return int(float(text[:-1] if scale != 1.0 else text) * scale)
    except (ValueError, OverflowError):
        raise UsageError(
            f"'{text}' is not a number", where="--params", fix="for example 7.5e9 or 124M"
        ) from None


def _table(plans: list[Plan]) -> str:
    """The plans side by side, GiB a rank."""
    from podtune.report.draw.tables import Column, Table

    first = plans[0]
    memory = ("weights", "gradients", "optimizer", "activations", "head", "buffers", "total GiB")
    titles = (*memory, "sent/step", "bubble", "step", "fits", "limited by")
    columns = [Column("strategy"), *(Column(title, "right") for title in titles)]
    given = f"{first.parameters:,} parameters, {first.precision}, batch {first.batch_size}"
    where = "no hardware"
    if first.memory_gib is not None:
        where = f"{first.hardware} ({first.memory_gib:.1f} GiB a rank)"
    head = f"{given} over {first.world_size} ranks, on {where}; memory in GiB a rank"
    return "\n".join([head, Table(columns, [_row(plan) for plan in plans]).text()])


def _row(plan: Plan) -> list[Value]:
    parts = (plan.weights_gib, plan.gradients_gib, plan.optimizer_gib, plan.activations_gib)
    memory = (*parts, plan.head_gib, plan.buffers_gib, plan.total_gib)
    return [
        plan.strategy,
        *(None if gib is None else f"{gib:.2f}" for gib in memory),
        None if plan.bytes_per_step is None else _bytes(plan.bytes_per_step),
        f"{plan.bubble_share:.0%}",
        _step(plan),
        None if plan.fits is None else "yes" if plan.fits else "NO",
        plan.limited_by or None,
    ]


def _step(plan: Plan) -> str | None:
    """Three digits: formulas know no more. Without the bytes sent it is the least."""
    if plan.step_time_s is None:
        return None
    least = "at least " if plan.bytes_per_step is None else ""
    return f"{least}{float(f'{plan.step_time_s * 1000:.3g}'):,.10g} ms"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
