"""podtune bench: plan (formulas, no run), run (a sweep of measured cells), report (tables and plots)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from podtune.plan.hardware import ROWS
from podtune.plan.plan import RECOMPUTE
from podtune.plan.states import OPTIMIZERS, PRECISIONS
from podtune.run.errors import PEER_LOST, SOFTWARE, UNAVAILABLE, UsageError, working
from podtune.run.record import Json, finite

if TYPE_CHECKING:
    from podtune.plan.plan import Plan
    from podtune.plan.shapes import Checkpointing
    from podtune.sweep.cases import CaseSweep

app = typer.Typer(
    help="Measure and predict the cost of each way to distribute the work.", no_args_is_help=True
)

DEFAULT_HARDWARE = "L40S"


@app.command("plan")
def plan(
    model: Annotated[
        str, typer.Option(help="A benchmark model, SmolLM3-3B, or hf:PATH of a folder with a config.json.")
    ] = "",
    params: Annotated[str, typer.Option(help="The count of parameters alone, for example 7.5e9.")] = "",
    strategy: Annotated[str, typer.Option(help="A strategy, or all, side by side.")] = "all",
    world_size: Annotated[int, typer.Option(help="Processes (GPUs) in all.")] = 1,
    precision: Annotated[str, typer.Option(help=f"{', '.join(PRECISIONS)}.")] = "bf16-mixed",
    batch_size: Annotated[
        int | None, typer.Option(help="Sequences or images a step over all processes.")
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens a sequence.")] = None,
    hardware: Annotated[str, typer.Option(help=f"{', '.join(ROWS)}.")] = DEFAULT_HARDWARE,
    interconnect: Annotated[
        str | None, typer.Option(help="The slowest link: pcie4, nvlink4, 25g, 100g, 400g, ...")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Machines (default: one for every eight processes).")
    ] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Of the pipelines.")] = None,
    accumulation: Annotated[int, typer.Option(help="Forward and backward passes a step.")] = 1,
    activation_checkpointing: Annotated[str, typer.Option(help=f"{', '.join(RECOMPUTE)}.")] = "none",
    optimizer: Annotated[str, typer.Option(help=f"{', '.join(OPTIMIZERS)}.")] = "adamw",
    lora_r: Annotated[
        int | None, typer.Option(help="LoRA's rank, on all linear maps; the other weights are frozen.")
    ] = None,
    lora_dropout: Annotated[float, typer.Option(help="Of LoRA's inputs.")] = 0.0,
    quantized: Annotated[
        bool, typer.Option("--quantized", help="QLoRA: the frozen weights in 4 bits.")
    ] = False,
    fused_head: Annotated[
        bool,
        typer.Option("--fused-head", help="No logits, as in a fine-tune on a GPU; not in the benchmark."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False,
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
    from podtune.plan.models import shape_of
    from podtune.plan.plan import default_batch_size, estimate, estimate_all
    from podtune.plan.setup import TrainingSetup
    from podtune.plan.shapes import Opaque

    if bool(model) == bool(params):
        raise UsageError(
            "give --model or --params, one of them", where="podtune bench plan", fix="--model tinygpt-124m"
        )
    shape = shape_of(model, sequence_length) if model else Opaque(_count(params), sequence_length or 1024)
    if activation_checkpointing not in RECOMPUTE:
        raise UsageError(
            f"unknown '{activation_checkpointing}'",
            where="--activation-checkpointing",
            fix=f"one of {', '.join(RECOMPUTE)}",
        )
    if batch_size is None:
        batch_size = default_batch_size(model, world_size, accumulation)
    setup = TrainingSetup(
        shape,
        strategy,
        world_size,
        precision=precision,
        batch_size=batch_size,
        nodes=nodes,
        micro_batches=micro_batches,
        accumulation=accumulation,
        activation_checkpointing=cast("Checkpointing", activation_checkpointing),
        optimizer=optimizer,
        lora_r=lora_r,
        lora_dropout=lora_dropout,
        quantized=quantized,
        fused_head=fused_head,
        zero_bucket=True,  # as the benchmark sets DeepSpeed up
    )
    row, link = hardware_row(hardware), link_row(interconnect) if interconnect else None
    if strategy != "all":
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


@app.command("run")
def run(
    output: Annotated[Path, typer.Option(help="Folder for the records; a sweep there is resumed.")],
    preset: Annotated[str, typer.Option(help="smoke, single-gpu, node, multi-node.")] = "",
    sweep: Annotated[Path | None, typer.Option(help="A sweep of your own, in YAML.", metavar="FILE")] = None,
    resume: Annotated[
        bool, typer.Option(help="Keep cells that were measured with the same arguments by the same code.")
    ] = True,
    timeout_per_cell: Annotated[float | None, typer.Option(help="Seconds (default: the sweep's).")] = None,
    in_job: Annotated[
        bool,
        typer.Option("--in-job", help="In every pod of a job: the cells one after another on all pods."),
    ] = False,
    preflight: Annotated[
        bool, typer.Option("--preflight", help="In a job: podtune preflight before the first cell.")
    ] = False,
    wait: Annotated[float, typer.Option(help="Seconds that it waits for the other pods to arrive.")] = 900.0,
    as_json: Annotated[bool, typer.Option("--json", help="How each cell ended, for scripts.")] = False,
) -> None:
    """Measure a sweep: models x strategies x world sizes x precisions, one record a cell.

    Everything is checked before any process is started. A cell that runs out of memory, hangs or fails has a
    record too. In a pod records are printed between markers as well. Ctrl-C keeps what is done; the same
    command resumes. Exit code 0: every cell measured or out of memory; 70: a cell failed (inside a job
    always 0).

    \b
    Examples:
      podtune bench run --preset smoke --output results/smoke
      podtune bench run --sweep mine.yaml --output results/mine --timeout-per-cell 300
      podtune bench report results/smoke
    """
    import sys

    from podtune.commands.preflight import step_zero
    from podtune.run.world import in_pod, read_pod
    from podtune.sweep.case_runner import CaseRunner
    from podtune.sweep.cases import expand
    from podtune.sweep.runner import SweepStopped

    requested = _requested(preset, sweep, timeout_per_cell)
    pod = read_pod() if in_job else None
    if preflight and pod and (code := step_zero(sweep, wait_s=wait)):
        # final: only training has something to resume
        raise typer.Exit(UNAVAILABLE if code == PEER_LOST else code)
    nodes, nproc_per_node = (pod.nnodes, pod.nproc_per_node) if pod else (1, None)
    expansion = expand(requested, nodes=nodes, nproc_per_node=nproc_per_node)
    first = pod is None or pod.node_rank == 0
    emit = sys.stdout if not as_json and in_pod() and first else None
    try:
        states = CaseRunner(requested, expansion, output, resume, pod, emit=emit).run()
    except SweepStopped as stopped:
        typer.echo(f"stopped; finished cells are in {output}, and the same command resumes", err=True)
        raise typer.Exit(stopped.code) from None
    failed = list(states.values()).count("error")
    if as_json:
        found = {"cells": states, "impossible": expansion.impossible, "output": str(output)}
        typer.echo(json.dumps(found, indent=2))
    if first:
        typer.echo(f"{len(states)} cells, {failed} failed; next: podtune bench report {output}", err=True)
    if failed and pod is None:  # in a job a failed cell is a result; an exit code would only restart the pod
        raise typer.Exit(SOFTWARE)


def _requested(preset: str, file: Path | None, timeout_s: float | None) -> CaseSweep:
    """The sweep of a preset or a file, with the time limit of the command line."""
    from podtune.sweep import cases

    if bool(preset) == bool(file):
        fix = f"--preset {' or '.join(cases.preset_names())}, or --sweep FILE"
        raise UsageError("give --preset or --sweep, one of them", where="podtune bench run", fix=fix)
    requested = cases.read_sweep(file or cases.preset(preset))
    if timeout_s is None:
        return requested
    if timeout_s <= 0:
        raise UsageError(f"{timeout_s:g} is not a positive number", where="--timeout-per-cell")
    return dataclasses.replace(requested, timeout_per_cell_s=timeout_s)


@app.command("report")
def report(
    folder: Annotated[
        Path, typer.Argument(help="What podtune bench run wrote, or logs of a job.", metavar="DIR")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="What the report says, for scripts.")] = False,
) -> None:
    """Compare the records below DIR: which strategy to use, why, and what cannot be compared.

    Writes report.html (one page, no network needed), report.md and report.csv into DIR.
    Records of different precision, batch, device or commit are never put into one comparison.

    \b
    Examples:
      podtune bench report results/smoke
      kubectl logs my-bench-master-0 > results/job/pod.log && podtune bench report results/job
    """
    from collections.abc import Iterable

    from podtune.plan.predicted_vs_measured import plans
    from podtune.report.bench.report import report as write_report
    from podtune.run.collect import collect
    from podtune.run.errors import printable

    def planner(records: Iterable[Json]) -> list[Json | None]:
        return [None if each is None else each.as_json() for each in plans(records)]

    def collector(lines: Iterable[str]) -> tuple[list[Json], list[str]]:
        collection = collect(lines)
        return collection.records, [str(record) for record in collection.damaged]

    working("reading records, drawing plots")
    said = write_report(folder, planner, collector)
    if as_json:
        typer.echo(json.dumps(finite(said), indent=2))
        return
    for comparison in said["comparisons"]:
        sentences = [f"  {text}" for text in comparison["advice"] + comparison["cautions"]]
        typer.echo(printable("\n".join([comparison["title"], *sentences, ""])))
    for text in [
        *said["not_compared"],
        *said["damaged"],
        *(f"{name}: {why}" for name, why in said["failed"].items()),
    ]:
        typer.echo(printable(text))
    typer.echo("\n".join(said["files"]))


def _count(text: str) -> int:
    units = {"k": 1e3, "m": 1e6, "b": 1e9}
    scale = units.get(text[-1:].lower(), 1.0)
    try:
        count = float(text[:-1] if scale != 1.0 else text) * scale
        return int(count)
    except (ValueError, OverflowError):
        raise UsageError(
            f"'{text}' is not a number", where="--params", fix="for example 7.5e9 or 124M"
        ) from None


def _table(plans: list[Plan]) -> str:
    """The plans side by side, GiB a rank."""
    from podtune.report.draw.tables import Column, Table, Value

    first = plans[0]
    memory = ("weights", "gradients", "optimizer", "activations", "head", "buffers", "total GiB")
    titles = (*memory, "sent/step", "bubble", "step", "fits", "limited by")
    columns = [Column("strategy"), *(Column(title, "right") for title in titles)]
    rows: list[list[Value]] = []
    for plan in plans:
        parts = (plan.weights_gib, plan.gradients_gib, plan.optimizer_gib, plan.activations_gib)
        rows.append(
            [
                plan.strategy,
                *(
                    None if gib is None else f"{gib:.2f}"
                    for gib in (*parts, plan.head_gib, plan.buffers_gib, plan.total_gib)
                ),
                _bytes(plan.bytes_per_step),
                f"{plan.bubble_share:.0%}",
                None if plan.step_time_s is None else f"{plan.step_time_s * 1000:.1f} ms",
                None if plan.fits is None else "yes" if plan.fits else "NO",
                plan.limited_by or None,
            ]
        )
    given = (
        f"{first.parameters:,} parameters, {first.precision}, batch {first.batch_size} over "
        f"{first.world_size} ranks"
    )
    where = (
        f"{first.hardware} ({first.memory_gib:.1f} GiB a rank)"
        if first.memory_gib is not None
        else "no hardware"
    )
    return "\n".join([f"{given}, on {where}; memory in GiB a rank", Table(columns, rows).text()])


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
