"""A sweep of benchmark cases: its file, and the cases it asks for, each checked before any process starts.

docs/benchmark.md shows a sweep file; its keys are the fields of :class:`CaseSweep`. Every combination of its
lists is one case: one strategy, one model, one world size, one record. Needs no torch.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from podtune.bench.case.command_line import read_options, words_of
from podtune.bench.options import Options
from podtune.bench.strategies.table import STRATEGIES
from podtune.machine.facts import visible_gpus
from podtune.run.errors import ConfigError, UserError, unknown
from podtune.run.world import World
from podtune.run.yaml_text import read_mapping
from podtune.sweep.sweep_file import check_keys, check_values

PRESETS = Path(__file__).with_name("presets")
ROOT = Path(__file__).parents[1]
AXES = ("model", "strategy", "output")  # options of a case that the sweep itself sets

Flags = dict[str, str | int | float | bool]


@dataclass(frozen=True)
class CaseSweep:
    """A sweep file, parsed. The fields are its keys."""

    models: tuple[str, ...]
    strategies: tuple[str, ...]
    world_sizes: tuple[int, ...] = (1,)
    precisions: tuple[str, ...] = ("fp32",)
    global_batch_sizes: tuple[int, ...] = (0,)
    compile: tuple[bool, ...] = ()
    options: Flags = field(default_factory=dict)
    per_model: dict[str, Flags] = field(default_factory=dict)
    timeout_per_cell_s: float = 600.0
    skip_impossible: bool = False
    launch: Literal["torchrun", "fork"] = "torchrun"
    """``fork``: torch is loaded once and every rank is forked; for cases of a few seconds on a CPU."""


#: kinds of the sweep's keys, by their annotations; those that hold one value or a list of them by its own
_HINTS = get_type_hints(CaseSweep)
LISTS = {name: get_args(hint)[0] for name, hint in _HINTS.items() if get_origin(hint) is tuple}
KINDS = {name: LISTS.get(name) or get_origin(hint) or hint for name, hint in _HINTS.items()}
KINDS["launch"] = str


@dataclass(frozen=True)
class Case:
    """One measurement: the arguments of podtune.benchmark without ``--output``, and its processes."""

    name: str
    world: World
    arguments: tuple[str, ...]
    options: Options
    alone: CaseSweep  # the sweep that is this case and no other
    place: str = ""  # where it is measured, if not on this machine

    @property
    def key(self) -> str:
        """A hash of arguments, place and the benchmark's code: equal keys need not be measured again."""
        world = self.world
        asked = json.dumps([self.arguments, world.world_size, world.nnodes, self.place, code_hash()])
        return hashlib.sha256(asked.encode()).hexdigest()[:16]


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def preset(name: str) -> Path:
    """The file of a preset.

    Raises:
        UserError: no such preset; names the nearest.
    """
    if name not in preset_names():
        raise unknown("preset", name, preset_names(), where="--preset")
    return PRESETS / f"{name}.yaml"


def read_sweep(path: Path) -> CaseSweep:
    """Parse a sweep file.

    Raises:
        UserError: unreadable, an unknown key, or a value of the wrong kind; with file and key.
    """
    content = read_mapping(path, fix="give a sweep file, or --preset: see podtune bench run --help")
    check_keys(content, KINDS, str(path))
    check_values(content, KINDS, path, LISTS)
    per_model = content.get("per_model", {})
    check_values(per_model, dict.fromkeys(per_model, dict), path)
    for name in ("models", "strategies"):
        if name not in content:
            raise ConfigError(f"'{name}' is missing", where=str(path), fix=f"add {name}: [...]")
    if content.get("launch", "fork") not in ("fork", "torchrun"):
        raise ConfigError(f"'{content['launch']}' is not torchrun or fork", where=f"{path}: launch")
    known = [option.name for option in fields(Options) if option.name not in AXES]
    for flags in (content.get("options", {}), *per_model.values()):
        check_keys(flags, known, str(path), what="option")
    if content["strategies"] == "all":
        content["strategies"] = list(STRATEGIES)
    values: dict[str, Any] = {
        key: tuple(value if isinstance(value, list) else [value]) if key in LISTS else value
        for key, value in content.items()
    }
    return CaseSweep(**values)


@dataclass(frozen=True)
class Expansion:
    """The cases of a sweep, and the impossible combinations by name, each with the reason."""

    cases: list[Case]
    impossible: dict[str, str]


