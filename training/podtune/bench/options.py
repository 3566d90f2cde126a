"""The command line of one cell, and its checks. Needs no torch: a wrong value is answered before anything is
loaded.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from podtune.bench.models import Size, TransformersSize, find_size
from podtune.bench.strategies.table import STRATEGIES, Entry
from podtune.plan.sizes import SIZES, ResNetSize
from podtune.run.distributed import World
from podtune.run.errors import USAGE, UserError, near

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
Checkpointing = Literal["none", "selective", "full", "sequential"]
# Rows of a step where none are asked for: the same for every strategy and world size.
GLOBAL_BATCH_SIZE = {
    "tinygpt-test": 8,
    "tinygpt-124m": 32,
    "tinygpt-350m": 16,
    "resnet18-cifar": 16,
    "resnet50": 64,
}
EXAMPLES = """examples:
  python -m podtune.benchmark --model tinygpt-test --strategy single --output /tmp/cell
  torchrun --nproc-per-node 2 -m podtune.benchmark --model tinygpt-test --strategy ddp --output /tmp/cell
  torchrun --nproc-per-node 4 -m podtune.benchmark --model tinygpt-test --strategy pipeline-1f1b \\
      --micro-batches 8
  torchrun --nproc-per-node 8 -m podtune.benchmark --model tinygpt-124m --strategy fsdp \\
      --precision bf16 --compile"""


@dataclass(frozen=True)
class Options:
    """One cell, resolved: what is None here was not asked for and gets the default of the model or the
    strategy.
    """

    model: str
    strategy: str
    steps: int = 20
    warmup: int = 5
    repeats: int = 3
    global_batch_size: int = 0
    sequence_length: int = 0
    micro_batches: int = 0
    accumulation: int = 1
    precision: Precision = "fp32"
    activation_checkpointing: Checkpointing = "none"
    compile: bool = False
    optimizer: Literal["adamw", "sgd"] = "adamw"
    fused_optimizer: bool | None = None
    learning_rate: float = 1e-3
    norm: Literal["group", "batch"] = "group"
    pretrained: bool = False
    gradient_as_bucket_view: bool | None = None
    prefetch: int | None = None
    overlap: bool | None = None
    shard_size: int = 0
    data: str = "synthetic"
    seed: int = 0
    threads: int = 1
    cpu: bool = False
    timeout_s: float = 300.0
    profile: bool = False
    memory_snapshot: bool = False
    skip_parity: bool = False
    output: str = "benchmark"


def parser() -> argparse.ArgumentParser:
    """The command line. Names and defaults are those of :class:`Options`."""
    p = argparse.ArgumentParser(
        prog="podtune.benchmark",
        description=(
            "Measure one model under one strategy: first its losses against one process's, then "
            "speed, memory, communication."
        ),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--model", required=True, help=f"{', '.join(SIZES)} or hf:PATH")
    p.add_argument("--strategy", required=True, help=", ".join(STRATEGIES))
    p.add_argument("--steps", type=int, help="timed steps of one repeat")
    p.add_argument("--warmup", type=int, help="steps before the clock, dropped")
    p.add_argument("--repeats", type=int, help="how often the timed steps are run")
    p.add_argument(
        "--global-batch-size", type=int, help=("rows of one step over all processes (default: the model's)")
    )
    p.add_argument("--sequence-length", type=int, help="tokens a row (default: the model's context)")
    p.add_argument(
        "--micro-batches",
        type=int,
        help=("pipelines: pieces that the global batch is cut into (default: 8, or what divides it)"),
    )
    p.add_argument("--accumulation", type=int, help="forward and backward passes to one optimizer step")
    p.add_argument(
        "--precision",
        choices=get_args(Precision),
        help=("fp32 weights and optimizer in every case; what the products run in"),
    )
    p.add_argument("--activation-checkpointing", choices=get_args(Checkpointing))
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile, block by block")
    p.add_argument("--optimizer", choices=("adamw", "sgd"))
    p.add_argument("--fused-optimizer", action=argparse.BooleanOptionalAction, help="adamw (default: on)")
    p.add_argument("--learning-rate", type=float)
    p.add_argument(
        "--norm",
        choices=("group", "batch"),
        help=("residual networks; with batch, parity is not defined once the batch is split"),
    )
    p.add_argument(
        "--pretrained",
        action=argparse.BooleanOptionalAction,
        help="hf: models, load the weights instead of random ones",
    )
    p.add_argument(
        "--gradient-as-bucket-view", action=argparse.BooleanOptionalAction, help="ddp (default: on)"
    )
    p.add_argument("--prefetch", type=int, help="fsdp, hsdp: blocks gathered ahead (default: FSDP's own)")
    p.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        help=("zero2, zero3: communicate during backward (default: on)"),
    )
    p.add_argument(
        "--shard-size",
        type=int,
        help=("hsdp: processes that share one copy of the weights (default: a node's)"),
    )
    p.add_argument(
        "--data",
        help=("synthetic, a Parquet file with a text column, or a folder of images in one folder per class"),
    )
    p.add_argument("--seed", type=int)
    p.add_argument(
        "--threads",
        type=int,
        help=("CPU threads of a process (default: 1, so that a process stands for one device)"),
    )
    p.add_argument("--cpu", action=argparse.BooleanOptionalAction, help="leave GPUs alone")
    p.add_argument("--timeout-s", type=float, help="the bound of every collective and of a step")
    p.add_argument(
        "--profile",
        action=argparse.BooleanOptionalAction,
        help=("after the timing: trace, memory timeline, top operators"),
    )
    p.add_argument(
        "--memory-snapshot",
        action=argparse.BooleanOptionalAction,
        help="CUDA: the allocator's history of one step",
    )
    p.add_argument(
        "--skip-parity",
        action=argparse.BooleanOptionalAction,
        help="do not compare losses first; the record says so",
    )
    p.add_argument("--output", help="folder of run.json and what --profile writes")
    p.set_defaults(
        **{field.name: field.default for field in fields(Options) if field.name not in ("model", "strategy")}
    )
    return p


def read_options(arguments: list[str] | None, world: World) -> tuple[Options, Size, Entry]:
    """Parse and check. Nothing heavy is imported.

    Raises:
        UserError: names, numbers or combinations that cannot run, with what would.
    """
    values: dict[str, Any] = vars(parser().parse_args(arguments))
    size = find_size(values["model"])
    if values["strategy"] not in STRATEGIES:
        raise UserError(
            f"there is no strategy '{values['strategy']}'{near(values['strategy'], list(STRATEGIES))}",
            where="--strategy",
            fix=f"choose one of {', '.join(STRATEGIES)}",
            code=USAGE,
        )
    entry = STRATEGIES[values["strategy"]]
    options = _resolve(values, size, entry, world)
    _check_values(options, size)
    entry.check(options, size, world)
    return options, size, entry


def _resolve(values: dict[str, Any], size: Size, entry: Entry, world: World) -> Options:
    values["global_batch_size"] = values["global_batch_size"] or GLOBAL_BATCH_SIZE.get(values["model"], 8)
    if isinstance(size, ResNetSize):
        if values["sequence_length"]:
            raise UserError(
                (f"{values['model']} reads images"), where="--sequence-length", fix="leave it out", code=USAGE
            )
    else:
        values["sequence_length"] = values["sequence_length"] or size.sequence_length
    if entry.micro_batches:
        asked, batch = values["micro_batches"], values["global_batch_size"]
        values["micro_batches"] = asked or max(count for count in range(1, 9) if batch % count == 0)
    if entry.shard_size and not values["shard_size"]:
        of_node = world.local_world_size if world.nnodes > 1 else world.world_size
        half = world.world_size // 2
        values["shard_size"] = (
            of_node if world.nnodes > 1 or world.world_size < 4 or world.world_size % 2 else half
        )
    return Options(**values)


def _check_values(options: Options, size: Size) -> None:
    least = {
        "steps": 1,
        "warmup": 0,
        "repeats": 1,
        "global_batch_size": 1,
        "accumulation": 1,
        "threads": 1,
        "prefetch": 0,
        "micro_batches": 0,
    }
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and value < bound:
            raise UserError(f"{value} is less than {bound}", where=f"--{name.replace('_', '-')}", code=USAGE)
    if not options.learning_rate > 0 or not options.timeout_s > 0:
        raise UserError("--learning-rate and --timeout-s must be above 0", code=USAGE)
    if options.optimizer == "sgd" and options.fused_optimizer:
        raise UserError(
            ("torch has no fused SGD for sharded weights"),
            where="--fused-optimizer",
            fix="leave it out, or use adamw",
            code=USAGE,
        )
    if isinstance(size, ResNetSize):
        if options.pretrained:
            raise UserError("only hf: models have weights to load", where="--pretrained", code=USAGE)
    elif not 2 <= options.sequence_length <= size.sequence_length:
        raise UserError(
            f"{options.sequence_length} is outside 2 to {size.sequence_length}, the context of "
            f"{options.model}",
            where="--sequence-length",
            code=USAGE,
        )
    elif options.norm == "batch":
        raise UserError(f"{options.model} has no batch norm", where="--norm", fix="leave it out", code=USAGE)
    elif options.pretrained and not isinstance(size, TransformersSize):
        raise UserError("only hf: models have weights to load", where="--pretrained", code=USAGE)
    if options.data != "synthetic" and not Path(options.data).exists():
        raise UserError(
            f"{options.data} does not exist",
            where="--data",
            fix=("name a Parquet file, a folder of images, or synthetic"),
            code=USAGE,
        )
