"""The strategies by name, and what each of them can honour. Needs no torch.

To add one: write its file here with a ``setup`` (see training/podtune/bench/strategies/contract.py), give it
a row in :data:`STRATEGIES`, and a row in tests/bench/strategies/test_strategies.py.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from podtune.plan.shapes import ConvNet
from podtune.run.errors import ConfigError, UserError

if TYPE_CHECKING:
    from podtune.bench.models import Size
    from podtune.bench.options import Options
    from podtune.bench.strategies.contract import Setup
    from podtune.run.world import World


@dataclass(frozen=True)
class Entry:
    """One strategy: the module with its ``setup``, what it divides, and the choices that it honours."""

    module: str
    divides: Literal["nothing", "batch", "layers", "equal layers", "heads"]
    precisions: tuple[str, ...] = ("fp32", "bf16")
    compile: bool = True
    accumulation: bool = True
    micro_batches: bool = False
    shard_size: bool = False
    flags: tuple[str, ...] = ()

    def load(self) -> Setup:
        """The strategy's ``setup``. Imports torch."""
        setup: Setup = importlib.import_module(f"podtune.bench.strategies.{self.module}").setup
        return setup

    def copies(self, options: Options, world_size: int) -> int:
        """Parts into which the batch is cut."""
        if self.divides == "batch":
            return world_size
        return world_size // options.shard_size if self.shard_size else 1

    def check(self, options: Options, size: Size, world: World) -> None:
        """Refuse what this strategy would have to drop, and a world that does not divide what it divides.

        Raises:
            UserError: says what is not honoured, or which number would divide.
        """
        self._check_choices(options)
        _check_division(self, options, size, world)

    def _check_choices(self, options: Options) -> None:
        name = options.strategy
        if options.precision not in self.precisions:
            raise _refused(name, f"--precision {options.precision}", f"use {' or '.join(self.precisions)}")
        if options.compile and not self.compile:
            raise _refused(name, "--compile", "leave it out")
        if options.accumulation > 1 and not self.accumulation:
            fix = "use --micro-batches, which accumulate" if self.micro_batches else "leave it out"
            raise _refused(name, "--accumulation", fix)
        if options.micro_batches and not self.micro_batches:
            raise _refused(name, "--micro-batches", "use --accumulation")
        if options.shard_size and not self.shard_size:
            raise _refused(name, "--shard-size", "use it with hsdp or a hybrid")
        for flag in ("gradient_as_bucket_view", "gradient_compression", "prefetch", "overlap"):
            if getattr(options, flag) not in (None, "none") and flag not in self.flags:
                raise _refused(name, f"--{flag.replace('_', '-')}", "leave it out")


def _refused(strategy: str, choice: str, fix: str) -> UserError:
    return ConfigError(f"{strategy} does not honour {choice}", where=choice.split()[0], fix=fix)


def _check_division(entry: Entry, options: Options, size: Size, world: World) -> None:
    n, batch, pieces = world.world_size, options.global_batch_size, options.accumulation
    if entry.divides == "nothing" and n > 1:
        raise ConfigError(
            f"{options.strategy} is one process and {n} were started",
            where="--nproc-per-node",
            fix="start one, or use ddp",
        )
    if entry.shard_size and n % options.shard_size:
        raise ConfigError(
            f"{n} processes do not divide into groups of {options.shard_size}",
            where="--shard-size",
            fix=f"use {' or '.join(map(str, _divisors(n)))}",
        )
    copies = entry.copies(options, n)
    if "+" in options.strategy and not 1 < copies < n:
        raise ConfigError(
            f"{n} processes are not several groups of several, which {options.strategy} is for",
            where="--nproc-per-node",
            fix="start 4 or more",
        )
    shares = copies * (options.micro_batches or pieces)
    if batch % shares:
        smaller = batch // shares * shares
        also = f" or {smaller}" if smaller else ""
        what = (
            f"{options.micro_batches} micro-batches"
            if options.micro_batches
            else f"{copies} processes x {pieces} accumulation"
        )
        raise ConfigError(
            f"a global batch of {batch} rows does not divide into {what}",
            where="--global-batch-size",
            fix=f"use {smaller + shares}{also} rows",
        )
    blocks = size.units
    n = n if entry.divides == "batch" else n // copies
    if entry.divides == "layers" and n > blocks:
        raise ConfigError(
            f"{n} processes cannot share the {blocks} layers of {options.model}",
            where="--nproc-per-node",
            fix=f"start at most {blocks}",
        )
    if entry.divides == "equal layers" and blocks % n:
        raise _indivisible(options, n, blocks, "layers")
    if entry.micro_batches and options.micro_batches < n:
        raise ConfigError(
            f"{options.micro_batches} micro-batches leave some of {n} stages without work",
            where="--micro-batches",
            fix=f"use at least {n}, better {4 * n}",
        )
    if entry.divides == "heads":
        _check_heads(options, size, n)


def _check_heads(options: Options, size: Size, n: int) -> None:
    if isinstance(size, ConvNet):
        raise ConfigError(
            f"tensor divides attention heads, and {options.model} has none",
            where="--strategy",
            fix="use a tinygpt or hf: model",
        )
    for count, what in ((size.heads, "attention heads"), (size.kv_heads, "key and value heads")):
        if count % n:
            raise _indivisible(options, n, count, what)


def _indivisible(options: Options, n: int, count: int, what: str) -> UserError:
    return ConfigError(
        f"{n} processes do not divide the {count} {what} of {options.model} for {options.strategy}",
        where="--nproc-per-node",
        fix=f"start {' or '.join(str(d) for d in _divisors(count) if d > 1) or 1}",
    )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


_SCALED = ("fp32", "bf16", "fp16", "fp8")

STRATEGIES: dict[str, Entry] = {
    "single": Entry("single", "nothing", _SCALED),
    "ddp": Entry("ddp", "batch", _SCALED, flags=("gradient_as_bucket_view", "gradient_compression")),
    "fsdp": Entry("fsdp", "batch", ("fp32", "bf16", "fp16"), flags=("prefetch",)),
    "fsdp-grad-op": Entry("fsdp", "batch", ("fp32", "bf16", "fp16"), flags=("prefetch",)),
    "fsdp-offload": Entry("fsdp", "batch", flags=("prefetch",)),
    "hsdp": Entry("fsdp", "batch", ("fp32", "bf16", "fp16"), shard_size=True, flags=("prefetch",)),
    "zero2": Entry("deepspeed_zero", "batch", flags=("overlap",)),
    "zero3": Entry("deepspeed_zero", "batch", flags=("overlap",), compile=False),
    "zero3-offload": Entry("deepspeed_zero", "batch", flags=("overlap",), compile=False),
    "naive-mp": Entry("naive_mp", "layers"),
    "gpipe": Entry("gpipe", "layers", accumulation=False, micro_batches=True),
    "pipeline-gpipe": Entry("pipeline", "equal layers", accumulation=False, micro_batches=True),
    "pipeline-1f1b": Entry("pipeline", "equal layers", accumulation=False, micro_batches=True),
    "tensor": Entry("tensor", "heads"),
    # copies of the model on --shard-size ranks each
    "tensor+fsdp": Entry("tensor", "heads", compile=False, accumulation=False, shard_size=True),
    "pipeline-1f1b+ddp": Entry(
        "pipeline", "equal layers", compile=False, accumulation=False, micro_batches=True, shard_size=True
    ),
}
