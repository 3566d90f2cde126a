"""What a GPU runs, run on the CPU (PODTUNE_FORCE_GPU_PATH): the fused head on scored rows alone, bf16,
activation checkpointing, and the verdict on a step's loss one step late.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.launch import Launcher, metrics

from podtune.run import checkpoint
from podtune.sft.train import meter
from podtune.sft.train.build import settle_tf32

STEPS = 6
FORCED = {"PODTUNE_FORCE_GPU_PATH": "1"}
LORA = ("--use_peft", "--lora_dropout", 0)


@pytest.fixture(scope="module")
def options(qa_data: Path, micro_model: Path) -> list[object]:
    """Six steps of eight rows each."""
    words = ["--model_name_or_path", micro_model, "--dataset_name", qa_data / "train.parquet"]
    words += ["--max_steps", STEPS, "--global_batch_size", 8, "--learning_rate", "2e-3", "--seed", 7]
    return [*words, "--logging_steps", 1, "--max_length", 128, "--save_strategy", "no"]


Reference = Callable[[str], Path]


@pytest.fixture(scope="module")
def reference(
    launcher: Launcher, options: list[object], tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    """One process in fp32 on the branch of a CPU, with all parameters or an adapter; ddp in bf16 on a GPU's.
    Each is run when it is first asked for.
    """
    folder = tmp_path_factory.mktemp("reference")

    def run(kind: str) -> Path:
        target = folder / kind
        if target.exists():
            return target
        if kind == "bf16":
            launcher.run(*options, "--strategy", "ddp", "--output_dir", target, ranks=2, env=FORCED)
        else:
            words = LORA if kind == "lora" else ()
            launcher.run(*options, *words, "--bf16", "false", "--output_dir", target)
        return target

    return run


def largest_difference(one: Path, other: Path, name: str = "loss") -> float:
    mine, theirs = metrics(one, name=name), metrics(other, name=name)
    assert list(mine) == list(theirs) == list(range(1, STEPS + 1))
    return max(abs(mine[step] - theirs[step]) / abs(theirs[step]) for step in mine)


@pytest.mark.parametrize(
    ("strategy", "ranks", "trained"),
    [
        *[("single", 1, "all"), ("ddp", 2, "all"), ("fsdp", 2, "all"), ("fsdp-grad-op", 2, "all")],
        ("hsdp", 4, "all"),
        *[("single", 1, "lora"), ("fsdp", 2, "lora")],
    ],
)
def test_the_gpus_branch_trains_like_one_process_on_the_cpus(
    strategy: str,
    ranks: int,
    trained: str,
    reference: Reference,
    options: list[object],
    launcher: Launcher,
    tmp_path: Path,
) -> None:
    words = LORA if trained == "lora" else ()
    output = launcher.run(
        *options, *words, "--bf16", "false", "--strategy", strategy if ranks > 1 else "auto",
        "--output_dir", tmp_path, ranks=ranks, env=FORCED,
    )  # fmt: skip
    assert "activation checkpointing on" in output
    assert "the GPU's branch, forced" in output
    assert ("LoRA on down_proj gate_proj k_proj" in output) == (trained == "lora")  # which layers is said
    assert largest_difference(tmp_path, reference(trained)) < 1e-5
    assert largest_difference(tmp_path, reference(trained), "grad_norm") < 1e-4


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2)])
def test_the_fullest_batch_is_tried_after_the_first_step_and_changes_no_bit(
    strategy: str, ranks: int, options: list[object], launcher: Launcher, tmp_path: Path
) -> None:
    words = [*options, *LORA, "--lora_dropout", 0.1, "--gradient_accumulation_steps", 2]
    words += ["--strategy", strategy if ranks > 1 else "auto", "--output_dir"]
    output = launcher.run(*words, tmp_path / "tried", ranks=ranks, env=FORCED)
    assert re.findall("the fullest batch fits: ([0-9]+) rows of up to ([0-9]+) tokens", output) == [
        (str(8 // 2 // ranks), "43")  # the longest of all rows
    ]
    assert output.index("first step done") < output.index("the fullest batch")

    without = launcher.start(
        *words, tmp_path / "plain", ranks=ranks, env=FORCED, module="support.no_fullest_batch"
    )
    assert without.wait() == [0] * ranks
    assert "nothing was tried" in without.output()
    for name in ("loss", "grad_norm"):
        assert metrics(tmp_path / "tried", name=name) == metrics(tmp_path / "plain", name=name)
    trained = [tmp_path / run / "final" / "adapter_model.safetensors" for run in ("tried", "plain")]
    assert trained[0].read_bytes() == trained[1].read_bytes()


def test_rows_that_two_workers_make_are_those_of_the_process_itself(
    reference: Reference, options: list[object], launcher: Launcher, tmp_path: Path
) -> None:
    words = ("--bf16", "false", "--dataloader_num_workers", 2, "--strategy", "ddp")
    launcher.run(*options, *words, "--output_dir", tmp_path, ranks=2)
    assert largest_difference(tmp_path, reference("all")) < 1e-6


@pytest.mark.parametrize(
    ("half", "dtype", "tf32", "precision"),
    [
        ("bf16", torch.float32, False, "bf16"),
        ("", torch.bfloat16, False, "bf16"),
        ("", torch.float16, True, "fp16"),
        ("", torch.float32, True, "tf32"),
        ("", torch.float32, False, "fp32"),
    ],
)
def test_utilisation_is_of_the_peak_of_what_multiplies(
    half: str, dtype: torch.dtype, tf32: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "multiplies_in_tf32", lambda: tf32)
    training = SimpleNamespace(bf16=half == "bf16", fp16=half == "fp16")
    assert meter.product_precision(training, SimpleNamespace(dtype=dtype)) == precision


def asks_for_the_precision_as_inductor_does() -> None:
    assert not meter.multiplies_in_tf32()
    torch.backends.fp32_precision = "tf32"  # as transformers does for torch_compile on a GPU
    assert meter.multiplies_in_tf32()
    settle_tf32()
    assert torch.get_float32_matmul_precision() == "high"


def test_a_compiled_run_may_tune_its_kernels_beside_tf32(launcher: Launcher) -> None:
    process = launcher.process(asks_for_the_precision_as_inductor_does)
    process.join(50)
    assert process.exitcode == 0


def test_ddps_gradients_are_views_of_its_buckets(tmp_path: Path) -> None:
    """Without it DDP holds all gradients twice: 12 GB for 3B."""
    from trl import SFTConfig

    from podtune.sft.train.trainer import PodtuneTrainer

    trainer = PodtuneTrainer.__new__(PodtuneTrainer)
    trainer.args, trainer.model = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False), None
    (handler,) = trainer._build_accelerator_args()["kwargs_handlers"]
    assert handler.gradient_as_bucket_view is True


def test_a_sharded_run_in_bf16_logs_the_loss_that_ddp_logs(
    reference: Reference,
    options: list[object],
    launcher: Launcher,
    tmp_path: Path,
) -> None:
    output = launcher.run(*options, "--strategy", "fsdp", "--output_dir", tmp_path, ranks=2, env=FORCED)
    assert "bf16 autocast" in output
    assert largest_difference(tmp_path, reference("bf16")) < 1e-3


@pytest.mark.parametrize("save_strategy", ["no", "epoch"])
def test_a_loss_that_is_not_finite_in_the_last_step_is_neither_saved_nor_called_finished(
    save_strategy: str, micro_model: Path, launcher: Launcher, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "q{number}", "answer": "a"}}\n' for number in range(8)))
    words = ["--model_name_or_path", micro_model, "--dataset_name", rows, "--global_batch_size", 4]
    words += ["--learning_rate", "1e30", "--max_grad_norm", 0, "--bf16", "false"]  # the second step is lost
    words += ["--num_train_epochs", 1 if save_strategy == "no" else 2, "--save_strategy", save_strategy]
    output = launcher.run(*words, "--output_dir", tmp_path / "run", env=FORCED, codes=[65])
    assert "not finite at step 2" in output
    assert not (tmp_path / "run" / "final").exists()
    assert not checkpoint.checkpoints(tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["status"], record["exit_code"]) == ("error", 65)


def test_a_gpu_that_was_promised_and_cannot_be_used_ends_training_before_anything_is_loaded(
    options: list[object], launcher: Launcher, tmp_path: Path
) -> None:
    output = launcher.run(
        *options, "--output_dir", tmp_path / "run", env={"PODTUNE_GPUS_PER_POD": "1"}, codes=[69]
    )
    assert "1 GPU promised to this pod (PODTUNE_GPUS_PER_POD), and CUDA can use none: " in output
    assert not (tmp_path / "run" / "run.json").exists()
