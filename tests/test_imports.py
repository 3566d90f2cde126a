"""The layers: what may import what, who may touch the process group and its environment, and that podtune
starts instantly.
"""

from __future__ import annotations

import ast
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from podtune import cli

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "training" / "podtune"
FILES = sorted(PACKAGE.rglob("*.py"))

# Who may import a library, below training/podtune. A folder ends with a slash.
ONLY_IN = {
    "trl": ("training.py", "sft/"),
    "aim": ("run/aim/repository.py", "run/aim/ui.py"),
    "kubernetes": ("cluster/live/client.py",),
    "fsspec": ("sft/source/object_store.py",),
    "deepspeed": ("machine/building.py", "bench/strategies/deepspeed_zero.py"),
    "torch": (
        *("training.py", "benchmark.py", "bench/", "sft/"),
        *("run/distributed.py", "run/exit.py", "pod/launch.py", "pod/rendezvous.py", "pod/compute.py"),
    ),
}
# Layers: a folder, and the others that it may import.
LAYERS: dict[str, set[str]] = {
    "run": set(),
    "machine": {"run"},
    "plan": {"run", "machine"},
    "demo_data": {"run"},
    "report": {"run"},
    "cluster": {"run", "machine"},
    "bench": {"run", "machine", "plan"},
    "sft": {"run", "machine", "plan", "report"},
    "pod": {"run", "machine", "demo_data", "sft"},
    "sweep": {"run", "machine", "bench", "sft"},
}
# Rooms of a layer, from the ground up: each imports only what stands before it.
ROOMS = {
    "sft": ("cpu", "source", "data", "model", "config", "generate", "train"),
    "bench": ("options", "models", "strategies", "case"),
}
# What sft may use of the reports, the picture of a loss, and lint of sft, the keys of a training YAML.
LENT = {"podtune.report.draw.loss_png", "podtune.sft.config.settings"}
RENDEZVOUS = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "NODE_RANK",
}
# May ask whether they are in a job at all, and in what; the values they use come from run/world.py.
ASKS_WHETHER = {"commands/preflight.py"}
HEAVY = (
    "torch",
    "transformers",
    "trl",
    "pandas",
    "matplotlib",
    "pyarrow",
    "kubernetes",
    "datasets",
    "aim",
    "deepspeed",
    "numpy",
)


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def modules(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Full names of the imported modules; ``from podtune.run import record`` is podtune.run.record where that
    is a module.
    """
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name for name in submodules if name.startswith("podtune.") and file_of(name)]
            yield from found or [node.module]


def file_of(module: str) -> Path | None:
    base = (ROOT / "training").joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def imports(path: Path) -> set[str]:
    """Everything that a file imports, wherever it stands in it, for types alone included."""
    return set(modules(ast.walk(tree_of(path))))


def at_once(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """The statements that run when a module is imported; not functions, nor what only a type checker
    reads.
    """
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from at_once(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for block in ("body", "orelse", "finalbody"):
                yield from at_once(getattr(node, block, []))


def loaded(path: Path) -> set[str]:
    """Libraries that importing a file of training/ loads, through other files of training/ too."""
    seen, todo, libraries = {path}, [path], set()
    while todo:
        for module in modules(at_once(tree_of(todo.pop()).body)):
            file = file_of(module) if module.startswith("podtune") else None
            if file is None:
                libraries.add(module.split(".")[0])
            elif file not in seen:
                seen.add(file)
                todo.append(file)
    return libraries


def test_the_walk_sees_what_python_would_import() -> None:
    trainer = PACKAGE / "sft" / "train" / "trainer.py"
    assert {"trl", "torch", "datasets"} <= loaded(trainer)
    assert "podtune.run.checkpoint" in imports(trainer)  # from podtune.run import checkpoint
    assert "torch" not in loaded(PACKAGE / "run" / "distributed.py")  # only inside functions
    assert "torch" in {module.split(".")[0] for module in imports(PACKAGE / "run" / "distributed.py")}


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    users = [name_of(path) for path in FILES if library in {module.split(".")[0] for module in imports(path)}]
    assert users, f"nobody imports {library}: the rule has lost its object"
    strangers = [user for user in users if not user.startswith(ONLY_IN[library])]
    assert not strangers


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_what_lies_below_it(layer: str) -> None:
    wrong = {
        (name_of(path), module)
        for path in (PACKAGE / layer).rglob("*.py")
        for module in imports(path)
        if module.startswith("podtune.")
        and module.split(".")[1] not in LAYERS[layer] | {layer}
        and module not in LENT
    }
    assert not wrong


def test_the_fine_tune_uses_of_its_neighbours_only_what_they_lend() -> None:
    neighbours = ("podtune.bench", "podtune.report")
    used = {
        module
        for path in (PACKAGE / "sft").rglob("*.py")
        for module in imports(path)
        if module.startswith(neighbours)
    }
    assert used <= LENT


@pytest.mark.parametrize("layer", ROOMS)
def test_imports_between_the_rooms_of_a_layer_go_one_way(layer: str) -> None:
    order = ROOMS[layer]
    arrows = {
        (path.relative_to(PACKAGE / layer).parts[0].removesuffix(".py"), module.split(".")[2])
        for path in (PACKAGE / layer).rglob("*.py")
        for module in imports(path)
        if module.startswith(f"podtune.{layer}.")
    }
    rooms = {room for arrow in arrows for room in arrow}
    assert rooms <= set(order), "a room without a place in the order"
    assert not {(user, used) for user, used in arrows if order.index(user) < order.index(used)}


@pytest.mark.parametrize("layer", ["report", "cluster", "commands", "plan", "machine", "sweep"])
def test_reports_the_cluster_and_the_commands_load_no_torch(layer: str) -> None:
    heavy = {"torch", "transformers", "trl", "accelerate", "datasets", "peft", "deepspeed"}
    loading = {name_of(path): loaded(path) & heavy for path in (PACKAGE / layer).rglob("*.py")}
    assert not {name: libraries for name, libraries in loading.items() if libraries}


def test_models_of_the_benchmark_know_nothing_of_distribution() -> None:
    for path in (PACKAGE / "bench" / "models").rglob("*.py"):
        names = imports(path) | {
            ast.unparse(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)
        }
        assert not [name for name in names if name.startswith("torch.distributed")], name_of(path)


def test_strategies_do_not_import_each_other() -> None:
    folder = PACKAGE / "bench" / "strategies"
    shared = {f"podtune.bench.strategies.{name}" for name in ("contract", "step", "split", "stage", "float8")}
    for path in folder.glob("*.py"):
        if path.stem not in ("__init__", "table"):
            strategies = {one for one in imports(path) if one.startswith("podtune.bench.strategies")}
            assert strategies <= shared, name_of(path)


def environment_reads(path: Path) -> Iterator[str]:
    """Names that a file looks up in os.environ: by index, get, pop, setdefault or getenv, or with ``in``."""
    for node in ast.walk(tree_of(path)):
        if (
            isinstance(node, ast.Subscript)
            and ast.unparse(node.value) == "os.environ"
            and isinstance(node.ctx, ast.Load)
        ):
            looked_up: list[ast.expr] = [node.slice]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("os.environ.", "os.getenv")):
            looked_up = node.args[:1] if not ast.unparse(node.func).endswith("update") else []
        elif isinstance(node, ast.Compare) and any(
            ast.unparse(one) == "os.environ" for one in node.comparators
        ):
            looked_up = [node.left]
        else:
            continue
        yield from (
            one.value for one in looked_up if isinstance(one, ast.Constant) and isinstance(one.value, str)
        )


def test_only_the_world_reads_the_rendezvous_environment() -> None:
    def belongs(name: str) -> bool:
        return name in RENDEZVOUS or name.startswith(("PET_", "MASTER_"))

    readers = {name_of(path): {name for name in environment_reads(path) if belongs(name)} for path in FILES}
    found = {path for path, names in readers.items() if names}
    assert found - ASKS_WHETHER <= {"run/world.py", "run/distributed.py", "run/launcher.py"}


def test_only_run_distributed_opens_and_closes_the_process_group() -> None:
    def calls(path: Path) -> set[str]:
        return {
            ast.unparse(node.func).rpartition(".")[2]
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Call)
        }

    openers = {
        name_of(path) for path in FILES if {"init_process_group", "destroy_process_group"} & calls(path)
    }
    assert openers == {"run/distributed.py"}


def run(*words: str) -> str:
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    ).stdout


def test_our_folder_datasets_does_not_hide_the_library() -> None:
    assert not (ROOT / "datasets" / "__init__.py").exists()
    origin = run("-c", "import importlib.util; print(importlib.util.find_spec('datasets').origin)").strip()
    assert "site-packages" in Path(origin).parts


def test_what_a_command_starts_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.delenv("PYTHONSAFEPATH")  # put back at the end
    (tmp_path / "json.py").write_text("raise SystemExit('foreign code')")
    words = [sys.executable, "-c", "import json"]
    monkeypatch.setattr(cli, "app", lambda: subprocess.run(words, cwd=tmp_path, check=True))
    cli.main()


def test_the_help_loads_nothing_heavy_and_is_there_at_once() -> None:
    program = f"""
import atexit, json, sys
atexit.register(lambda: print(json.dumps([name for name in {HEAVY!r} if name in sys.modules])))
sys.argv = ["podtune", "--help"]
from podtune.cli import main
main()
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = run("-c", program)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert "doctor" in said
    assert json.loads(said.splitlines()[-1]) == []
    # of the processor, so that a busy machine does not count; the time on the clock is a quarter of it when
    # idle
    assert seconds < 1.0
