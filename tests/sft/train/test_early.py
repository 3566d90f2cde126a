"""Early stopping: all ranks stop together, the run is a good one, and a second start finds it finished."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from support.launch import Launcher, metrics

from podtune.run.errors import UserError
from podtune.sft.config import settings


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_no_longer_improves_ends_well_and_stays_ended(
    ranks: int, launcher: Launcher, qa_data: Path, micro_model: Path, tmp_path: Path
) -> None:
    words: list[object] = [
        "--model_name_or_path",
        micro_model,
        "--dataset_name",
        qa_data,
        "--output_dir",
        tmp_path,
    ]
    words += ["--bf16", "false", "--learning_rate", "1e-9", "--max_length", 32, "--global_batch_size", 4]
    words += ["--max_steps", 40, "--logging_steps", 1, "--max_eval_rows", 4, "--save_steps", 1000]
    words += ["--eval_strategy", "steps", "--eval_steps", 2]
    words += ["--early_stopping_patience", 3, "--early_stopping_threshold", 0.5]
    launcher.run(*words, ranks=ranks)
    record = json.loads((tmp_path / "run.json").read_text())
    assert (record["status"], record["exit_code"]) == ("ok", 0)
    assert record["measurements"]["steps"] == 8  # the first of four evaluations is the best so far
    because, best = record["reason"].split("; ")
    assert because == "stopped early: 3 evaluations in a row brought no better value"
    assert re.fullmatch(r"step [2468] was the best, final/ is step 8", best)
    assert (tmp_path / "final" / "model.safetensors").is_file()
    assert "is finished at step 8" in launcher.run(*words, ranks=ranks)
    # killed behind its last checkpoint, it trains no step more either
    shutil.rmtree(tmp_path / "final")
    (tmp_path / "run.json").unlink()
    launcher.run(*words, ranks=ranks)
    assert max(metrics(tmp_path)) == 8
    assert json.loads((tmp_path / "run.json").read_text())["reason"] == record["reason"]


def test_patience_without_evaluations_is_refused() -> None:
    needed = ["--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"]
    with pytest.raises(UserError, match="eval_strategy is no"):
        settings.read([*needed, "--early_stopping_patience", "2"], {})
    with pytest.raises(UserError, match="without early_stopping_patience"):
        settings.read([*needed, "--early_stopping_threshold", "0.1"], {})
