"""What a cell refuses, before torch is loaded, and what it says then."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from podtune.bench.case.command_line import parser, read_options
from podtune.bench.options import Options
from podtune.plan.predicted_vs_measured import plans
from podtune.run.errors import UserError
from podtune.run.world import World

ROOT = Path(__file__).parents[2]
TINY = ["--model", "tinygpt-test"]


def refused(words: list[str], world_size: int = 1) -> str:
    with pytest.raises(UserError) as found:
        read_options(words, World(world_size=world_size, local_world_size=world_size))
    assert found.value.code == 2 or 64 <= found.value.code <= 78
    return str(found.value)


@pytest.mark.parametrize(
    ("words", "world_size", "says"),
    [
        (["--model", "tinygpt-12m", "--strategy", "ddp"], 2, "did you mean 'tinygpt-124m'"),
        ([*TINY, "--strategy", "fdsp"], 2, "did you mean 'fsdp'"),
        (["--model", "hf:/nowhere", "--strategy", "ddp"], 2, "/nowhere has no config.json"),
        ([*TINY, "--strategy", "single"], 2, "start one, or use ddp"),
        ([*TINY, "--strategy", "ddp", "--global-batch-size", "8"], 3, "use 9 or 6 rows"),
        (
            [*TINY, "--strategy", "ddp", "--global-batch-size", "8", "--per-device-batch-size", "4"],
            *(2, "the batch is given twice"),
        ),
        ([*TINY, "--strategy", "ddp", "--accumulation", "8"], 2, "2 processes x 8 accumulation"),
        ([*TINY, "--strategy", "pipeline-gpipe"], 3, "start 2 or 4"),
        ([*TINY, "--strategy", "tensor+fsdp"], 2, "start 4 or more"),
        ([*TINY, "--strategy", "pipeline-1f1b+ddp", "--shard-size", "3"], 6, "start 2 or 4"),
        ([*TINY, "--strategy", "naive-mp"], 5, "start at most 4"),
        ([*TINY, "--strategy", "tensor"], 3, "start 2 or 4"),
        ([*TINY, "--strategy", "hsdp", "--shard-size", "3"], 4, "use 1 or 2 or 4"),
        ([*TINY, "--strategy", "pipeline-1f1b", "--micro-batches", "3"], 2, "use 9 or 6 rows"),
        ([*TINY, "--strategy", "pipeline-1f1b", "--micro-batches", "2"], 4, "use at least 4"),
        ([*TINY, "--strategy", "pipeline-gpipe", "--accumulation", "2"], 2, "use --micro-batches"),
        ([*TINY, "--strategy", "ddp", "--micro-batches", "2"], 2, "use --accumulation"),
        ([*TINY, "--strategy", "naive-mp", "--precision", "fp16"], 2, "use fp32 or bf16"),
        ([*TINY, "--strategy", "zero3", "--compile"], 2, "zero3 does not honour --compile"),
        ([*TINY, "--strategy", "fsdp", "--gradient-compression", "bf16"], 2, "fsdp does not honour"),
        (
            [*TINY, "--strategy", "ddp", "--gradient-compression", "powersgd", "--precision", "fp16"],
            *(2, "an overflow of fp16 would stay in it"),
        ),
        ([*TINY, "--strategy", "ddp", "--prefetch", "2"], 2, "ddp does not honour --prefetch"),
        ([*TINY, "--strategy", "ddp", "--optimizer", "sgd", "--fused-optimizer"], 2, "no fused SGD"),
        (["--model", "resnet18-cifar", "--strategy", "tensor"], 2, "has none"),
        (["--model", "resnet18-cifar", "--strategy", "ddp", "--width", "40"], 2, "multiple of 32"),
        (["--model", "resnet18-cifar", "--strategy", "ddp", "--layers", "40"], 2, "multiple of 32"),
        ([*TINY, "--strategy", "ddp", "--width", "130"], 2, "4 heads do not divide a width of 130"),
        (["--model", "resnet18-cifar", "--strategy", "ddp", "--sequence-length", "4"], 2, "reads images"),
        ([*TINY, "--strategy", "ddp", "--norm", "batch"], 2, "has no batch norm"),
        ([*TINY, "--strategy", "ddp", "--sequence-length", "4096"], 2, "the context of tinygpt-test"),
        ([*TINY, "--strategy", "ddp", "--steps", "0"], 2, "--steps"),
        ([*TINY, "--strategy", "ddp", "--save", "/tmp/state"], 2, "add --epochs"),
        ([*TINY, "--strategy", "ddp", "--epochs", "2", "--resume"], 2, "add --save"),
        ([*TINY, "--strategy", "ddp", "--data", "/nowhere"], 2, "/nowhere does not exist"),
    ],
)
def test_what_cannot_run_is_refused_and_says_what_would(words: list[str], world_size: int, says: str) -> None:
    assert says in refused(words, world_size)


def test_rows_of_a_process_make_the_batch_of_all() -> None:
    for ranks in (1, 2, 4):
        words = [*TINY, "--strategy", "ddp" if ranks > 1 else "single", "--per-device-batch-size", "6"]
        options, _, _ = read_options(words, World(world_size=ranks, local_world_size=ranks))
        assert (options.global_batch_size, options.per_device_batch_size) == (6 * ranks, 6)


def test_a_model_of_another_size_is_planned_and_built_as_that() -> None:
    import torch

    from podtune.bench.models import build

    narrow = ["--model", "resnet34-cifar", "--width", "32", "--strategy", "single"]
    small = [*TINY, "--layers", "2", "--heads", "2", "--width", "64", "--context", "48"]
    small += ["--strategy", "single"]
    for words in (narrow, small):
        options, size, _ = read_options(words, World())
        with torch.device("meta"):
            model = build(size)
        assert sum(each.numel() for each in model.parameters()) == size.parameters
        record = {"model": options.model, "strategy": "single", "world_size": 1, "config": asdict(options)}
        (plan,) = plans([{**record, "global_batch_size": options.global_batch_size}])
        assert plan
        assert plan.parameters == size.parameters
    assert options.sequence_length == 48


@pytest.mark.parametrize("case", ["resnet-ddp", "resnet-fsdp", "gpt-fsdp"])
def test_the_ready_cases_are_read_and_the_command_line_counts_more(case: str) -> None:
    file = ROOT / "benchmarks" / "cases" / f"{case}.yaml"
    world = World(world_size=8, local_world_size=8)
    options, size, _ = read_options(["--config", str(file), "--steps", "7"], world)
    assert (options.steps, options.strategy) == (7, case.partition("-")[2])
    assert options.global_batch_size == 8 * options.per_device_batch_size
    if case == "gpt-fsdp":
        assert size.parameters == pytest.approx(6.7e9, rel=0.02)
        assert options.skip_parity


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: {name: tinygpt-test}\nmodle: {}", "did you mean 'model'"),
        ("- a", "is not a mapping"),
        ("model: [", "not YAML"),
    ],
)
def test_a_config_that_is_none_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "case.yaml").write_text(text)
    assert says in refused(["--config", str(tmp_path / "case.yaml"), "--strategy", "single"])


def test_heads_of_a_transformers_model_count_too(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "intermediate_size": 96, **config})
    )
    assert "2 key and value heads" in refused(["--model", f"hf:{tmp_path}", "--strategy", "tensor"], 4)


def test_what_was_not_asked_for_is_resolved() -> None:
    options, _, _ = read_options([*TINY, "--strategy", "hsdp"], World(world_size=4, local_world_size=4))
    assert (options.global_batch_size, options.sequence_length, options.shard_size) == (8, 128, 2)
    options, _, _ = read_options(
        [*TINY, "--strategy", "hsdp"], World(world_size=8, local_world_size=4, nnodes=2)
    )
    assert options.shard_size == 4
    options, _, _ = read_options(
        [*TINY, "--strategy", "pipeline-gpipe", "--global-batch-size", "12"], World(world_size=2)
    )
    assert options.micro_batches == 6


def test_the_command_line_has_every_option() -> None:
    words = {action.dest for action in parser()._actions} - {"help", "config"}
    assert words == set(Options.__dataclass_fields__)


def test_a_mistake_is_answered_without_loading_torch() -> None:
    program = (
        "import sys; from podtune.benchmark import main; code = main(['--model', 'tinygpt-test', "
        "'--strategy', 'dpd']);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.returncode == 64, done.stderr
    assert "did you mean 'ddp'" in done.stderr
