"""podtune init writes values that render and lint clean, and says why it chose what it chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import podtune
from podtune.cli import app

SMOLLM3 = ("--data", "trl-lib/Capybara", "--model", "HuggingFaceTB/SmolLM3-3B")


def init(folder: Path, *words: str) -> tuple[dict[str, Any], str]:
    """The values that were written, and what was printed; they render and lint clean."""
    file = folder / "mine.yaml"
    done = CliRunner().invoke(app, ["init", "--output", str(file), *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    verdict = podtune.lint(podtune.render(file, name="mine"))
    assert verdict.jobs == ["PyTorchJob mine"]
    assert [finding for finding in verdict.findings if finding.severity == "error"] == []
    return yaml.safe_load(file.read_text()), done.output


def test_a_model_too_large_for_one_card_gets_lora_and_the_plan_as_the_reason(tmp_path: Path) -> None:
    values, said = init(tmp_path, *SMOLLM3, "--hardware", "L40S", "--max-length", "1024")
    assert yaml.safe_load(values["config"])["use_peft"] is True
    assert "LoRA by single" in said
    assert "podtune submit -f" in said


def test_a_gpu_without_bf16_is_planned_in_fp16_and_the_file_leaves_the_choice_to_it(tmp_path: Path) -> None:
    values, said = init(tmp_path, *SMOLLM3, "--hardware", "T4", "--max-length", "1024")
    config = yaml.safe_load(values["config"])
    assert not {"bf16", "fp16", "dtype"} & set(config)
    assert "GiB a GPU by podtune bench plan" in said


def test_two_nodes_shard_what_one_cannot_hold_and_share_their_volumes(tmp_path: Path) -> None:
    values, said = init(tmp_path, *SMOLLM3, "--nodes", "2", "--hardware", "L40S", "--max-length", "1024")
    assert values["distributed"] == {"nodes": 2, "nprocPerNode": 1, "strategy": "fsdp"}
    assert values["persistence"]["output"]["accessModes"] == ["ReadWriteMany"]
    assert "all weights by fsdp" in said


def test_enough_memory_trains_all_weights(tmp_path: Path) -> None:
    values, said = init(tmp_path, *SMOLLM3, "--gpus", "8", "--hardware", "H100", "--max-length", "512")
    assert "use_peft" not in yaml.safe_load(values["config"])
    assert "all weights by" in said
    assert values["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_own_rows_are_looked_at_and_named_where_the_pods_will_find_them(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("question,answer\nWhat is 1?,one\n")
    values, _ = init(tmp_path, "--data", str(rows), "--model", "org/unknown", "--gpus", "0")
    assert yaml.safe_load(values["config"])["dataset_name"] == "/data/rows.csv"
    rows.write_text("a,b\n1,2\n")
    with pytest.raises(podtune.UserError, match="column"):
        init(tmp_path, "--data", str(rows), "--model", "org/unknown", "--force")


def test_a_model_that_cannot_fit_and_a_file_that_is_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(podtune.UserError, match="does not fit"):
        init(tmp_path, *SMOLLM3, "--hardware", "A10", "--max-length", "65536")
    named = ["init", *SMOLLM3, "--output", str(tmp_path / "My_first.yaml")]
    assert "--name my-first " in CliRunner().invoke(app, named).output  # as Kubernetes spells names
    (tmp_path / "mine.yaml").write_text("mine: true\n")
    with pytest.raises(podtune.UserError, match="there already"):
        init(tmp_path, *SMOLLM3)
    assert (tmp_path / "mine.yaml").read_text() == "mine: true\n"


def test_what_would_break_the_config_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(podtune.UserError, match="config of the values"):
        init(tmp_path, "--data", "org/a: b", "--model", "org/unknown")
    assert not (tmp_path / "mine.yaml").exists()
