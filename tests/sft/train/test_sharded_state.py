"""The checkpoints of a sharded model: shards in safetensors, which any number of processes resumes from."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.checkpoints import Bomb, damage
from support.launch import Launcher, metrics

from podtune.run import checkpoint
from podtune.run.errors import ConfigError
from podtune.sft.train.sharded_state import ShardedCheckpoints, save_shards


@pytest.fixture(scope="module")
def options(qa_data: Path, micro_model: Path) -> list[object]:
    """Four fp32 steps of four rows, each logged and saved."""
    words = ["--model_name_or_path", micro_model, "--dataset_name", qa_data / "train.parquet"]
    words += ["--bf16", "false", "--learning_rate", "1e-3", "--max_length", 64, "--global_batch_size", 4]
    return [
        *words,
        "--per_device_train_batch_size",
        1,
        "--logging_steps",
        1,
        "--save_steps",
        1,
        "--max_steps",
        4,
    ]


@pytest.fixture(scope="module")
def sharded(launcher: Launcher, options: list[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("sharded") / "run"
    launcher.run(*options, "--strategy", "fsdp", "--output_dir", run, ranks=2)
    return run


def at_step(step: int, run: Path, target: Path) -> Path:
    """A copy of ``run`` as if it had ended without a word after ``step``."""
    shutil.copytree(run, target)
    shutil.rmtree(target / "final")
    for later in checkpoint.checkpoints(target):
        if int(later.name.partition("-")[2]) > step:
            shutil.rmtree(later)
    return target


def test_each_rank_writes_its_shards_and_nothing_that_is_unpickled(sharded: Path) -> None:
    folder = sharded / "checkpoint-2"
    assert damage(folder) == ""
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    shards = {f"sharded/shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)}
    assert {name for name in files if name.startswith("sharded/")} == {*shards, "sharded/optimizer.json"}
    assert not any("optimizer" in name or "fsdp" in name for name in files if name.endswith((".bin", ".pt")))
    sizes = [(folder / name).stat().st_size for name in sorted(shards)]
    assert max(sizes) < 1.2 * min(sizes)
    whole = load_file(folder / "model.safetensors")  # in the layout of every other checkpoint, too
    name, weight = next((name, weight) for name, weight in whole.items() if "mlp" in name)
    parts = [safe_open(folder / shard, "pt").get_tensor(f"model.{name}") for shard in sorted(shards)]
    assert [len(part) for part in parts] == [len(weight) / 2] * 2
    assert (parts[0] == weight[: len(parts[0])]).all()


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "auto"), (2, "ddp"), (2, "fsdp-grad-op"), (4, "hsdp")])
def test_any_number_of_processes_resumes(
    ranks: int, strategy: str, sharded: Path, options: list[object], launcher: Launcher, tmp_path: Path
) -> None:
    run = at_step(2, sharded, tmp_path / "run")
    words = [*options, "--strategy", strategy, "--allow_resume_change", "--output_dir", run]
    assert "resuming from" in launcher.run(*words, ranks=ranks)
    for name in ("loss", "grad_norm"):
        assert metrics(run, name=name) == pytest.approx(metrics(sharded, name=name), rel=2e-5)


def test_a_pickle_beside_the_shards_does_nothing_and_a_changed_shard_is_refused(
    sharded: Path, options: list[object], launcher: Launcher, tmp_path: Path
) -> None:
    run, exploded = at_step(3, sharded, tmp_path / "run"), tmp_path / "exploded"
    shard = next((run / "checkpoint-3" / "sharded").glob("shard-00002-*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert "has changed since it was written" in damage(run / "checkpoint-3")
    (run / "checkpoint-2" / "sharded" / ".metadata").write_bytes(pickle.dumps(Bomb(exploded)))
    words = [*options, "--strategy", "fsdp", "--output_dir", run]
    output = launcher.run(*words, ranks=2)
    assert "checkpoint-2" in output.partition("resuming from")[2].splitlines()[0]
    assert not exploded.exists()
    assert metrics(run) == metrics(sharded)
    assert (run / "final" / "model.safetensors").read_bytes() == (
        sharded / "final" / "model.safetensors"
    ).read_bytes()


def test_the_optimizers_numbers_are_plain_json(sharded: Path) -> None:
    numbers = json.loads((sharded / "checkpoint-2" / "sharded" / "optimizer.json").read_text())
    rates = {group["lr"] for group in numbers["param_groups"]}
    assert len(rates) == 1
    assert 0 < rates.pop() < 1e-3


def test_an_adapter_is_resumed_and_its_best_step_kept(
    options: list[object], launcher: Launcher, qa_data: Path, tmp_path: Path
) -> None:
    words = [*options, "--strategy", "fsdp", "--use_peft", "--bf16", "true", "--learning_rate", "5e-2"]
    words += [
        "--eval_dataset_name",
        qa_data / "eval.parquet",
        "--max_eval_rows",
        9,
        "--eval_strategy",
        "steps",
    ]
    words += ["--eval_steps", 1, "--load_best_model_at_end"]
    launcher.run(*words, "--output_dir", tmp_path / "whole", ranks=2)
    run = at_step(2, tmp_path / "whole", tmp_path / "run")
    assert "resuming from" in launcher.run(*words, "--output_dir", run, ranks=2)
    assert metrics(run) == metrics(tmp_path / "whole")
    adapter = "adapter_model.safetensors"
    trained = (run / "final" / adapter).read_bytes()
    assert trained == (tmp_path / "whole" / "final" / adapter).read_bytes()
    losses = metrics(run, "eval", "loss")
    best = min(losses, key=losses.__getitem__)
    assert load_file(run / "final" / adapter).keys() == load_file(run / f"checkpoint-{best}" / adapter).keys()
    assert trained == (run / f"checkpoint-{best}" / adapter).read_bytes()


def test_fsdp_says_that_a_checkpoint_without_shards_is_not_its_own(tmp_path: Path) -> None:
    trainer = ShardedCheckpoints()
    trainer.is_fsdp_enabled = True
    with pytest.raises(ConfigError, match="has none"):
        trainer._load_from_checkpoint(str(tmp_path))


def test_a_volume_that_cannot_be_written_is_an_oserror_as_in_every_save(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    (tmp_path / "sharded").write_text("no folder")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(OSError, match="sharded"):
            save_shards(model, torch.optim.AdamW(model.parameters()), tmp_path)
    finally:
        torch.distributed.destroy_process_group()
