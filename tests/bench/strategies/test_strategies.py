"""Every strategy of the benchmark, started by torchrun: the losses of one process, and the bytes that the
formulas say.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.launch import Launcher

from podtune.bench.models import build, find_size
from podtune.bench.strategies.table import STRATEGIES
from podtune.plan.predicted_vs_measured import plans
from podtune.run.world import World
from tests.bench.strategies.bench_driver import run_cell

ROOT = Path(__file__).parents[3]
QUICK = ["--sequence-length", "32", "--steps", "2", "--warmup", "0", "--repeats", "1"]
# after the measurement, as every cell of RANKS does; the warm-up ends in the second epoch
EPOCHS = "--epochs 2 --epoch-steps 2 --lr-warmup 3"
Json = dict[str, Any]

# A new strategy gets a row here: its name, and how many processes show it at work.
RANKS = {
    "single": 1,
    "ddp": 2,
    "fsdp": 2,
    "fsdp-grad-op": 2,
    "fsdp-offload": 2,
    "hsdp": 4,
    "zero2": 2,
    "zero3": 2,
    "zero3-offload": 2,
    "naive-mp": 2,
    "gpipe": 4,
    "pipeline-gpipe": 4,
    "pipeline-1f1b": 4,
    "tensor": 2,
    "tensor+fsdp": 4,
    "pipeline-1f1b+ddp": 4,
}
# Choices that must change nothing but speed and memory, each under a strategy for which it is delicate.
CHOICES = {
    "tensor --activation-checkpointing selective": 2,
    "tensor --activation-checkpointing full": 2,
    "fsdp --activation-checkpointing sequential --prefetch 1": 2,
    "pipeline-1f1b --activation-checkpointing full --precision bf16": 4,
    "fsdp --precision fp16 --sequence-length 8": 2,  # which a CPU multiplies slowly
    "ddp --gradient-compression fp16": 2,
    "ddp --gradient-compression bf16": 2,
    "ddp --gradient-compression powersgd": 2,
    "naive-mp --offload-activations --activation-checkpointing full": 2,
    "zero3 --precision bf16 --optimizer sgd --learning-rate 0.1": 2,
    # AdamW does not see gradients that are too large by a factor
    "tensor+fsdp --optimizer sgd --learning-rate 0.1": 4,
    "pipeline-1f1b+ddp --optimizer sgd --learning-rate 0.1": 4,
    f"naive-mp --accumulation 2 {EPOCHS}": 2,
    # blocks of different shapes, which torch's schedules are not given
    "gpipe --model resnet18-cifar --global-batch-size 2 --optimizer sgd --precision bf16": 2,
    "naive-mp --model resnet18-cifar --global-batch-size 2 --optimizer sgd": 2,
}
# Whose memory is counted and held against the plan, with rows long enough to matter beside the weights.
MEMORY = {
    "single --sequence-length 128": 1,
    "single --activation-checkpointing full --sequence-length 128": 1,
    "single --activation-checkpointing every-second --sequence-length 128": 1,
    "ddp --sequence-length 128": 2,
    "ddp --activation-checkpointing full --sequence-length 128": 2,
    "fsdp --sequence-length 128": 2,
    "fsdp --activation-checkpointing full --sequence-length 128": 2,
}
# What these gather and let go falls under other heads than the plan's: their whole is held against it.
TOTAL = {
    "fsdp --accumulation 2 --sequence-length 128": 2,
    "fsdp-grad-op --activation-checkpointing full --sequence-length 128": 2,
    "zero2 --accumulation 2 --sequence-length 128": 2,
    "zero3 --sequence-length 128": 2,
}
CELLS = {
    **MEMORY,
    **TOTAL,
    **RANKS,
    **CHOICES,
    "gpipe --micro-batches 4": 2,
    "pipeline-gpipe --micro-batches 4": 2,
    "pipeline-1f1b --micro-batches 4": 2,
}


def torchrun(ranks: int, *words: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
    """One torchrun on a free port, from the repository's root."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        *words,
    ]
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "built"
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TORCH_EXTENSIONS_DIR": str(built),
        }
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s)
        assert not built.exists(), "a minute of a C++ compiler, for what training never calls"
    return done


