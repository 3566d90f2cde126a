"""A sweep: which cells there are, each checked before any process is started. Needs no torch.

A sweep file is YAML::

    models: [tinygpt-124m, resnet50]
    strategies: all                  # or a list
    world_sizes: [1, 2, 4, 8]
    precisions: [bf16]
    global_batch_sizes: [32]         # left out: the model's own
    compile: [false, true]           # left out: as options say
    options: {steps: 20, compile: true}          # any flag of podtune.benchmark, for every cell
    per_model: {resnet50: {compile: false}}      # or for one model
    timeout_per_cell_s: 600
    skip_impossible: true            # name what cannot be (tensor on a ResNet) and go on; false: it is an
    error

Every combination is one cell: one strategy, one model, one world size, one record.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from podtune.bench.case.command_line import flag_of, read_options
from podtune.bench.options import Options
from podtune.bench.strategies.table import STRATEGIES
from podtune.machine.facts import visible_gpus
from podtune.run.distributed import World
from podtune.run.errors import ConfigError, UsageError, UserError, near
from podtune.run.sweeps import check_keys, combinations, read_mapping

PRESETS = Path(__file__).with_name("presets")
ROOT = Path(__file__).parents[2]
# What a cell's own axes and the sweep itself say; everything else of a cell is an option.
_AXES = ("model", "strategy", "output")


@dataclass(frozen=True)
class Sweep:
    """A sweep file, parsed. The fields are its keys."""

    models: tuple[str, ...]
    strategies: tuple[str, ...]
    world_sizes: tuple[int, ...] = (1,)
    precisions: tuple[str, ...] = ("fp32",)
    global_batch_sizes: tuple[int, ...] = (0,)
    compile: tuple[bool, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    per_model: dict[str, dict[str, Any]] = field(default_factory=dict)
    timeout_per_cell_s: float = 600.0
    skip_impossible: bool = False
    launch: Literal["torchrun", "fork"] = "torchrun"
    """``fork``: one process loads torch, and forks the ranks of one cell after another. For cells of a few
    seconds on a CPU, where torchrun's own start would take most of the time."""


@dataclass(frozen=True)
class Cell:
    """One measurement: the arguments of podtune.benchmark without ``--output``, and how many processes."""

    name: str
    model: str
    strategy: str
    world_size: int
    nodes: int
    arguments: tuple[str, ...]
    options: Options

    @property
    def key(self) -> str:
        """A hash of what was asked and of the code that answers: equal keys need not be measured again."""
        asked = json.dumps([self.arguments, self.world_size, self.nodes, code_hash()])
        return hashlib.sha256(asked.encode()).hexdigest()[:16]


