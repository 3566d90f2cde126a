"""The real trainer beside plain TRL, as benchmarks/sft_vs_trl.py runs them: same rows, same loss, same
gradient norm.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from podtune.run.world import World

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "sft_vs_trl.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("sft_vs_trl", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sft_vs_trl"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("lora", [False, True])
def test_six_steps_in_fp32_have_the_loss_and_gradient_norm_of_plain_trl(
    script: Any, tmp_path: Path, lora: bool
) -> None:
    args = argparse.Namespace(model=None, data=None, rows="short", batch=2, lora=lora)
    large, tokenizer = script.load_model(args)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = type(large)(
        type(large.config)(**{**large.config.to_dict(), **small, "layer_types": None, "no_rope_layers": None})
    )
    rows = script.load_rows(args, tokenizer).select(range(64))
    outcomes = {
        side: script.run(
            side, args, World(), model, tokenizer, rows, str(tmp_path), steps=6, seed=1, fp32=True
        )
        for side in script.SIDES
    }
    differences = script.compare(outcomes)
    assert max(differences.values()) < 1e-5
    assert len(outcomes["podtune"].losses) == len(outcomes["trl"].grad_norms) == 6


def test_sides_that_saw_other_rows_are_not_compared(script: Any) -> None:
    one, other = (script.Outcome(10, 1.0, 1.0, [1.0], [1.0], [[digest]]) for digest in "ab")
    with pytest.raises(SystemExit, match="same rows"):
        script.compare({"trl": one, "podtune": other})