def arguments(cell: str) -> list[str]:
    strategy, *words = cell.split() if cell not in RANKS else [cell, *EPOCHS.split()]
    shape = (
        ["--steps", "1", "--warmup", "0", "--repeats", "1"]
        if "resnet" in cell
        else ["--model", "tinygpt-test", *QUICK]
    )
    return ["--strategy", strategy, *shape, *words, "--cpu"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Callable[[str], Json]:
    """The outcome of a cell. All cells of one world size share their processes, which start when the first
    of them is asked for.
    """
    found: dict[str, Json] = {}
    folder = tmp_path_factory.mktemp("cells")

    def outcome(cell: str) -> Json:
        ranks = CELLS[cell]
        if cell not in found and ranks == 1:  # needs no torchrun, but this process
            found[cell] = run_cell(arguments(cell), World(), str(folder / "single"))
        elif cell not in found:
            # zero3 leaves torch.nn.functional changed behind it, so it comes last in a process that runs
            # others too.
            together = sorted(
                (one for one, size in CELLS.items() if size == ranks), key=lambda one: one.startswith("zero3")
            )
            listed, results = folder / f"{ranks}.json", folder / f"{ranks}.results.json"
            listed.write_text(json.dumps([arguments(one) for one in together]))
            program = launcher.start(
                listed, results, ranks=ranks, module="tests.bench.strategies.bench_driver"
            )
            assert program.wait(900) == [0] * ranks, program.output()[-3000:]
            found.update(zip(together, json.loads(results.read_text()), strict=True))
        return found[cell]

    return outcome


def test_every_strategy_has_a_row() -> None:
    assert set(RANKS) == set(STRATEGIES)


@pytest.mark.parametrize("cell", CELLS)
def test_the_losses_are_those_of_one_process(cell: str, measured: Callable[[str], Json]) -> None:
    found = measured(cell)
    assert "measurements" in found, found
    parity = found["measurements"]["parity"]
    assert parity["status"] == "ok", parity
    assert "resnet" in cell or parity["losses"][-1] < parity["losses"][0]
    assert found["measurements"]["step_time_s"]["n"] == found["config"]["steps"]


def test_gpipe_written_out_is_torchs_schedule(measured: Callable[[str], Json]) -> None:
    ours, torchs = (measured(name)["measurements"] for name in ("gpipe", "pipeline-gpipe"))
    for key in ("parity", "training"):
        losses = "losses" if key == "parity" else "loss_by_epoch"
        assert ours[key][losses] == pytest.approx(torchs[key][losses], rel=1e-6)
    kinds = ("bytes_by_collective", "calls_by_collective")
    assert [ours["communication"][kind] for kind in kinds] == [
        torchs["communication"][kind] for kind in kinds
    ]


@pytest.mark.parametrize("cell", [*RANKS, f"naive-mp --accumulation 2 {EPOCHS}"])
def test_an_epoch_of_training_ends_where_one_process_does(cell: str, measured: Callable[[str], Json]) -> None:
    found, alone = (measured(each)["measurements"]["training"] for each in (cell, "single"))
    assert found["loss_by_epoch"] == pytest.approx(alone["loss_by_epoch"], rel=1e-4)
    assert found["accuracy"] == pytest.approx(alone["accuracy"], abs=2e-3)
    assert alone["accuracy"] > 0.002  # of 512 tokens


@pytest.mark.parametrize("cell", RANKS)
def test_a_training_that_is_broken_off_continues_with_the_same_losses(
    cell: str, measured: Callable[[str], Json]
) -> None:
    found = measured(cell)
    whole = list(found["measurements"]["training"]["loss_by_epoch"])
    assert found["broken_off"] == [whole[:1], whole]
    assert whole[1] < whole[0]


@pytest.mark.parametrize(
    "cell",
    [cell for cell, ranks in CELLS.items() if ranks > 1 and "resnet" not in cell and "+ddp" not in cell],
)
def test_the_counted_bytes_are_the_formula(cell: str, measured: Callable[[str], Json]) -> None:
    found = measured(cell)
    record = {"model": "tinygpt-test", "strategy": cell.split()[0], "world_size": CELLS[cell], **found}
    (plan,) = plans([{**record, "global_batch_size": found["config"]["global_batch_size"]}])
    assert plan is not None
    assert plan.bytes_per_step is not None
    formula = plan.bytes_per_step / (2 if "--gradient-compression" in cell else 1)
    if "powersgd" in cell:  # what two ranks send of a message is its size
        formula = sum(
            4 * _powersgd(*p.flatten(1).shape) if p.dim() > 1 else 4 * p.numel() for p in _weights()
        )
        assert formula < plan.bytes_per_step / 4
    assert found["measurements"]["communication"]["bytes_per_step"] == pytest.approx(formula, rel=0.01)


def _weights() -> list[Any]:
    return list(build(find_size("tinygpt-test")).parameters())


def _powersgd(n: int, m: int, rank: int = 4) -> int:
    """Elements that are sent of a matrix: its factors, where they are less than half of it."""
    factors = (n + m) * min(n, m, rank)
    return factors if factors * 2 < n * m else n * m


@pytest.mark.parametrize("cell", [cell for cell, ranks in RANKS.items() if ranks > 1])
def test_every_collective_that_is_called_takes_seconds(cell: str, measured: Callable[[str], Json]) -> None:
    communication = measured(cell)["measurements"]["communication"]
    seconds = communication["seconds_by_collective"]
    called = {kind.replace("reduce_scatter", "all_reduce") for kind in communication["calls_by_collective"]}
    assert seconds.keys() >= called, communication
    assert all(0 < each < 60 for each in seconds.values())


def test_the_counted_bytes_of_pipelines_with_copies_are_those_of_the_two_parts(
    measured: Callable[[str], Json],
) -> None:
    found = measured("pipeline-1f1b+ddp")
    # two groups of two ranks: each a training of half the rows, between them its weights
    record = {"model": "tinygpt-test", "strategy": "pipeline-1f1b", "world_size": 2, **found}
    (plan,) = plans([{**record, "global_batch_size": 4}])
    assert plan is not None
    assert plan.bytes_per_step is not None
    stage = build(find_size("tinygpt-test")).part(0, 3)  # the larger one: embedding and half of the layers
    between = sum(4 * weight.numel() for weight in stage.parameters())
    sent = found["measurements"]["communication"]["bytes_per_step"]
    assert sent == pytest.approx(plan.bytes_per_step + between, rel=0.01)


@pytest.mark.parametrize("cell", ["fsdp-offload", "zero3-offload", "tensor+fsdp"])
def test_the_counted_states_of_a_composed_strategy_are_the_plans(
    cell: str, measured: Callable[[str], Json]
) -> None:
    found = measured(cell)
    record = {"model": "tinygpt-test", "strategy": cell, "world_size": CELLS[cell], **found}
    (plan,) = plans([{**record, "global_batch_size": 8}])
    assert plan is not None
    counted = found["measurements"]["counted_memory_gib"]
    states = sum(counted[name] for name in ("weights", "gradients", "optimizer"))
    here = plan.weights_gib + plan.gradients_gib + plan.optimizer_gib
    assert (here, plan.host_gib) == pytest.approx((0, states) if "offload" in cell else (states, 0), rel=0.01)


def test_the_program_leaves_a_record_with_a_profile_and_prints_it(tmp_path: Path) -> None:
    from podtune.run.collect import collect

    words = [
        "--model",
        "tinygpt-test",
        "--strategy",
        "ddp",
        *QUICK,
        "--cpu",
        "--profile",
        "--output",
        str(tmp_path / "cell"),
    ]
    done = torchrun(2, "-m", "podtune.benchmark", *words)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((tmp_path / "cell" / "run.json").read_text())
    assert (record["status"], record["mode"], record["strategy"], record["world_size"]) == (
        "ok",
        "benchmark",
        "ddp",
        2,
    )
    found = record["measurements"]
    assert found["tokens_per_s"] == pytest.approx(8 * 32 / found["step_time_s"]["mean"])
    assert 0 < found["communication"]["share"] < 1
    assert found["profile"]["top_operators"][0]["self_ms"] > 0
    for file in ("trace", "operators", "memory_timeline"):
        assert (tmp_path / "cell" / found["profile"][file]).stat().st_size > 1000
    assert "tinygpt-test ddp on 2: parity ok, " in done.stdout.splitlines()[0]
    assert collect(done.stdout.splitlines()).records == [record]


AS_ON_A_GPU = """
import sys, torch
ask = torch.is_autocast_enabled
torch.is_autocast_enabled = lambda device="cpu": ask("cpu")  # DeepSpeed asks without a device: of CUDA
from podtune.bench.case.command_line import read_options
from podtune.bench.case.run import CaseRun
from podtune.run.world import (read_world)
from podtune.run.distributed import (setup_distributed)
words = ["--model", "tinygpt-test", "--precision", "bf16", "--cpu", "--global-batch-size", "2"]
world = setup_distributed(60, use_cpu=True)
for strategy in ("zero2", "zero3"):
    options, size, _ = read_options([*words, "--strategy", strategy], read_world())
    run = CaseRun(options, size, world)
    zero = run.setup(strategy, world, options)
    zero.model.blocks[1].up.register_forward_hook(lambda layer, x, y: print(strategy, y.dtype))
    zero.train_step(run.batches(zero.rows, 1)[0])
sys.stdout.flush()
import os
os._exit(0)
"""


def test_zero_computes_in_the_precision_that_it_names() -> None:
    env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", AS_ON_A_GPU], env=env, capture_output=True, text=True, timeout=600
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("zero")]
    assert said == ["zero2 torch.bfloat16", "zero3 torch.bfloat16"], done.stderr[-3000:]