def expand(
    sweep: CaseSweep, *, nodes: int = 1, nproc_per_node: int | None = None, place: str = ""
) -> Expansion:
    """Every combination as a case, checked as ``podtune.benchmark`` would check it. Starts nothing.

    Args:
        nodes, nproc_per_node: the job that the cases run in; on one machine any world size is one node.
        place: where the cases are measured, if not on this machine.

    Raises:
        UserError: an unknown name; an impossible combination, unless the sweep skips those.
        SystemExit: a value that argparse refuses, and has said so.
    """
    for strategy in sweep.strategies:
        if strategy not in STRATEGIES:
            raise unknown("strategy", strategy, STRATEGIES, where="strategies")
    for model in sweep.per_model:
        if model not in sweep.models:
            raise unknown("model", model, sweep.models, where="per_model", error=ConfigError)
    cases: list[Case] = []
    impossible: dict[str, str] = {}
    for alone in _alone(sweep):
        name = _name(alone)
        try:
            cases.append(_case(name, alone, nodes, nproc_per_node, place))
        except UserError as error:
            if error.where in ("--model", "--data"):
                raise  # wrong for every case
            impossible[name] = f"{error.what}; {error.fix}"
    if impossible and (not sweep.skip_impossible or not cases):
        first = "\n  ".join(f"{name}: {why}" for name, why in impossible.items())
        raise ConfigError(
            f"{len(impossible)} of {len(impossible) + len(cases)} cases cannot be:\n  {first}",
            where="sweep",
            fix="change what is named, or set skip_impossible: true",
        )
    return Expansion(cases, impossible)


def _alone(sweep: CaseSweep) -> Iterator[CaseSweep]:
    """Yield every combination as a sweep of its own."""
    axes = ("models", "world_sizes", "strategies", "precisions", "global_batch_sizes", "compile")
    # of an empty list, compile's, one combination that is empty too
    choices: list[list[Any]] = [[(value,) for value in getattr(sweep, axis)] or [()] for axis in axes]
    for point in itertools.product(*choices):
        chosen: dict[str, Any] = dict(zip(axes, point, strict=True))
        alone = replace(sweep, **chosen, launch="torchrun")
        own = {model: flags for model, flags in sweep.per_model.items() if model in alone.models}
        yield replace(alone, per_model=own)


def _name(alone: CaseSweep) -> str:
    model = alone.models[0].replace("/", "_").replace(":", "_")
    name = f"{model}.{alone.strategies[0]}.w{alone.world_sizes[0]}.{alone.precisions[0]}"
    if batch := alone.global_batch_sizes[0]:
        name += f".b{batch}"
    return f"{name}.compiled" if True in alone.compile else name


def _case(name: str, alone: CaseSweep, nodes: int, nproc_per_node: int | None, place: str) -> Case:
    """The case of a sweep of one. Raises :class:`UserError` for what cannot be."""
    model, world_size = alone.models[0], alone.world_sizes[0]
    flags = {**alone.options, **alone.per_model.get(model, {}), "precision": alone.precisions[0]}
    if batch := alone.global_batch_sizes[0]:
        flags["global_batch_size"] = batch
    if alone.compile:
        flags["compile"] = alone.compile[0]
    local = _local_ranks(world_size, nodes, nproc_per_node)
    if not flags.get("cpu") and not place:  # elsewhere there are other GPUs than here
        _check_gpus(local)
    world = World(world_size=world_size, local_world_size=local, nnodes=world_size // local)
    arguments = ("--model", model, "--strategy", alone.strategies[0], *words_of(flags))
    return Case(name, world, arguments, read_options(arguments, world)[0], alone, place)


def values_of(case: Case, values: Mapping[str, Any]) -> dict[str, object]:
    """The chart's values of a job that measures this case alone, in as many pods and GPUs as it needs."""
    import yaml

    given = {key: value for key, value in asdict(case.alone).items() if value not in ((), (0,), {}, False)}
    sweep = {key: list(value) if key in LISTS else value for key, value in given.items()}
    ranks = case.world.local_world_size
    resources = {
        kind: {name: ranks if name.endswith("/gpu") else amount for name, amount in amounts.items()}
        for kind, amounts in values.get("resources", {}).items()
    }
    pods = {"nodes": case.world.nnodes, "nprocPerNode": ranks}
    return {
        **values,
        "mode": "benchmark",
        "benchmark": {**values.get("benchmark", {}), "sweep": yaml.safe_dump(sweep, sort_keys=False)},
        "distributed": {**values.get("distributed", {}), **pods},
        "resources": resources,
    }


def _local_ranks(world_size: int, nodes: int, nproc_per_node: int | None) -> int:
    """Processes on each machine; an error if the job has too few pods."""
    local = world_size if nproc_per_node is None else min(world_size, nproc_per_node)
    if world_size % local or world_size // local > nodes:
        raise ConfigError(
            f"{world_size} processes do not fit {nodes} pods of {nproc_per_node}",
            where="--nproc-per-node",
            fix=f"at most {nodes * local}, a multiple of {local}",
        )
    return local


def _check_gpus(local: int) -> None:
    gpus = visible_gpus()
    if 0 < gpus < local:
        raise ConfigError(
            f"{local} processes on this machine need {local} GPUs and it shows {gpus}",
            where="--nproc-per-node",
            fix=f"at most {gpus}, or cpu: true",
        )


@functools.cache
def code_hash() -> str:
    """A hash of the benchmark's own code: a case measured by other code is measured again."""
    digest = hashlib.sha256()
    patterns = ("benchmark.py", "bench/**/*.py", "run/*.py", "plan/models.py", "plan/shapes.py")
    for path in sorted(path for pattern in (*patterns, "sweep/processes.py") for path in ROOT.glob(pattern)):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
