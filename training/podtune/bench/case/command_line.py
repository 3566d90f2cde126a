"""The command line of one case and its checks, without torch: a wrong value is answered at once."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from podtune.bench.models import Size, find_size
from podtune.bench.options import Options
from podtune.bench.strategies.table import STRATEGIES, Entry
from podtune.plan.models import GLOBAL_BATCH_SIZE, SIZES, resized
from podtune.plan.shapes import ConvNet, Transformer
from podtune.run.errors import ConfigError, UsageError, unknown
from podtune.run.world import World
from podtune.run.yaml_text import read_mapping

BLOCKS = ("model", "training", "distributed")  # of a --config file
EXAMPLES = """examples:
  python -m podtune.benchmark --model tinygpt-test --strategy single --output /tmp/cell
  torchrun --nproc-per-node 2 -m podtune.benchmark --model tinygpt-test --strategy ddp --output /tmp/cell
  torchrun --nproc-per-node 4 -m podtune.benchmark --model tinygpt-test --strategy pipeline-1f1b \\
      --micro-batches 8
  torchrun --nproc-per-node 8 -m podtune.benchmark --model tinygpt-124m --strategy fsdp \\
      --precision bf16 --compile"""


def flag_of(name: str) -> str:
    """The flag of an option: ``--global-batch-size`` of ``global_batch_size``."""
    return f"--{name.replace('_', '-')}"


def words_of(values: Mapping[str, object]) -> list[str]:
    """Words of the command line for options by name."""
    words: list[str] = []
    for name, value in sorted(values.items()):
        flag = flag_of(name)
        words += [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, str(value)]
    return words


def parser() -> argparse.ArgumentParser:
    """A flag for every field of :class:`Options`, of its type, with its default and help."""
    p = argparse.ArgumentParser(
        prog="podtune.benchmark",
        description="Measure one model under one strategy: first its losses against one process's, then "
        "speed, memory, communication.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--config", metavar="FILE", help="YAML with model:, training: and distributed: blocks")
    types = get_type_hints(Options)
    for option in fields(Options):
        hint = types[option.name]
        alternatives = get_args(hint)  # of a Literal its choices, of "int | None" its types
        how: dict[str, Any] = {"help": option.metadata["help"]}
        if option.default is MISSING:
            how["required"] = True
        else:
            how["default"] = option.default
        if bool in (hint, *alternatives):
            how["action"] = argparse.BooleanOptionalAction
        elif get_origin(hint) is Literal:
            how["choices"] = alternatives
        else:
            how["type"] = alternatives[0] if alternatives else hint
        p.add_argument(flag_of(option.name), **how)
    return p


def read_options(arguments: Sequence[str] | None, world: World) -> tuple[Options, Size, Entry]:
    """Parse and check. Nothing heavy is imported.

    Raises:
        UserError: names, numbers or combinations that cannot run, with what would.
    """
    options = _parse(arguments)
    size = resized(find_size(options.model), **{name: max(0, getattr(options, name)) for name in SIZES})
    if options.strategy not in STRATEGIES:
        raise unknown("strategy", options.strategy, STRATEGIES, where="--strategy")
    entry = STRATEGIES[options.strategy]
    options = _resolve(options, size, entry, world)
    _check_values(options, size)
    entry.check(options, size, world)
    return options, size, entry


def _parse(arguments: Sequence[str] | None) -> Options:
    """Options of the command line, above those of ``--config``."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    given, rest = first.parse_known_args(arguments)
    words = words_of(_read_config(given.config)) if given.config else []
    values = vars(parser().parse_args([*words, *rest]))  # of two words for one option the later counts
    del values["config"]
    return Options(**values)


def _read_config(file: Path) -> dict[str, object]:
    """Options of the file's blocks; the parser refuses those that it does not know.

    Raises:
        UserError: it cannot be read, or has another block.
    """
    blocks = read_mapping(file, fix="name a YAML file of one case")
    for block in set(blocks) - set(BLOCKS):
        raise unknown("block", str(block), BLOCKS, where=str(file), error=ConfigError)
    values = {key: value for block in blocks.values() for key, value in (block or {}).items()}
    if "name" in values:
        values["model"] = values.pop("name")
    return values


def _resolve(options: Options, size: Size, entry: Entry, world: World) -> Options:
    """Fill in what is unset: the model's own, the strategy's, or what follows from the processes."""
    each, batch, length = options.per_device_batch_size, options.global_batch_size, options.sequence_length
    if each and batch:
        raise UsageError(
            "the batch is given twice",
            where="--per-device-batch-size, --global-batch-size",
            fix="the first keeps the rows of a process (weak scaling), the second those of all (strong): one",
        )
    batch = each * world.world_size or batch or GLOBAL_BATCH_SIZE.get(options.model, 8)
    if isinstance(size, ConvNet) and length:
        raise UsageError(f"{options.model} reads images", where="--sequence-length", fix="leave it out")
    if isinstance(size, Transformer):
        length = length or size.sequence_length
    shards, pieces = options.shard_size, options.micro_batches
    if entry.shard_size and not shards:
        n = world.world_size
        halves = n // 2 if n >= 4 and n % 2 == 0 else n
        shards = world.local_world_size if world.nnodes > 1 else halves
    if entry.micro_batches and not pieces:
        rows = batch // (world.world_size // shards if entry.shard_size else 1)
        pieces = max(count for count in range(1, 9) if rows % count == 0)
    return replace(
        options, global_batch_size=batch, sequence_length=length, shard_size=shards, micro_batches=pieces
    )


def _check_values(options: Options, size: Size) -> None:
    for option in fields(Options):
        value, least = getattr(options, option.name), option.metadata.get("least")
        if least is not None and value is not None and value < least:
            raise UsageError(f"{value} is less than {least}", where=flag_of(option.name))
    if not options.learning_rate > 0 or not options.timeout_s > 0:
        raise UsageError("--learning-rate and --timeout-s must be above 0")
    if options.optimizer == "sgd" and options.fused_optimizer:
        what, fix = "torch has no fused SGD for sharded weights", "leave it out, or use adamw"
        raise UsageError(what, where="--fused-optimizer", fix=fix)
    if options.gradient_compression == "powersgd" and (options.save or options.precision == "fp16"):
        what = "what PowerSGD has not sent yet is in no saved state, and an overflow of fp16 would stay in it"
        fix = "leave out --save and fp16, or use --gradient-compression bf16"
        raise UsageError(what, where="--gradient-compression", fix=fix)
    if options.pretrained and (isinstance(size, ConvNet) or not size.folder):
        raise UsageError("only hf: models have weights to load", where="--pretrained")
    for flag in ("epoch_steps", "lr_warmup", "save", "resume"):
        needed = "save" if flag == "resume" else "epochs"
        if getattr(options, flag) and not getattr(options, needed):
            raise UsageError(f"it needs {flag_of(needed)}", where=flag_of(flag), fix=f"add {flag_of(needed)}")
    if isinstance(size, Transformer) and not 2 <= options.sequence_length <= size.sequence_length:
        context = f"2 to {size.sequence_length}, the context of {options.model}"
        raise UsageError(f"{options.sequence_length} is outside {context}", where="--sequence-length")
    if isinstance(size, Transformer) and options.norm == "batch":
        raise UsageError(f"{options.model} has no batch norm", where="--norm", fix="leave it out")
    if options.data != "synthetic" and not Path(options.data).exists():
        raise UsageError(
            f"{options.data} does not exist",
            where="--data",
            fix="name a folder of podtune data cifar10, or synthetic",
        )
