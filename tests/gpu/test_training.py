"""The fine-tune on a GPU: its losses, its waits, its ends (checks 6 to 14)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpus import Train, program
from support.launch import free_port, metrics

SHORT = ("--max_steps", 6, "--global_batch_size", 8, "--learning_rate", "2e-3", "--max_length", 128)


def furthest(one: dict[int, float], other: dict[int, float]) -> float:
    assert list(one) == list(other)
    return max(abs(one[step] - other[step]) / abs(other[step]) for step in one)


def test_losses_are_the_cpus_and_bf16_is_near(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, words in (
        ("cpu", ["--use_cpu", "--bf16", "false"]),
        ("fp32", ["--bf16", "false"]),
        ("bf16", []),
    ):
        train(*SHORT, *words, name=name)
    cpu, fp32, bf16 = (metrics(tmp_path / name) for name in ("cpu", "fp32", "bf16"))
    assert furthest(fp32, cpu) < 1e-4
    assert furthest(bf16, fp32) < 2e-2
    assert "variable-length kernel" in capsys.readouterr().out


def test_loras_cast_of_its_input_changes_nothing(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from podtune.sft.train import trainer

    words = (*SHORT, "--use_peft", "--lora_dropout", 0)
    train(*words, name="without")
    monkeypatch.setattr(trainer, "leave_casts_to_autocast", lambda model: None)
    train(*words, name="with")
    assert furthest(metrics(tmp_path / "without"), metrics(tmp_path / "with")) < 1e-6


def test_ligers_kernels_are_taken_and_change_rounding_alone(
    train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    for name, words in (("own", ("--use_liger_kernel", "false")), ("liger", ())):
        train(*SHORT, "--bf16", "false", *words, name=name)
    assert capfd.readouterr().out.count("Liger's kernels: norm, rope, SwiGLU; loss") == 1
    assert furthest(metrics(tmp_path / "liger"), metrics(tmp_path / "own")) < 1e-4


def test_no_line_of_podtune_waits_for_the_gpu_between_logged_steps(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    from podtune.sft.train.trainer import PodtuneTrainer

    real = PodtuneTrainer.training_step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("warn" if 2 <= self.state.global_step < 6 else "default")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(PodtuneTrainer, "training_step", step)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train("--max_steps", 8, "--global_batch_size", 8, "--logging_steps", 100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = {(item.filename, item.lineno) for item in caught if "synchronizing" in str(item.message)}
    print("waits:", *sorted(waits), sep="\n  ")
    assert not [file for file, _ in waits if "/podtune/" in file]


def test_a_run_that_the_gpu_bounds_waits_for_no_data(
    train: Train, medium: Path, long_rows: Path, tmp_path: Path
) -> None:
    from podtune.report.runs.runs import load_run
    from podtune.report.runs.watch import warnings

    words = ("--max_steps", 40, "--per_device_train_batch_size", 16, "--max_length", 1024)
    train(*words, model=medium, data=long_rows)  # long enough for NVML, whose window is up to a second
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    system = [line for line in lines if line["split"] == "system"][3:]
    assert max(line["data_wait_share"] for line in system) < 0.1
    assert max(line["gpu_utilisation_percent"] for line in system) > 80
    assert not [warning for warning in warnings(load_run(tmp_path / "run")) if "data" in warning]


@pytest.mark.parametrize("save_strategy", ["no", "epoch"])
def test_nan_in_the_last_step_is_neither_saved_nor_called_finished(
    save_strategy: str, micro_model: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "q{number}", "answer": "a"}}\n' for number in range(8)))
    words = ["--model_name_or_path", micro_model, "--dataset_name", rows, "--output_dir", tmp_path / "run"]
    words += ["--global_batch_size", 4, "--learning_rate", "1e30", "--max_grad_norm", 0]
    words += ["--num_train_epochs", 1 if save_strategy == "no" else 2, "--save_strategy", save_strategy]
    done = program(*words)
    assert done.returncode == 65, done.stderr
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    assert not (tmp_path / "run" / "final").exists()


def test_a_batch_that_is_too_large_ends_with_71_and_gives_the_memory_back(
    medium: Path, long_rows: Path, tmp_path: Path
) -> None:
    free, _ = torch.cuda.mem_get_info()
    words = ["--model_name_or_path", medium, "--dataset_name", long_rows, "--output_dir", tmp_path / "run"]
    words += ["--per_device_train_batch_size", 2000, "--max_length", 2048]  # 4 M tokens: no card holds them
    done = program(*words, "--memory_check", "false", "--activation_checkpointing", "false")
    assert done.returncode == 71, done.stderr[-2000:]
    assert "smaller per_device_train_batch_size" in done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "oom"
    assert torch.cuda.mem_get_info()[0] > free - 2**30


def test_a_gpu_that_is_hidden_and_promised_is_69_in_training_and_preflight(
    micro_model: Path, qa_data: Path, tmp_path: Path
) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PODTUNE_GPUS_PER_POD": "1"}
    words = ["--model_name_or_path", micro_model, "--dataset_name", qa_data, "--output_dir", tmp_path / "run"]
    assert program(*words, "--max_steps", 1, **hidden).returncode == 69
    assert not (tmp_path / "run" / "run.json").exists()
    command = [sys.executable, "-m", "podtune.cli", "preflight"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **hidden}, timeout=120)
    assert done.returncode == 69, done.stdout + done.stderr


def test_a_run_that_sigterm_ends_goes_on_as_if_unbroken(
    train: Train, micro_model: Path, qa_data: Path, tmp_path: Path
) -> None:
    words = ["--bf16", "false", "--max_steps", 8, "--global_batch_size", 8, "--save_strategy", "steps"]
    train(*words, name="whole")
    command = [sys.executable, "-m", "podtune.training", "--model_name_or_path", micro_model, "--seed", 7]
    command += ["--dataset_name", qa_data / "train.parquet", "--output_dir", tmp_path / "broken", *words]
    with subprocess.Popen([str(word) for word in [*command, "--logging_steps", 1]], stdout=subprocess.PIPE,
                          text=True) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 3/"):
                process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 143
    train(*words, name="broken")
    assert furthest(metrics(tmp_path / "broken"), metrics(tmp_path / "whole")) < 1e-6


def test_one_rank_under_torchrun_trains_evaluates_and_answers(
    micro_model: Path, qa_data: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    command += ["--master-port", str(free_port()), "-m", "podtune.training", "--dataset_name", str(qa_data)]
    command += ["--model_name_or_path", str(micro_model), "--output_dir", str(tmp_path / "run")]
    command += ["--max_steps", "4", "--eval_strategy", "steps", "--eval_steps", "4", "--max_eval_rows", "16"]
    began = time.monotonic()
    done = subprocess.run([*command, "--answer_rows", "2"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "destroy_process_group" not in done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["measurements"]["loss"]["eval"] > 0
    assert record["measurements"]["answers"]["tuned"]
    assert record["measurements"]["memory_estimate"]["total_gib"] > 0
    print(f"{time.monotonic() - began:.0f} s")
