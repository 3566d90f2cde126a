"""Liger's kernels, run on the CPU by Triton's interpreter: taken where they agree, and only there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.launch import metrics

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")

TESTS = Path(__file__).parents[2]
Train = Callable[..., str]
AGREE = r"Liger's kernels: norm, rope, SwiGLU; loss and gradient norm agree to [0-9]e-0([0-9])"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short rows: the interpreter takes milliseconds for each token and kernel."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("".join(f'{{"text": "{number} {number}"}}\n' for number in range(10, 26)))
    return file


@pytest.fixture
def train(rows: Path, micro_model: Path) -> Train:
    """Train a short row a rank and step in fp32, in processes of their own."""

    def run(output: Path, *words: object, ranks: int = 1, wrong: str = "") -> str:
        launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "-m"]
        command = [sys.executable, "-m", *(launch if ranks > 1 else ()), "support.interpreted_liger"]
        command += ["--model_name_or_path", micro_model, "--dataset_name", rows, "--output_dir", output]
        command += ["--per_device_train_batch_size", 1, "--max_steps", 2, "--save_strategy", "no"]
        command += ["--logging_steps", 1, "--bf16", "false", "--activation_checkpointing", "false", *words]
        env = {"PODTUNE_FORCE_GPU_PATH": "1", "WRONG_KERNEL": wrong, "PYTHONPATH": str(TESTS)}
        done = subprocess.run(
            [str(word) for word in command], env=os.environ | env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_kernels_that_agree_are_taken_and_a_resumed_run_takes_them_again(
    train: Train, tmp_path: Path
) -> None:
    words = ("--save_strategy", "steps", "--save_steps", 1)
    agreed = re.findall(AGREE, train(tmp_path, *words))
    assert len(agreed) == 1
    assert int(agreed[0]) >= 5
    losses, trained = metrics(tmp_path), (tmp_path / "final" / "model.safetensors").read_bytes()

    shutil.rmtree(tmp_path / "checkpoint-2")
    shutil.rmtree(tmp_path / "final")
    again = train(tmp_path, *words)
    assert "resuming from" in again
    assert len(re.findall(AGREE, again)) == 1
    assert metrics(tmp_path) == losses
    assert (tmp_path / "final" / "model.safetensors").read_bytes() == trained


def test_kernels_that_differ_are_not_taken_and_leave_no_trace(train: Train, tmp_path: Path) -> None:
    lora = ("--use_peft", "--lora_dropout", 0.1)
    off = train(tmp_path / "off", *lora, "--use_liger_kernel", "false")
    assert "Liger" not in off
    wrong = train(tmp_path / "wrong", *lora, wrong="norm")
    assert re.search(r"Liger's kernels: not taken \(loss or gradient norm differs by \de-0\d, more", wrong)
    for name in ("loss", "grad_norm"):
        assert metrics(tmp_path / "wrong", name=name) == metrics(tmp_path / "off", name=name)


def test_all_ranks_of_a_sharded_model_decide_alike(train: Train, tmp_path: Path) -> None:
    taken = train(tmp_path / "taken", "--strategy", "fsdp", ranks=2)
    assert len(re.findall(AGREE, taken)) == 1
    refused = train(tmp_path / "refused", "--strategy", "fsdp", ranks=2, wrong="raises")
    assert re.search(r"Liger's kernels: not taken \(InterpreterError: .*no compiler here", refused)
    for name in ("loss", "grad_norm"):
        assert metrics(tmp_path / "refused", name=name) == pytest.approx(
            metrics(tmp_path / "taken", name=name), rel=1e-5
        )
