"""podtune bench plan: memory, traffic and step time from formulas, before anything runs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import Annotated, cast

import typer

from podtune.commands.options import AsJson
from podtune.plan.fit import cheapest_fits
from podtune.plan.hardware import LINKS, ROWS, Hardware, hardware_row
from podtune.plan.models import GLOBAL_BATCH_SIZE, KNOWN, resized, shape_of
from podtune.plan.plan import RECOMPUTE, Plan, estimate, estimate_all
from podtune.plan.setup import PLANNED, TrainingSetup
from podtune.plan.shapes import Checkpointing, Opaque
from podtune.plan.states import OPTIMIZERS, PRECISIONS
from podtune.report.bench.groups import simplicity
from podtune.report.draw.tables import Column, Table, Value
from podtune.run.errors import UsageError, unknown

CLOSE = 1.01  # times the fastest within which formulas see no difference


def plan(
    model: Annotated[
        str, typer.Option(help="A benchmark model, SmolLM3-3B, or hf:PATH of a folder with a config.json.")
    ] = "",
    params: Annotated[
        float, typer.Option(help="The count of parameters alone, for example 7.5e9.", min=0, max=1e15)
    ] = 0,
    layers: Annotated[int, typer.Option(help="Another size of a TinyGPT.", min=0)] = 0,
    heads: Annotated[int, typer.Option(help="Another size of a TinyGPT.", min=0)] = 0,
    width: Annotated[int, typer.Option(help="Another size of a TinyGPT or ResNet.", min=0)] = 0,
    context: Annotated[int, typer.Option(help="Another size of a TinyGPT, in tokens.", min=0)] = 0,
    strategy: Annotated[
        str,
        typer.Option(help="A strategy, or all, side by side.", autocompletion=lambda: ["all", *PLANNED]),
    ] = "all",
    world_size: Annotated[int, typer.Option(help="Processes (GPUs) in all.")] = 1,
    precision: Annotated[str, typer.Option(help=f"{', '.join(PRECISIONS)}.")] = "bf16-mixed",
    batch_size: Annotated[
        int | None, typer.Option(help="Sequences or images a step over all processes.")
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens a sequence.")] = None,
    hardware: Annotated[
        str, typer.Option(help=f"{', '.join(ROWS)}.", autocompletion=lambda: list(ROWS))
    ] = "L40S",
    interconnect: Annotated[str, typer.Option(help=f"The slowest link: {', '.join(LINKS)}.")] = "",
    nodes: Annotated[
        int | None, typer.Option(help="Machines (default: one for every eight processes).")
    ] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches of the pipelines.")] = None,
    accumulation: Annotated[int, typer.Option(help="Forward and backward passes a step.")] = 1,
    activation_checkpointing: Annotated[str, typer.Option(help=f"{', '.join(RECOMPUTE)}.")] = "none",
    optimizer: Annotated[str, typer.Option(help=f"{', '.join(OPTIMIZERS)}.")] = "adamw",
    lora_r: Annotated[
        int | None, typer.Option(help="LoRA's rank, on all linear maps; the other weights are frozen.")
    ] = None,
    quantized: Annotated[
        bool, typer.Option("--quantized", help="QLoRA: the frozen weights in 4 bits.")
    ] = False,
    fused_head: Annotated[
        bool, typer.Option("--fused-head", help="No logits; assumed of a fine-tune (LoRA, SmolLM3-3B).")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Predict memory, bytes on the wire and time from formulas.

    \b
    Examples:
      podtune bench plan --model tinygpt-124m --strategy all --world-size 8 --hardware H100
      podtune bench plan --model tinygpt-124m --layers 60 --heads 52 --width 6656 --world-size 64
      podtune bench plan --params 7.5e9 --strategy zero3 --world-size 64 --json
      podtune bench plan --model SmolLM3-3B --strategy single --precision bf16 --lora-r 16 --fused-head
      --activation-checkpointing full --batch-size 8 --sequence-length 1024
    """
    if bool(model) == bool(params):
        where, fix = "podtune bench plan", "--model tinygpt-124m"
        raise UsageError("give --model or --params, one of them", where=where, fix=fix)
    sizes = {"layers": layers, "heads": heads, "width": width, "context": context}
    if params and any(sizes.values()):
        raise UsageError("has no layers to resize", where="--params", fix="--model tinygpt-124m")
    if interconnect and interconnect not in LINKS:
        raise unknown("interconnect", interconnect, LINKS, where="--interconnect")
    parts = max(1, world_size * accumulation)  # what cannot be is refused by estimate
    setup = TrainingSetup(
        resized(shape_of(model, sequence_length), **sizes)
        if model
        else Opaque(int(params), sequence_length or 1024),
        strategy,
        world_size,
        precision=precision,
        # the benchmark's, or the next larger that the ranks share
        batch_size=math.ceil(GLOBAL_BATCH_SIZE.get(model, 8) / parts) * parts
        if batch_size is None
        else batch_size,
        nodes=nodes,
        micro_batches=micro_batches,
        accumulation=accumulation,
        activation_checkpointing=cast("Checkpointing", activation_checkpointing),
        optimizer=optimizer,
        lora_r=lora_r,
        quantized=quantized,
        fused_head=fused_head or lora_r is not None or model in KNOWN,
    )
    row, link = hardware_row(hardware), LINKS.get(interconnect)
    if strategy != "all":
        planned = estimate(setup, row, interconnect=link)
        typer.echo(json.dumps(asdict(planned), indent=2) if as_json else _table([planned]))
        return
    plans, refused = estimate_all(setup, row, link)
    if not plans:
        raise UsageError(next(iter(refused.values())), where="podtune bench plan")
    if as_json:
        typer.echo(json.dumps({"plans": [asdict(each) for each in plans], "impossible": refused}, indent=2))
        return
    typer.echo(_table(plans))
    for name, why in refused.items():
        typer.echo(f"  {name}: not possible here: {why}")
    typer.echo(_advice(plans, setup, row))