@pytest.mark.parametrize("cell", MEMORY)
def test_the_counted_memory_is_the_plan(cell: str, measured: Callable[[str], Json]) -> None:
    found = measured(cell)
    assert "measurements" in found, found
    record = {"model": "tinygpt-test", "strategy": cell.split()[0], "world_size": CELLS[cell], **found}
    (plan,) = plans([{**record, "global_batch_size": found["config"]["global_batch_size"]}])
    assert plan is not None
    assert plan.activations_gib is not None
    assert plan.head_gib is not None
    counted = found["measurements"]["counted_memory_gib"]
    planned = {
        "weights": plan.weights_gib,
        "gradients": plan.gradients_gib,
        "optimizer": plan.optimizer_gib,
        "activations": plan.activations_gib + plan.head_gib + plan.buffers_gib,
    }
    for name, gib in planned.items():
        assert gib == pytest.approx(counted[name], rel=0.1), name


@pytest.mark.parametrize("cell", TOTAL)
def test_all_the_counted_memory_is_the_plans(cell: str, measured: Callable[[str], Json]) -> None:
    found = measured(cell)
    record = {"model": "tinygpt-test", "strategy": cell.split()[0], "world_size": CELLS[cell], **found}
    (plan,) = plans([{**record, "global_batch_size": found["config"]["global_batch_size"]}])
    assert plan is not None
    assert plan.total_gib == pytest.approx(found["measurements"]["counted_memory_gib"]["total"], rel=0.1)