def preset_names() -> list[str]:
    """The presets that come with podtune."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def preset(name: str) -> Path:
    """The file of a preset.

    Raises:
        UserError: no such preset; names the nearest.
    """
    path = PRESETS / f"{name}.yaml"
    if name not in preset_names():
        presets = preset_names()
        raise UsageError(
            f"unknown preset '{name}'{near(name, presets)}",
            where="--preset",
            fix=f"one of {', '.join(presets)}",
        )
    return path


def read_sweep(path: Path) -> Sweep:
    """Parse a sweep file.

    Raises:
        UserError: unreadable, an unknown key (names the nearest), or a value of the wrong kind; with file and
        key.
    """
    content = read_mapping(path, fix="give a sweep file, or --preset", usage="see podtune bench run --help")
    keys = {field.name: field for field in fields(Sweep)}
    check_keys(content, list(keys), str(path))
    for name, option in keys.items():
        if name not in content and option.default is MISSING and option.default_factory is MISSING:
            raise ConfigError(f"'{name}' is missing", where=str(path), fix=f"add {name}: [...]")
    values = {key: _value(key, value, path) for key, value in content.items()}
    return Sweep(**values)


def _value(key: str, value: Any, path: Path) -> Any:
    """``value`` as the field ``key`` of :class:`Sweep` wants it."""

    def wrong(wanted: str) -> UserError:
        return ConfigError(f"{value!r} is not {wanted}", where=f"{path}: {key}")

    if key in ("models", "strategies", "precisions"):
        if key == "strategies" and value == "all":
            return tuple(STRATEGIES)
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(name, str) for name in names):
            raise wrong("a name or a list of names")
        return tuple(names)
    if key in ("world_sizes", "global_batch_sizes"):
        numbers = value if isinstance(value, list) else [value]
        if not numbers or not all(
            isinstance(number, int) and not isinstance(number, bool) and number > 0 for number in numbers
        ):
            raise wrong("a positive number or a list of them")
        return tuple(numbers)
    if key == "compile":
        choices = value if isinstance(value, list) else [value]
        if not choices or not all(isinstance(choice, bool) for choice in choices):
            raise wrong("true, false or a list of both")
        return tuple(choices)
    if key == "timeout_per_cell_s":
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise wrong("a positive number of seconds")
        return float(value)
    if key == "skip_impossible":
        if not isinstance(value, bool):
            raise wrong("true or false")
        return value
    if key == "launch":
        if value not in ("torchrun", "fork"):
            raise wrong("torchrun or fork")
        return value
    if not isinstance(value, dict):
        raise wrong("a mapping")
    for flags in value.values() if key == "per_model" else [value]:
        _check_flags(flags, f"{path}: {key}")
    return value


def _check_flags(flags: Any, where: str) -> None:
    names = [field.name for field in fields(Options) if field.name not in _AXES]
    if not isinstance(flags, dict):
        raise ConfigError(f"{flags!r} is not a mapping of flags to values", where=where)
    check_keys(flags, names, where, what="option")
    for flag, value in flags.items():
        if not isinstance(value, str | int | float | bool):
            raise ConfigError(
                f"{flag} is {value!r}, not one value",
                where=where,
                fix="the axes of a sweep are its top-level lists",
            )


@dataclass(frozen=True)
class Expansion:
    """The cells of a sweep, and the combinations that cannot be, with why."""

    cells: list[Cell]
    impossible: dict[str, str]


def expand(sweep: Sweep, *, nodes: int = 1, nproc_per_node: int | None = None) -> Expansion:
    """Every combination as a cell, checked as ``podtune.benchmark`` would check it. Starts nothing.

    Args:
        nodes, nproc_per_node: the job that the cells run in; on one machine any world size is one node.

    Raises:
        UserError: an unknown model or strategy, a wrong option; or an impossible combination, unless the
        sweep skips those.
    """
    cells: list[Cell] = []
    impossible: dict[str, str] = {}
    for strategy in sweep.strategies:
        if strategy not in STRATEGIES:
            raise UsageError(
                f"unknown strategy '{strategy}'{near(strategy, list(STRATEGIES))}",
                where="strategies",
                fix=f"one of {', '.join(STRATEGIES)}",
            )
    for model in sweep.per_model:
        if model not in sweep.models:
            raise ConfigError(
                f"'{model}' is not among the models{near(model, sweep.models)}", where="per_model"
            )
    axes: dict[str, tuple[Any, ...]] = {
        "model": sweep.models,
        "world_size": sweep.world_sizes,
        "strategy": sweep.strategies,
        "precision": sweep.precisions,
        "batch": sweep.global_batch_sizes,
        "compiled": sweep.compile or (None,),
    }
    for model, world_size, strategy, precision, batch, compiled in map(dict.values, combinations(axes)):
        flags = {**sweep.options, **sweep.per_model.get(model, {}), "precision": precision}
        if batch:
            flags["global_batch_size"] = batch
        if compiled is not None:
            flags["compile"] = compiled
        name = (
            f"{model.replace('/', '_').replace(':', '_')}.{strategy}.w{world_size}.{precision}"
            + (f".b{batch}" if batch else "")
            + (".compiled" if compiled else "")
        )
        try:
            cells.append(_cell(name, model, strategy, world_size, flags, nodes, nproc_per_node))
        except UserError as error:
            if error.where in ("--model", "--data"):
                raise  # wrong for every cell
            impossible[name] = f"{error.what}; {error.fix}"
    if impossible and (not sweep.skip_impossible or not cells):
        first = "\n  ".join(f"{name}: {why}" for name, why in impossible.items())
        raise ConfigError(
            f"{len(impossible)} of {len(impossible) + len(cells)} cells cannot be:\n  {first}",
            where="sweep",
            fix="change what is named, or set skip_impossible: true",
        )
    return Expansion(cells, impossible)


def _cell(
    name: str,
    model: str,
    strategy: str,
    world_size: int,
    flags: dict[str, Any],
    nodes: int,
    nproc_per_node: int | None,
) -> Cell:
    local = world_size if nproc_per_node is None else min(world_size, nproc_per_node)
    if world_size % local or world_size // local > nodes:
        raise ConfigError(
            f"{world_size} processes do not fit {nodes} pods of {nproc_per_node}",
            where="--nproc-per-node",
            fix=f"at most {nodes * local}, a multiple of {local}",
        )
    _check_gpus(local, bool(flags.get("cpu")))
    arguments = ["--model", model, "--strategy", strategy, *_arguments(flags)]
    world = World(world_size=world_size, local_world_size=local, nnodes=world_size // local)
    try:
        options, _, _ = read_options(arguments, world)
    except SystemExit:  # argparse has printed what is wrong with a value
        raise ConfigError(
            f"podtune.benchmark refuses {' '.join(arguments)}", where="--model", fix="see the line above"
        ) from None
    return Cell(name, model, strategy, world_size, world.nnodes, tuple(arguments), options)


def _arguments(flags: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for flag, value in sorted(flags.items()):
        name = flag_of(flag)
        if isinstance(value, bool):
            words.append(name if value else f"--no-{name.removeprefix('--')}")
        else:
            words += [name, str(value)]
    return words


def _check_gpus(local: int, cpu: bool) -> None:
    gpus = visible_gpus()
    if not cpu and 0 < gpus < local:
        raise ConfigError(
            f"{local} processes on this machine need {local} GPUs and it shows {gpus}",
            where="--nproc-per-node",
            fix=f"at most {gpus}, or cpu: true",
        )


@functools.cache
def code_hash() -> str:
    """A hash of the benchmark's own code: a cell measured by other code is measured again."""
    digest = hashlib.sha256()
    files = [
        ROOT / "benchmark.py",
        *sorted((ROOT / "bench").rglob("*.py")),
        *sorted((ROOT / "run").glob("*.py")),
        *(ROOT / "plan" / name for name in ("models.py", "shapes.py")),
    ]
    for path in files:
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
