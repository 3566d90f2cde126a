"""The fine-tune, by its real program: every way of distributing it trains the same, and what it leaves is
complete.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.launch import Launcher, metrics

STEPS = 6


@pytest.fixture(scope="module")
def options(qa_data: Path, micro_model: Path) -> list[object]:
    """Six fp32 steps of eight rows each, evaluated at the end."""
    words = [
        "--model_name_or_path",
        micro_model,
        "--dataset_name",
        qa_data,
        "--max_steps",
        STEPS,
        "--global_batch_size",
        8,
    ]
    words += [
        "--bf16",
        "false",
        "--learning_rate",
        "2e-3",
        "--logging_steps",
        1,
        "--max_length",
        128,
        "--seed",
        7,
    ]
    return [
        *words,
        "--eval_strategy",
        "steps",
        "--eval_steps",
        STEPS,
        "--max_eval_rows",
        21,
        "--save_steps",
        STEPS,
    ]


@pytest.fixture(scope="module")
def alone(launcher: Launcher, options: list[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, everything on: answers at the end, an Aim repo."""
    run = tmp_path_factory.mktemp("runs") / "alone"
    launcher.run(*options, "--output_dir", run, "--answer_rows", 2, "--answer_max_new_tokens", 8)
    return run


def largest_difference(one: dict[int, float], other: dict[int, float]) -> float:
    assert list(one) == list(other)
    return max(abs(one[step] - other[step]) / abs(other[step]) for step in one)


@pytest.mark.parametrize(
    ("strategy", "ranks", "tolerance"),
    [
        ("ddp", 2, 1e-5),
        ("fsdp", 2, 1e-3),
        ("fsdp-grad-op", 2, 1e-3),
        ("hsdp", 4, 1e-3),
    ],
)
def test_every_strategy_trains_like_one_process(
    strategy: str,
    ranks: int,
    tolerance: float,
    alone: Path,
    options: list[object],
    launcher: Launcher,
    tmp_path: Path,
) -> None:
    launcher.run(*options, "--output_dir", tmp_path / "run", "--strategy", strategy, ranks=ranks)
    assert largest_difference(metrics(tmp_path / "run"), metrics(alone)) < tolerance
    assert largest_difference(metrics(tmp_path / "run", "eval"), metrics(alone, "eval")) < tolerance
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["strategy"], record["world_size"], record["status"]) == (strategy, ranks, "ok")
    assert (
        record["measurements"]["tokens"]
        == json.loads((alone / "run.json").read_text())["measurements"]["tokens"]
    )
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
    for line in system_lines(tmp_path / "run")[1:]:  # the first step is not measured
        figures = {"data_wait_s", "rss_gib"} | ({"forward_s"} if strategy == "ddp" else set())
        assert set(line["per_rank"]) == figures, (
            "a forward pass that gathers weights waits for others: no figure of a rank's own"
        )
        assert all(
            len(column) == ranks and all(value > 0 for value in column)
            for column in line["per_rank"].values()
        )
        assert line["rss_gib"] == max(line["per_rank"]["rss_gib"])
        assert ("slowest_ratio" in line) == (strategy == "ddp")
        assert not any(name.startswith("gpu") for name in line), "absent where there is no GPU, never zero"