def _advice(plans: list[Plan], setup: TrainingSetup, row: Hardware) -> str:
    """The plan to take, or what would hold the model where none fits."""
    offloaded = [plan for plan in plans if plan.host_gib and plan.fits]
    plans = [plan for plan in plans if not plan.host_gib] or plans
    known = {
        plan: plan.step_time_s
        for plan in plans
        if plan.fits and plan.bytes_per_step is not None and plan.step_time_s
    }
    if not known:
        least = min(plans, key=lambda plan: plan.total_gib)
        changes = cheapest_fits(replace(setup, strategy=least.strategy), row.memory_gib)
        texts = [f"{change.text} ({change.plan.total_gib:.0f} GiB)" for change in changes]
        # how much memory the machines have is not asked
        ranks = math.ceil(setup.world_size / setup.machines)
        texts += [
            f"{each.strategy}, with {each.host_gib * ranks:,.0f} GiB of each machine's own memory"
            for each in offloaded[:1]
        ]
        ways = "; or ".join(texts)
        needs = f"{least.strategy} needs {least.total_gib:.1f} GiB of {row.name}'s {row.memory_gib:.1f}"
        return f"Nothing fits: {needs}. What would: {ways or 'a smaller model'}."
    fastest = min(known, key=known.__getitem__)
    close = [plan for plan, seconds in known.items() if seconds <= CLOSE * known[fastest]]
    chosen = min(close, key=lambda plan: simplicity(plan.strategy))
    why = "the fastest that fits" if chosen is fastest else "within 1 % of the fastest that fits, and simpler"
    return f"Take {chosen.strategy}: {why}, by formula."


def _table(plans: list[Plan]) -> str:
    """The plans side by side, GiB a rank."""
    first = plans[0]
    memory = ("weights", "gradients", "optimizer", "activations", "head", "buffers", "total GiB", "on host")
    titles = (*memory, "sent GB", "bubble", "step", "fits", "limited by")
    columns = [Column("strategy"), *(Column(title, "right") for title in titles)]
    given = f"{first.parameters:,} parameters, {first.precision}, batch {first.batch_size}"
    where = f"{first.hardware} ({first.memory_gib:.1f} GiB a rank)"
    head = f"{given} over {first.world_size} ranks, on {where}; memory in GiB a rank"
    return "\n".join([head, Table(columns, [_row(plan) for plan in plans]).text()])


def _row(plan: Plan) -> list[Value]:
    parts = (plan.weights_gib, plan.gradients_gib, plan.optimizer_gib, plan.activations_gib)
    memory = (*parts, plan.head_gib, plan.buffers_gib, plan.total_gib, plan.host_gib or None)
    sent = plan.bytes_per_step
    # three digits: formulas know no more; without the bytes sent it is the least
    step = f"{float(f'{(plan.step_time_s or 0) * 1000:.3g}'):,.10g} ms"
    return [
        plan.strategy,
        *(None if gib is None else f"{gib:.2f}" for gib in memory),
        None if sent is None else f"{sent / 1e9:.3g}",
        f"{plan.bubble_share:.0%}",
        step if sent is not None else f"at least {step}",
        "yes" if plan.fits else "NO",
        plan.limited_by,
    ]