def system_lines(run: Path) -> list[dict[str, Any]]:
    """The system lines of a run: one for each logged step, no more."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["split"] == "system"]
    assert [line["step"] for line in found] == [line["step"] for line in lines if line["split"] == "train"]
    return found


def test_accumulation_trains_like_a_larger_batch(
    alone: Path, options: list[object], launcher: Launcher, tmp_path: Path
) -> None:
    words = ["--per_device_train_batch_size", 2, "--pad_to_multiple_of", 64]  # rows end to end, filled up
    launcher.run(*options, "--output_dir", tmp_path / "run", *words)
    record, other = (json.loads((run / "run.json").read_text()) for run in (tmp_path / "run", alone))
    assert record["config"]["gradient_accumulation_steps"] == 4
    assert record["measurements"]["tokens"] == other["measurements"]["tokens"]
    assert largest_difference(metrics(tmp_path / "run"), metrics(alone)) < 1e-5


def test_lora_trains_the_adapter_only_and_the_same_on_two_ranks(
    options: list[object], launcher: Launcher, tmp_path: Path
) -> None:
    runs = {ranks: tmp_path / f"{ranks}-ranks" for ranks in (1, 2)}
    for ranks, run in runs.items():
        launcher.run(*options, "--output_dir", run, "--use_peft", "--lora_dropout", 0, ranks=ranks)
        assert (run / "final" / "adapter_model.safetensors").exists()
        assert not (run / "final" / "model.safetensors").exists()
    assert largest_difference(metrics(runs[1]), metrics(runs[2])) < 1e-3


@pytest.mark.parametrize(
    "words",
    [["--packing"], ["--assistant_only_loss"], ["--padding_free", "false", "--attn_implementation", "sdpa"]],
)
def test_packing_and_masks_run(
    words: list[str], options: list[object], launcher: Launcher, tmp_path: Path
) -> None:
    launcher.run(*options, "--output_dir", tmp_path / "run", *words)
    losses = metrics(tmp_path / "run")
    assert losses[STEPS] < losses[1]


def test_a_streamed_run_of_two_ranks_goes_on_at_the_row_where_it_stopped(
    options: list[object], launcher: Launcher, tmp_path: Path
) -> None:
    words = [*options, "--dataset_streaming", "--lr_scheduler_type", "constant", "--shuffle_dataset"]
    launcher.run(*words, "--output_dir", tmp_path / "whole", ranks=2)
    output = launcher.run(*words, "--output_dir", tmp_path / "run", "--max_steps", 2, ranks=2)
    assert "streamed rows" in output
    launcher.run(*words, "--output_dir", tmp_path / "run", "--allow_resume_change", ranks=2)
    assert largest_difference(metrics(tmp_path / "run"), metrics(tmp_path / "whole")) < 1e-5
    whole, record = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("whole", "run"))
    assert record["attempts"][1]["from_step"] == 2
    assert record["measurements"]["tokens"] == whole["measurements"]["tokens"]
    assert record["measurements"]["samples"] == 8 * STEPS
    assert record["data"]["streamed"]
    assert "rows" not in record["data"]
    manifest = tmp_path / "run" / f"checkpoint-{STEPS}" / "podtune-manifest.json"
    assert json.loads(manifest.read_text())["facts"]["position"] == 8 * STEPS
    assert not any(
        "epoch" in json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    )


def test_the_lean_loss_is_trls(
    alone: Path, options: list[object], launcher: Launcher, tmp_path: Path
) -> None:
    launcher.run(
        *options,
        "--output_dir",
        tmp_path / "run",
        "--loss",
        "trl",
        "--padding_free",
        "false",
        "--attn_implementation",
        "sdpa",
    )
    assert largest_difference(metrics(alone), metrics(tmp_path / "run")) < 1e-5
    assert (
        largest_difference(metrics(alone, name="grad_norm"), metrics(tmp_path / "run", name="grad_norm"))
        < 1e-5
    )


def test_a_run_leaves_what_the_interfaces_promise(alone: Path) -> None:
    record = json.loads((alone / "run.json").read_text())
    assert record["schema"] == "podtune.run/1"
    assert (record["mode"], record["status"], record["exit_code"], record["global_batch_size"]) == (
        "sft",
        "ok",
        0,
        8,
    )
    found = record["measurements"]
    assert found["steps"] == STEPS
    assert found["step_time_s"]["n"] == STEPS - 2
    assert found["tokens_per_s"] > 0
    assert found["peak_memory_gib"]["max"] > 0
    assert set(found["answers"]["tuned"]) >= {"exact_match", "perplexity"}
    assert record["data"]["rows"] > 400
    assert re.fullmatch("[0-9a-f]{12}", record["data"]["tokenizer"])
    assert record["attempts"][0]["from_step"] == 0
    assert record["config"]["accelerator_config"]["even_batches"] is True
    assert "mfu" not in found  # the CPU's peak is not known: absent, never zero
    for name in (
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
        "README.md",
        "config.json",
    ):
        assert (alone / "final" / name).is_file(), name
    assert (alone / f"checkpoint-{STEPS}" / "podtune-manifest.json").is_file()
    assert not (alone / ".saving").exists()


def test_a_run_shorter_than_its_logging_steps_counts_its_rows_tokens_and_loss(
    micro_model: Path, launcher: Launcher, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"question": f"q{number}", "answer": "a"}) + "\n" for number in range(5))
    )
    words = [
        "--model_name_or_path",
        micro_model,
        "--dataset_name",
        rows,
        "--per_device_train_batch_size",
        4,
        "--output_dir",
        tmp_path / "run",
    ]
    launcher.run(*words, "--max_steps", 3, "--save_strategy", "no", "--logging_steps", 10)
    found = json.loads((tmp_path / "run" / "run.json").read_text())
    assert found["measurements"]["samples"] == 5 + 4  # steps of 4, 1 and 4 rows
    assert found["measurements"]["tokens"] > 9 * 10
    assert metrics(tmp_path / "run") == {3: found["measurements"]["loss"]["last"]}
    assert (found["global_batch_size"], found["config"]["global_batch_size"]) == (4, 4)


def test_rows_that_several_ranks_repeat_are_counted_and_said(
    micro_model: Path, launcher: Launcher, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"question": f"q{number}", "answer": "a"}) + "\n" for number in range(5))
    )
    words = [
        "--model_name_or_path",
        micro_model,
        "--dataset_name",
        rows,
        "--per_device_train_batch_size",
        2,
        "--save_strategy",
        "no",
    ]
    output = launcher.run(*words, "--max_steps", 2, "--output_dir", tmp_path / "run", ranks=2)
    found = json.loads((tmp_path / "run" / "run.json").read_text())["measurements"]
    assert "each epoch repeats rows 3 times (of 5 rows)" in output
    assert found["samples"] == 8
    assert found["tokens"] % found["samples"] == 0  # rows of equal length, all counted


def test_a_yaml_of_trl_sft_runs_unchanged(
    qa_data: Path, micro_model: Path, launcher: Launcher, tmp_path: Path
) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(
        f"model_name_or_path: {micro_model}\n"
        f"datasets:\n  - path: parquet\n    data_files: {qa_data / 'train.parquet'}\n    columns: [question, "
        "answer]\n"
        "learning_rate: 2.0e-4\nnum_train_epochs: 1\nmax_steps: 2\nper_device_train_batch_size: "
        "2\ngradient_accumulation_steps: 2\n"
        "gradient_checkpointing: true\npacking: true\nmax_length: 256\nuse_peft: true\nlora_r: "
        "8\nlora_alpha: 16\n"
        f"logging_steps: 1\nreport_to: none\noutput_dir: {tmp_path / 'run'}\nenv:\n  PODTUNE_TEST: 'yes'\n"
    )
    launcher.run("--config", path)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["measurements"]["steps"] == 2
